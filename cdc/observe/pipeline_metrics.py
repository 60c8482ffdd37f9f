"""The figures of a pipeline's status for Prometheus, as `cdc run` and `cdc serve` have them.

Series are bounded: of the views of a sink only the worst are shown. What isn't known has none.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cdc.model.generation import generation_time
from cdc.observe.sampler import Sampler
from cdc.observe.status import SinkStatus, Status

VIEWS = 50
"""Most views of a sink that have series of their own: the worst."""
Descriptions = Mapping[str, tuple[str, ...]]
"""By name of a metric: what it says, then the names of its labels."""
GAUGES: Descriptions = {
    "cdc_build_info": ("The version of cdc.", "version"),
    "cdc_look_up": ("1 while looks succeed.",),
    "cdc_look_age_seconds": ("Since the last look.",),
    "cdc_slot_active": ("1 while the slot is read.",),
    "cdc_slot_lag_bytes": ("Log not confirmed yet.",),
    "cdc_slot_retained_bytes": ("Log that Postgres keeps for the slot.",),
    "cdc_slot_safe_bytes": ("Log until the slot is given up.",),
    "cdc_slot_loss_seconds": (
        "Until the slot is given up, at the present pace; none while nothing holds it back.",
    ),
    "cdc_connector_up": ("1 while connector and task run.",),
    "cdc_heartbeat_age_seconds": ("Since the last heartbeat came.",),
    "cdc_heartbeat_delay_seconds": ("From its commit to Kafka.",),
    "cdc_heartbeat_interval_seconds": ("Between two heartbeats.",),
    "cdc_findings": ("Findings of `cdc status`.", "code", "severity", "hop"),
    "cdc_sink_paused": ("1 while somebody has paused the sink.", "sink"),
    "cdc_sink_lag_seconds": ("Age of the oldest change that isn't applied.", "sink"),
    "cdc_sink_catch_up_seconds": (
        "Until the sink has caught up, at the pace of the last minutes; none where it falls behind.",
        "sink",
    ),
    "cdc_quarantined_records": ("Records in quarantine.", "sink"),
    "cdc_view_lag_seconds": ("The same of a view; the worst views only.", "sink", "table"),
    "cdc_view_lag_records": (
        "Offsets that a view is behind; the worst views only.",
        "sink",
        "table",
    ),
    "cdc_view_generation_timestamp_seconds": (
        "When the build of the live generation began, Unix time; the worst views only, and none for"
        " a first generation.",
        "sink",
        "table",
    ),
    "cdc_view_proved_timestamp_seconds": (
        "Through which moment the view is proved, Unix time; the worst views only.",
        "sink",
        "table",
    ),
    "cdc_view_compared_timestamp_seconds": (
        "Since when all rows of the view were compared, Unix time; the worst views only.",
        "sink",
        "table",
    ),
    "cdc_view_repaired_rows": (
        "Rows that `cdc run` has repaired by itself since `cdc verify` compared all of them; the worst"
        " views only.",
        "sink",
        "table",
    ),
    "cdc_rebuild_up": ("1 while its command is alive.", "sink", "phase"),
    "cdc_rebuild_done_records": ("Records replayed.", "sink", "phase"),
    "cdc_rebuild_total_records": ("Records to replay.", "sink", "phase"),
    "cdc_late_changes": (
        "Changes that came after the windows of a view had closed.",
        "view",
    ),
    "cdc_view_clock_seconds": ("The clock of a view, Unix time: what now() is in it.", "view"),
}


class Figures:
    """Metrics that are filled sample by sample."""

    def __init__(self, gauges: Descriptions, counters: Descriptions | None = None) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(name, text, labels=labels)
            for name, (text, *labels) in gauges.items()
        }
        for name, (text, *labels) in (counters or {}).items():
            self._families[name] = CounterMetricFamily(name, text, labels=labels)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, unless its value isn't known."""
        if value is not None:
            self._families[name].add_metric(labels, float(value))

    def metrics(self) -> Iterator[Metric]:
        return (family for family in self._families.values() if family.samples)


class LookMetrics(Collector):
    """The metrics of what was last seen, and how old that is; and the version."""

    def __init__(self, looks: Sampler[Status]) -> None:
        self._looks = looks

    def collect(self) -> Iterator[Metric]:
        """Yield every metric. Called by each scrape."""
        figures = Figures(GAUGES)
        figures.add("cdc_build_info", 1, version("cdc"))
        figures.add("cdc_look_up", self._looks.trouble is None)
        if sample := self._looks.sample:
            figures.add("cdc_look_age_seconds", time.time() - sample.taken_at)
            _add_status(figures, sample.value)
        return figures.metrics()


def _add_status(figures: Figures, status: Status) -> None:
    if slot := status.slot:
        figures.add("cdc_slot_active", slot.active)
        figures.add("cdc_slot_lag_bytes", slot.lag_bytes)
        figures.add("cdc_slot_retained_bytes", slot.retained_bytes)
        figures.add("cdc_slot_safe_bytes", slot.safe_wal_size)
        figures.add("cdc_slot_loss_seconds", status.slot_loss_s)
    if status.connector:
        figures.add("cdc_connector_up", status.connector.running)
    if heartbeat := status.heartbeat:
        figures.add("cdc_heartbeat_age_seconds", heartbeat.age_s)
        figures.add("cdc_heartbeat_delay_seconds", heartbeat.delay_s)
        figures.add("cdc_heartbeat_interval_seconds", heartbeat.interval_s)
    counts = Counter(
        (finding.code, finding.severity.value, finding.hop) for finding in status.findings
    )
    for labels, count in counts.items():
        figures.add("cdc_findings", count, *labels)
    for sink in status.sinks:
        _add_sink(figures, sink)
    if documents := status.documents:
        for view, number in documents.late.items():
            figures.add("cdc_late_changes", number, view)
        for view, clock in documents.clocks.items():
            figures.add("cdc_view_clock_seconds", clock.at, view)


def _add_sink(figures: Figures, sink: SinkStatus) -> None:
    """Add the lag of a sink, its worst views, and how far its rebuild or rollback is."""
    figures.add("cdc_sink_paused", sink.paused_by is not None, sink.name)
    figures.add("cdc_sink_lag_seconds", sink.lag_seconds, sink.name)
    figures.add("cdc_sink_catch_up_seconds", sink.catch_up_s, sink.name)
    # Without Kafka neither lag nor quarantine is known.
    if any(view.lag_records is not None for view in sink.views):
        quarantined = sum(view.quarantined for view in sink.views)
        figures.add("cdc_quarantined_records", quarantined, sink.name)
    ranked = sorted(
        sink.views, key=lambda view: (view.lag_seconds or 0, view.lag_records or 0), reverse=True
    )
    for view in ranked[:VIEWS]:
        place = (sink.name, view.table)
        begun = generation_time(view.generation) if view.generation else None
        figures.add("cdc_view_lag_seconds", view.lag_seconds, *place)
        figures.add("cdc_view_lag_records", view.lag_records, *place)
        figures.add("cdc_view_generation_timestamp_seconds", begun, *place)
        figures.add("cdc_view_proved_timestamp_seconds", view.proved_through, *place)
        figures.add("cdc_view_compared_timestamp_seconds", view.complete_at, *place)
        if view.proved_through is not None:
            figures.add("cdc_view_repaired_rows", view.repaired, *place)
    if build := sink.build:
        figures.add("cdc_rebuild_up", build.at_work, sink.name, build.phase)
        figures.add("cdc_rebuild_done_records", build.done, sink.name, build.phase)
        figures.add("cdc_rebuild_total_records", build.total, sink.name, build.phase)
