"""Find the cures of a batch that is in the sink, once nobody knows its outcome any more: its run
was killed before it had settled the entries, or the broker was away then, or an answer was lost.

The records are read again, from the oldest entry of a partition on at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cdc.apply.batch.size import MOST
from cdc.apply.stream_options import Executors
from cdc.apply.views import Views
from cdc.kafka.log_reader import OffsetRange
from cdc.model.outcome import Advance
from cdc.quarantine.store import SinkQuarantine
from cdc.sink.contract import Key
from cdc.sink.cures import find_cures


def last_steps(views: Views) -> list[Advance]:
    """The steps of the last batch that the live views have; they may begin too early.

    It had `MOST` offsets at most. What came before was settled, or this batch had not begun.
    """
    plan, live_at = views.plan, views.sink.live_at
    steps = []
    for table in plan.tables:
        if position := live_at.get(table.topic):
            start = replace(position, offsets=tuple(max(0, o - MOST) for o in position.offsets))
            steps.append(Advance(table, start, position, plan.floor(table)))
    return steps


def cures_of(
    executors: Executors, views: Views, quarantine: SinkQuarantine, steps: Sequence[Advance]
) -> Mapping[Key, int]:
    """Find the rows that these steps have cured: see `Outcome.cured`. Asks no server where no
    table of them has entries before a step's end.

    Raises:
        CdcError: from the broker.
    """
    entries = quarantine.entries(step.table.topic for step in steps)
    spans: dict[tuple[str, int], tuple[int, int, str]] = {}
    for step in steps:
        topic = step.table.topic
        for partition, (start, end) in enumerate(
            zip(step.start_offsets, step.end.offsets, strict=True)
        ):
            if offsets := entries.get((topic, partition)):
                # Only what comes after an entry can cure its row.
                first = max(start, min(offsets) + 1)
                spans[topic, partition] = first, end, step.end.topic_id
    starts = views.kafka.starts(sorted({topic for topic, _ in spans})) if spans else {}
    ranges = tuple(
        OffsetRange(topic, partition, first, end, topic_id)
        for (topic, partition), (start, end, topic_id) in spans.items()
        if (first := max(start, starts[topic].offsets[partition])) < end
    )
    if not ranges:
        return {}
    return find_cures(steps, executors.records(ranges), views.reading, entries, views.sink.name)
