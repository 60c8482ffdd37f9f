"""Metrics of `cdc verify --every` and of the runs, for Prometheus:
http://HOST:PORT/metrics.
"""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app

from cdc.apply.progress import Progress
from cdc.observe.http_server import HttpServer, Listener
from cdc.verify.comparison import Comparison

VIEW = ("sink", "table")
KINDS = ("missing", "extra", "different")


class Metrics:
    """An HTTP endpoint with the results of the last comparison. It serves in a thread of its own
    until `close`.
    """

    def __init__(self, listener: Listener) -> None:
        """Start serving.

        Raises:
            SettingsError: the port is taken, or the address isn't this machine's.
        """
        registry = CollectorRegistry()
        self._differences = Gauge(
            "cdc_verify_differences", "Rows that differ.", (*VIEW, "kind"), registry=registry
        )
        self._undecided = Gauge(
            "cdc_verify_undecided", "Rows that changed at every look.", VIEW, registry=registry
        )
        self._rows = Gauge(
            "cdc_verify_source_rows",
            "Rows of the source that were compared.",
            VIEW,
            registry=registry,
        )
        self._finished_at = Gauge(
            "cdc_verify_timestamp_seconds",
            "When the last comparison ended, Unix time.",
            registry=registry,
        )
        self._failures = Counter(
            "cdc_verify_failures", "Comparisons that could not be made.", registry=registry
        )
        self._up = Gauge(
            "cdc_verify_up", "0 once a comparison can't be made, until one can.", registry=registry
        )
        self._up.set(1)
        restarts = "How often a sink's stream restarted since its run began."
        self._restarts = Gauge(
            "cdc_query_restarts", restarts, ("sink", "reason"), registry=registry
        )
        self._views: set[tuple[str, str]] = set()
        """The sink and table of each view of the last comparison."""
        self._server = HttpServer(make_wsgi_app(registry), listener)
        self.url = self._server.url

    def publish_comparisons(self, results: Sequence[Comparison]) -> None:
        """Replace the figures of all views. Called after each comparison. The differences of a view
        stay until it is proved equal: nobody has mended an undecided one. Views that weren't to be
        compared any more have no figures.
        """
        views = {(result.sink, result.table) for result in results}
        for view in self._views - views:
            self._undecided.remove(*view)
            self._rows.remove(*view)
            for kind in KINDS:
                self._differences.remove(*view, kind)
        self._views = views
        for result in results:
            if result.verdict != "undecided":
                for kind in KINDS:
                    count = getattr(result, kind)
                    self._differences.labels(result.sink, result.table, kind).set(count)
            self._undecided.labels(result.sink, result.table).set(result.undecided)
            self._rows.labels(result.sink, result.table).set(result.source_rows)
        self._finished_at.set(time.time())
        self._up.set(1)

    def publish_restarts(self, progress: Iterable[Progress]) -> None:
        """Publish how often each sink of a run was restarted, and why, as the runs last wrote
        it.
        """
        for snapshot in progress:
            for reason, count in snapshot.restarts.items():
                self._restarts.labels(snapshot.sink, reason).set(count)

    def count_failure(self) -> None:
        """Count a comparison that could not be made."""
        self._failures.inc()
        self._up.set(0)

    def close(self) -> None:
        """Stop serving, and wait for the thread."""
        self._server.close()
