"""What `cdc verify --every` has found, and `cdc run` beside it, for Prometheus to fetch: http://HOST:PORT/metrics."""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from cdc.apply.progress import Progress
from cdc.errors import SettingsError
from cdc.verify.comparison import Comparison

VIEW = ("sink", "table")


class Metrics:
    """Serves from its making until `close`; what is served is the last comparison's."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        """Raises SettingsError when the port is taken."""
        own = CollectorRegistry()
        self._differences = Gauge("cdc_verify_differences", "Rows that differ.", (*VIEW, "kind"), registry=own)
        self._undecided = Gauge("cdc_verify_undecided", "Rows that changed at every look.", VIEW, registry=own)
        self._rows = Gauge("cdc_verify_source_rows", "Rows of the source that were compared.", VIEW, registry=own)
        self._at = Gauge("cdc_verify_timestamp_seconds", "When the last comparison ended, Unix time.", registry=own)
        self._failures = Counter("cdc_verify_failures", "Comparisons that could not be made.", registry=own)
        restarts = "How often a sink's query was started again since its run began."
        self._restarts = Gauge("cdc_query_restarts", restarts, ("sink", "reason"), registry=own)
        try:
            self._server, self._thread = start_http_server(port, address, own)
        except OSError as error:
            raise SettingsError(f"Port {port} is taken: {error.strerror}.", hint="--metrics PORT") from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def tell(self, found: Sequence[Comparison]) -> None:
        for one in found:
            for kind in ("missing", "extra", "different"):
                self._differences.labels(one.sink, one.table, kind).set(getattr(one, kind))
            self._undecided.labels(one.sink, one.table).set(one.undecided)
            self._rows.labels(one.sink, one.table).set(one.source_rows)
        self._at.set(time.time())

    def tell_restarts(self, progress: Iterable[Progress]) -> None:
        """Of the runs on this machine, as they published it last."""
        for snapshot in progress:
            for reason, count in snapshot.restarts.items():
                self._restarts.labels(snapshot.sink, reason).set(count)

    def failed(self) -> None:
        self._failures.inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
