"""The endpoint of `cdc run`: /metrics for Prometheus, /livez and /readyz for a supervisor.

In:  the progress of every sink, at each tick of the run; a status of the whole pipeline, now and
     then. Out: HTTP answers, from a thread of its own.
Invariant: a request asks no server; it shows what was last published.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc.apply.progress import Progress, RunState
from cdc.errors import SettingsError
from cdc.model.trace import kind, trace
from cdc.observe.pipeline_metrics import build_info, metrics_of
from cdc.observe.status import Status

TICKING_S = 30.0
"""Seconds without a tick after which a run counts as hung."""
LOOK_S = 15.0
"""Seconds between two looks at the whole pipeline."""
END_S = 8.0
"""Seconds that a look has to end: longer than one takes while a server hangs."""
OUTCOMES = {
    "applied": "rows",
    "folded": "folded",
    "stale": "stale",
    "quarantined": "quarantined",
}
"""Labels by field of `Applied`."""
Answer = tuple[bool, str]
log = structlog.get_logger()


class PublishedState(Collector):
    """What was last published, as Prometheus reads it. Any thread may publish."""

    def __init__(self, spark_lives: Callable[[], bool]) -> None:
        self._spark_lives = spark_lives
        self.progress: tuple[Progress, ...] = ()
        self.status: Status | None = None
        self.ticked_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        yield build_info()
        yield from self._of_run()
        if self.status is not None:
            yield from metrics_of(self.status)

    def _of_run(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "cdc_sink_up", "1 while a sink applies or has caught up, 0 otherwise.", labels=["sink"]
        )
        records = CounterMetricFamily(
            "cdc_records",
            "Records since the run began, by what became of them.",
            labels=["sink", "outcome"],
        )
        batches = CounterMetricFamily(
            "cdc_batches", "Batches applied since the run began.", labels=["sink"]
        )
        restarts = CounterMetricFamily(
            "cdc_restarts",
            "Restarts of a sink's query since the run began.",
            labels=["sink", "reason"],
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
            batches.add_metric([progress.sink], progress.batches)
            for reason, count in progress.restarts.items():
                restarts.add_metric([progress.sink, reason], count)
            waiting.add_metric([progress.sink], len(progress.aside))
            silence.add_metric([progress.sink], progress.looked_s)
        yield from (state, records, batches, restarts, waiting, silence)

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
        port: int,
        diagnose: Callable[[], Status],
        spark_lives: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin to serve on 127.0.0.1. `diagnose` asks for the pipeline's status; it is called every
        LOOK_S seconds in a thread of its own. `spark_lives` is called by each probe.

        Raises:
            SettingsError: the port is taken.
        """
        self._state, self._diagnose = PublishedState(spark_lives), diagnose
        self._closed = threading.Event()
        registry = CollectorRegistry()
        registry.register(self._state)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(
                "127.0.0.1", port, self._answer, server_class=_Server, handler_class=_Handler
            )
        except OSError as error:
            raise SettingsError(
                f"Port {port} is taken: {error.strerror}.",
                hint="choose another port: --metrics PORT",
            ) from error
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._server.serve_forever, self._look_repeatedly)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def port(self) -> int:
        """The port that is served, also where 0 was asked for."""
        return int(self._server.server_port)

    def publish(self, progress: Sequence[Progress]) -> None:
        """Take over the progress of the sinks; called at every tick of the run."""
        self._state.progress = tuple(progress)
        self._state.ticked_at = time.monotonic()

    def close(self) -> None:
        """Stop serving, once a look that is under way has ended: a program that ends while a
        client's native code is at work may crash.
        """
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(END_S)

    def _look_repeatedly(self) -> None:
        while not self._closed.is_set():
            try:
                self._state.status = self._diagnose()
            except Exception as error:
                log.warning("pipeline_not_looked_at", error=kind(error), exception=trace(error))
            self._closed.wait(LOOK_S)

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


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base
        """Log nothing: probes come every few seconds."""
