"""The endpoint of `cdc run`: /metrics for Prometheus, /livez and /readyz for a supervisor.

In:  the progress of every sink, at each tick of the run; a status of the whole pipeline, now and
     then. Out: HTTP answers, from a thread of its own.
Invariant: a request asks no server; it shows what was last published. Series are bounded: of the
views of a sink only the worst are shown.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc.apply.progress import Progress, RunState
from cdc.errors import SettingsError
from cdc.model.finding import Finding
from cdc.model.trace import kind, trace
from cdc.observe.status import SinkStatus, Status, ViewStatus

TICKING_S = 30.0
"""Seconds without a tick after which a run counts as hung."""
LOOK_S = 15.0
"""Seconds between two looks at the whole pipeline."""
VIEWS = 50
"""Most views of a sink that have series of their own: the worst."""
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

    def __init__(self) -> None:
        self.progress: tuple[Progress, ...] = ()
        self.status: Status | None = None
        self.ticked_at = time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        build = GaugeMetricFamily("cdc_build_info", "The version of cdc.", labels=["version"])
        build.add_metric([version("cdc")], 1)
        yield build
        yield from self._of_run()
        if self.status is not None:
            yield from _of_pipeline(self.status)
            yield from _of_views(self.status)

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
        """Say whether the loop of the run ticks."""
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


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """Yield a gauge, unless its value isn't known."""
    if value is not None:
        yield GaugeMetricFamily(name, text, value=value)


def _of_pipeline(status: Status) -> Iterator[Metric]:
    slot, heartbeat, connector = status.slot, status.heartbeat, status.connector
    if slot:
        yield from _gauge("cdc_slot_active", "1 while the slot is read.", float(slot.active))
        yield from _gauge("cdc_slot_lag_bytes", "Log not confirmed yet.", slot.lag_bytes)
        yield from _gauge(
            "cdc_slot_retained_bytes", "Log that Postgres keeps for the slot.", slot.retained_bytes
        )
        yield from _gauge(
            "cdc_slot_safe_bytes", "Log until the slot is given up.", slot.safe_wal_size
        )
    if connector:
        running = connector.state == "RUNNING" and set(connector.tasks) == {"RUNNING"}
        yield from _gauge("cdc_connector_up", "1 while connector and task run.", float(running))
    if heartbeat:
        yield from _gauge(
            "cdc_heartbeat_age_seconds", "Since the last heartbeat came.", heartbeat.age_s
        )
        yield from _gauge(
            "cdc_heartbeat_delay_seconds", "From its commit to Kafka.", heartbeat.delay_s
        )
    yield _of_findings(status.findings)


def _of_findings(findings: Iterable[Finding]) -> Metric:
    counts: dict[tuple[str, str, str], int] = {}
    for finding in findings:
        labels = (finding.code, finding.severity.value, finding.hop)
        counts[labels] = counts.get(labels, 0) + 1
    metric = GaugeMetricFamily(
        "cdc_findings", "Findings of `cdc status`.", labels=["code", "severity", "hop"]
    )
    for labels, count in counts.items():
        metric.add_metric(labels, count)
    return metric


def _of_views(status: Status) -> Iterator[Metric]:
    """Yield the lag of each sink, and of its worst views."""
    sinks = GaugeMetricFamily(
        "cdc_sink_lag_seconds", "Age of the oldest change that isn't applied.", labels=["sink"]
    )
    seconds = GaugeMetricFamily(
        "cdc_view_lag_seconds",
        "The same of a view; the worst views only.",
        labels=["sink", "table"],
    )
    records = GaugeMetricFamily(
        "cdc_view_lag_records",
        "Offsets that a view is behind; the worst views only.",
        labels=["sink", "table"],
    )
    quarantined = GaugeMetricFamily(
        "cdc_quarantined_records", "Records in quarantine.", labels=["sink"]
    )
    for sink in status.sinks:
        if sink.lag_seconds is not None:
            sinks.add_metric([sink.name], sink.lag_seconds)
        # Without Kafka neither is known.
        if any(view.lag_records is not None for view in sink.views):
            quarantined.add_metric([sink.name], sum(view.quarantined for view in sink.views))
        for view in _worst(sink):
            if view.lag_seconds is not None:
                seconds.add_metric([sink.name, view.table], view.lag_seconds)
            if view.lag_records is not None:
                records.add_metric([sink.name, view.table], view.lag_records)
    yield from (sinks, seconds, records, quarantined)


def _worst(sink: SinkStatus) -> Sequence[ViewStatus]:
    ranked = sorted(
        sink.views, key=lambda view: (view.lag_seconds or 0, view.lag_records or 0), reverse=True
    )
    return ranked[:VIEWS]


class RunEndpoint:
    """Serves a run's state over HTTP until `close`."""

    def __init__(self, port: int, look: Callable[[], Status]) -> None:
        """Begin to serve on 127.0.0.1. `look` asks for the pipeline's status; it is called every
        LOOK_S seconds in a thread of its own.

        Raises:
            SettingsError: the port is taken.
        """
        self._state, self._look = PublishedState(), look
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
        """Stop serving. A look that is under way ends by itself."""
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()

    def _look_repeatedly(self) -> None:
        while not self._closed.is_set():
            try:
                self._state.status = self._look()
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
