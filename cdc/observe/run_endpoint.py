"""The endpoint of `cdc run`: /metrics for Prometheus, /livez and /readyz for a supervisor.

In:  the progress of every sink, at each tick of the run; looks at the whole pipeline. Out: HTTP
     answers, from a thread of its own.
Invariant: a request asks no server; it shows what was last published.

Nobody is asked for a token: what is served has names of tables and sinks, codes and numbers, no
values of rows. It changes nothing.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cdc.apply.progress import Progress, RunState
from cdc.errors import SettingsError
from cdc.observe.pipeline_metrics import Descriptions, Figures, LookMetrics
from cdc.observe.sampler import Sampler
from cdc.observe.status import Status

REQUEST_S = 10.0
"""Seconds after which a client that sends no request, or takes no answer, is disconnected: each has
a thread.
"""
TICKING_S = 30.0
"""Seconds without a tick after which a run counts as hung."""
OUTCOMES = {
    "applied": "rows",
    "folded": "folded",
    "stale": "stale",
    "quarantined": "quarantined",
}
"""Labels by field of `Applied`."""
GAUGES: Descriptions = {
    "cdc_sink_up": ("1 while a sink applies or has caught up, 0 otherwise.", "sink"),
    "cdc_tables_waiting": ("Tables that wait for a command.", "sink"),
    "cdc_sink_silence_seconds": ("Seconds since the sink last answered.", "sink"),
}
COUNTERS: Descriptions = {
    "cdc_records": ("Records since the run began, by what became of them.", "sink", "outcome"),
    "cdc_table_records": (
        "The same by table, of the first tables that change; the others are counted as one.",
        "sink",
        "table",
        "outcome",
    ),
    "cdc_batches": ("Batches applied since the run began.", "sink"),
    "cdc_batch_phase_seconds": (
        "Seconds since the run began by what a batch's time goes to.",
        "sink",
        "phase",
    ),
    "cdc_restarts": ("Restarts of a sink's stream since the run began.", "sink", "reason"),
    "cdc_retries": (
        "Attempts of a batch or a query after a failure, since the run began.",
        "sink",
        "class",
    ),
}
Answer = tuple[bool, str]


class PublishedState(Collector):
    """What was last published, as Prometheus reads it. Any thread may publish."""

    def __init__(self, looks: Sampler[Status], spark_lives: Callable[[], bool]) -> None:
        self._looks = LookMetrics(looks)
        self._spark_lives = spark_lives
        self.progress: tuple[Progress, ...] = ()
        self.ticked_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        figures = Figures(GAUGES, COUNTERS)
        for progress in self.progress:
            sink = progress.sink
            good = progress.state in (RunState.APPLYING, RunState.CAUGHT_UP)
            figures.add("cdc_sink_up", good, sink)
            figures.add("cdc_tables_waiting", len(progress.aside), sink)
            figures.add("cdc_sink_silence_seconds", progress.looked_s, sink)
            for outcome, field in OUTCOMES.items():
                figures.add("cdc_records", getattr(progress.applied, field), sink, outcome)
                for table, applied in progress.tables.items():
                    count = getattr(applied, field)
                    figures.add("cdc_table_records", count, sink, table, outcome)
            figures.add("cdc_batches", progress.batches, sink)
            for phase, seconds in progress.phases_s.items():
                figures.add("cdc_batch_phase_seconds", seconds, sink, phase)
            for reason, count in progress.restarts.items():
                figures.add("cdc_restarts", count, sink, reason)
            for failure, count in progress.retries.items():
                figures.add("cdc_retries", count, sink, failure)
        yield from figures.metrics()
        yield from self._looks.collect()

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
        looks: Sampler[Status],
        spark_lives: Callable[[], bool],
        port: int,
        address: str,
    ) -> None:
        """Begin to serve. `looks`: those at the whole pipeline, which others start and
        end. `spark_lives` is called by each probe. `port` 0: a free one.

        Raises:
            SettingsError: the port is taken, or the address isn't this machine's.
        """
        self._state = PublishedState(looks, spark_lives)
        registry = CollectorRegistry()
        registry.register(self._state)
        self._metrics = make_wsgi_app(registry)
        kind = _Server6 if ":" in address else _Server
        try:
            self._server = make_server(
                address, port, self._answer, server_class=kind, handler_class=RequestHandler
            )
        except OSError as error:
            raise SettingsError(
                f"Can't listen on {address}, port {port}: {error.strerror}.",
                hint="choose another port or address: --metrics PORT --metrics-address ADDRESS",
            ) from error
        self.port = int(self._server.server_port)
        shown = f"[{address}]" if kind is _Server6 else address
        self.url = f"http://{shown}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def publish(self, progress: Sequence[Progress]) -> None:
        """Take over the progress of the sinks; called at every tick of the run."""
        self._state.progress = tuple(progress)
        self._state.ticked_at = time.monotonic()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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

    def server_bind(self) -> None:
        """Listen, without asking a name server for this machine's name, as the base does."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class RequestHandler(WSGIRequestHandler):
    timeout = REQUEST_S

    def handle(self) -> None:
        """Answer a request; a client that is slow or goes away is no news."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base
        """Log nothing: probes come every few seconds."""
