"""The endpoint of `cdc run`: /metrics for Prometheus, /livez and /readyz for a supervisor.

In:  the progress of every sink, at each tick of the run; looks at the whole pipeline. Out: HTTP
     answers, from a thread of its own.
Invariant: a request asks no server; it shows what was last published.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc.apply.progress import Progress, RunState
from cdc.observe.http_server import HttpServer, Listener
from cdc.observe.pipeline_metrics import build_info, metrics_of_looks
from cdc.observe.sampler import Sampler
from cdc.observe.status import Status

TICKING_S = 30.0
"""Seconds without a tick after which a run counts as hung."""
OUTCOMES = {
    "applied": "rows",
    "folded": "folded",
    "stale": "stale",
    "quarantined": "quarantined",
}
"""Labels by field of `Applied`."""
Answer = tuple[bool, str]


class PublishedState(Collector):
    """What was last published, as Prometheus reads it. Any thread may publish."""

    def __init__(self, looks: Sampler[Status], spark_lives: Callable[[], bool]) -> None:
        self._looks = looks
        self._spark_lives = spark_lives
        self.progress: tuple[Progress, ...] = ()
        self.ticked_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        yield build_info()
        yield from self._of_run()
        yield from metrics_of_looks(self._looks)

    def _of_run(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "cdc_sink_up", "1 while a sink applies or has caught up, 0 otherwise.", labels=["sink"]
        )
        records = CounterMetricFamily(
            "cdc_records",
            "Records since the run began, by what became of them.",
            labels=["sink", "outcome"],
        )
        of_tables = CounterMetricFamily(
            "cdc_table_records",
            "The same by table, of the first tables that change; the others are counted as one.",
            labels=["sink", "table", "outcome"],
        )
        batches = CounterMetricFamily(
            "cdc_batches", "Batches applied since the run began.", labels=["sink"]
        )
        phases = CounterMetricFamily(
            "cdc_batch_phase_seconds",
            "Seconds since the run began by what a batch's time goes to.",
            labels=["sink", "phase"],
        )
        restarts = CounterMetricFamily(
            "cdc_restarts",
            "Restarts of a sink's stream since the run began.",
            labels=["sink", "reason"],
        )
        retries = CounterMetricFamily(
            "cdc_retries",
            "Attempts of a batch or a query after a failure, since the run began.",
            labels=["sink", "class"],
        )
        waiting = GaugeMetricFamily(
            "cdc_tables_waiting", "Tables that wait for a command.", labels=["sink"]
        )
        silence = GaugeMetricFamily(
            "cdc_sink_silence_seconds", "Seconds since the sink last answered.", labels=["sink"]
        )
        for progress in self.progress:
            good = progress.state in (RunState.APPLYING, RunState.CAUGHT_UP)
            state.add_metric([progress.sink], float(good))
            for outcome, field in OUTCOMES.items():
                records.add_metric([progress.sink, outcome], getattr(progress.applied, field))
                for table, applied in progress.tables.items():
                    labels = [progress.sink, table, outcome]
                    of_tables.add_metric(labels, getattr(applied, field))
            batches.add_metric([progress.sink], progress.batches)
            for phase, seconds in progress.phases_s.items():
                phases.add_metric([progress.sink, phase], seconds)
            for reason, count in progress.restarts.items():
                restarts.add_metric([progress.sink, reason], count)
            for failure, count in progress.retries.items():
                retries.add_metric([progress.sink, failure], count)
            waiting.add_metric([progress.sink], len(progress.aside))
            silence.add_metric([progress.sink], progress.looked_s)
        yield from (state, records, of_tables, batches, phases, restarts, retries, waiting, silence)

    def live(self) -> Answer:
        """Say whether the loop of the run ticks, and Spark's process lives."""
        if not self._spark_lives():
            return False, "Spark's process has ended"
        silent_s = time.monotonic() - self.ticked_at
        return silent_s < TICKING_S, f"last tick {silent_s:.0f} s ago"

    def ready(self) -> Answer:
        """Say whether every sink has read its position. One that waits for its server is ready: to
        restart the process would help it nothing, and hold up the others.
        """
        starting = [
            progress.sink for progress in self.progress if progress.state is RunState.LOADING
        ]
        if not self.progress:
            return False, "no sink has begun"
        return (
            not starting,
            f"starting: {', '.join(starting)}" if starting else "all sinks have begun",
        )


class RunEndpoint:
    """Serves a run's state over HTTP until `close`."""

    def __init__(
        self,
        listener: Listener,
        looks: Sampler[Status],
        spark_lives: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin to serve. `looks`: those at the whole pipeline, which others start and
        end. `spark_lives` is called by each probe.

        Raises:
            SettingsError: the port is taken, or the address isn't this machine's.
        """
        self._state = PublishedState(looks, spark_lives)
        registry = CollectorRegistry()
        registry.register(self._state)
        self._metrics = make_wsgi_app(registry)
        self._server = HttpServer(self._answer, listener)
        self.url = self._server.url
        self.port = self._server.port

    def publish(self, progress: Sequence[Progress]) -> None:
        """Take over the progress of the sinks; called at every tick of the run."""
        self._state.progress = tuple(progress)
        self._state.ticked_at = time.monotonic()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _answer(self, environment: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        if path == "/metrics":
            return self._metrics(environment, respond)  # type: ignore[no-any-return]
        checks = {"/livez": self._state.live, "/readyz": self._state.ready}
        if path not in checks:
            respond("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there are /metrics, /livez and /readyz\n"]
        good, text = checks[path]()
        status = "200 OK" if good else "503 Service Unavailable"
        respond(status, [("Content-Type", "text/plain")])
        return [f"{text}\n".encode()]
