"""The figures of a pipeline's status for Prometheus, as `cdc run` and `cdc serve` have them.

Series are bounded: of the views of a sink only the worst are shown. What isn't known has none.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily, Metric

from cdc.model.finding import Finding
from cdc.model.generation import generation_time
from cdc.observe.sampler import Sampler
from cdc.observe.status import SinkStatus, Status, ViewStatus

VIEWS = 50
"""Most views of a sink that have series of their own: the worst."""


def build_info() -> Metric:
    """Make the metric that names the version."""
    build = GaugeMetricFamily("cdc_build_info", "The version of cdc.", labels=["version"])
    build.add_metric([version("cdc")], 1)
    return build


def metrics_of_looks(looks: Sampler[Status]) -> Iterator[Metric]:
    """Yield every metric of what was last seen, and how old that is."""
    yield from _gauge("cdc_look_up", "1 while looks succeed.", float(looks.trouble is None))
    if looks.sample:
        age_s = time.time() - looks.sample.taken_at
        yield from _gauge("cdc_look_age_seconds", "Since the last look.", age_s)
        yield from metrics_of(looks.sample.value)


def metrics_of(status: Status) -> Iterator[Metric]:
    """Yield every metric of a diagnosed status."""
    yield from _of_pipeline(status)
    yield from _of_views(status)
    if status.documents:
        late = GaugeMetricFamily(
            "cdc_late_changes",
            "Changes that came after the windows of a view had closed.",
            labels=["view"],
        )
        for view, number in status.documents.late.items():
            late.add_metric([view], number)
        yield late
        clocks = GaugeMetricFamily(
            "cdc_view_clock_seconds",
            "The clock of a view, Unix time: what now() is in it.",
            labels=["view"],
        )
        for view, clock in status.documents.clocks.items():
            clocks.add_metric([view], clock.at)
        yield clocks
    yield from _of_builds(status.sinks)


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """Yield a gauge, unless its value isn't known."""
    if value is not None:
        yield GaugeMetricFamily(name, text, value=value)


def _of_pipeline(status: Status) -> Iterator[Metric]:
    slot = status.slot
    heartbeat = status.heartbeat
    connector = status.connector
    if slot:
        yield from _gauge("cdc_slot_active", "1 while the slot is read.", float(slot.active))
        yield from _gauge("cdc_slot_lag_bytes", "Log not confirmed yet.", slot.lag_bytes)
        yield from _gauge(
            "cdc_slot_retained_bytes", "Log that Postgres keeps for the slot.", slot.retained_bytes
        )
        yield from _gauge(
            "cdc_slot_safe_bytes", "Log until the slot is given up.", slot.safe_wal_size
        )
        yield from _gauge(
            "cdc_slot_loss_seconds",
            "Until the slot is given up, at the present pace; none while nothing holds it back.",
            status.slot_loss_s,
        )
    if connector:
        yield from _gauge(
            "cdc_connector_up", "1 while connector and task run.", float(connector.running)
        )
    if heartbeat:
        yield from _gauge(
            "cdc_heartbeat_age_seconds", "Since the last heartbeat came.", heartbeat.age_s
        )
        yield from _gauge(
            "cdc_heartbeat_delay_seconds", "From its commit to Kafka.", heartbeat.delay_s
        )
        yield from _gauge(
            "cdc_heartbeat_interval_seconds", "Between two heartbeats.", heartbeat.interval_s
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
    catch_up = GaugeMetricFamily(
        "cdc_sink_catch_up_seconds",
        "Until the sink has caught up, at the pace of the last minutes; none where it falls behind.",
        labels=["sink"],
    )
    paused = GaugeMetricFamily(
        "cdc_sink_paused", "1 while somebody has paused the sink.", labels=["sink"]
    )
    begun = GaugeMetricFamily(
        "cdc_view_generation_timestamp_seconds",
        "When the build of the live generation began, Unix time; the worst views only, and none for"
        " a first generation.",
        labels=["sink", "table"],
    )
    for sink in status.sinks:
        paused.add_metric([sink.name], float(sink.paused_by is not None))
        if sink.lag_seconds is not None:
            sinks.add_metric([sink.name], sink.lag_seconds)
        if sink.catch_up_s is not None:
            catch_up.add_metric([sink.name], sink.catch_up_s)
        # Without Kafka neither is known.
        if any(view.lag_records is not None for view in sink.views):
            quarantined.add_metric([sink.name], sum(view.quarantined for view in sink.views))
        for view in _worst(sink):
            if view.lag_seconds is not None:
                seconds.add_metric([sink.name, view.table], view.lag_seconds)
            if view.lag_records is not None:
                records.add_metric([sink.name, view.table], view.lag_records)
            if view.generation:
                begun.add_metric([sink.name, view.table], generation_time(view.generation))
    yield from (paused, sinks, catch_up, seconds, records, quarantined, begun)


def _of_builds(sinks: Iterable[SinkStatus]) -> Iterator[Metric]:
    """Yield how far rebuilds and rollbacks are that aren't complete."""
    labels = ["sink", "phase"]
    up = GaugeMetricFamily("cdc_rebuild_up", "1 while its command is alive.", labels=labels)
    done = GaugeMetricFamily("cdc_rebuild_done_records", "Records replayed.", labels=labels)
    total = GaugeMetricFamily("cdc_rebuild_total_records", "Records to replay.", labels=labels)
    for sink in sinks:
        if build := sink.build:
            place = [sink.name, build.phase]
            up.add_metric(place, float(build.at_work))
            done.add_metric(place, build.done)
            total.add_metric(place, build.total)
    yield from (up, done, total)


def _worst(sink: SinkStatus) -> Sequence[ViewStatus]:
    ranked = sorted(
        sink.views, key=lambda view: (view.lag_seconds or 0, view.lag_records or 0), reverse=True
    )
    return ranked[:VIEWS]
