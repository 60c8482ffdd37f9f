"""Destroy a pipeline: remove what it has in every server, and leave everything else.

In:  the pipeline file, its sinks. Out: what there is, and its removal, place by place: first what
writes, so that nothing comes back, and last the topics, which tell what there is.
Invariant: every step may be repeated; a removal that was interrupted is finished by the next one.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cdc.config.settings import Pipeline
from cdc.errors import SettingsError
from cdc.generations.registry import Registry
from cdc.kafka.log_refusals import refuse_foreign
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.observe.run_log import read_runs
from cdc.removal import names, parts
from cdc.removal.parts import Part
from cdc.sink.contract import SchemaMismatch, Sink, positions

WATCH_S = 60.0
"""Seconds in which a worker that was busy may make the slot again."""
POLL_S = 1.0
NOWHERE = Position("", ())
Tell = Callable[[str], object]


@dataclass(frozen=True)
class Removal:
    """The removal of one pipeline: its parts, in the order in which they go."""

    pipeline: Pipeline
    parts: tuple[Part, ...]

    def find(self) -> dict[str, list[str]]:
        """List what there is, by place. Raises CdcError when a server can't be asked."""
        lines_by_place: dict[str, list[str]] = {}
        for part in self.parts:
            lines_by_place.setdefault(part.place, []).extend(part.find())
        return {place: lines for place, lines in lines_by_place.items() if lines}

    def run(self, tell: Tell, watch_s: float = WATCH_S) -> None:
        """Remove every part, and tell each thing that is gone; then watch the slot until `watch_s`
        seconds after its removal.

        Raises:
            CdcError: a server can't be reached or refuses; the next removal goes on there.
        """
        began = time.monotonic()
        for part in self.parts:
            lines = part.find()
            if not lines:
                continue
            part.remove()
            remaining = part.find()
            for line in lines:
                tell(f"{part.place}: {'kept' if line in remaining else 'removed'} {line}")
        self._watch_slot(tell, began + watch_s)

    def _watch_slot(self, tell: Tell, deadline: float) -> None:
        """Drop the slot again where a worker makes it again."""
        slot = parts.slot(self.pipeline)
        if (left_s := deadline - time.monotonic()) > POLL_S:
            tell(f"looking for {left_s:.0f} s whether a worker makes the slot again")
        while time.monotonic() < deadline:
            if slot.find():
                slot.remove()
                tell(
                    f"{slot.place}: removed slot {self.pipeline.pipeline}, which had been made again"
                )
            time.sleep(POLL_S)


def prepare(pipeline: Pipeline, sinks: Sequence[Sink]) -> Removal:
    """Find out what belongs to the pipeline. `sinks`: all of its file, and the state of documents
    where it has one.

    Raises:
        SettingsError: a run or a rebuild is at work. Discontinued: a view is another pipeline's.
        CdcError: Kafka or a sink can't be asked.
    """
    with Topics(pipeline.kafka) as kafka:
        _refuse_at_work(pipeline, kafka)
        topics = names.find_topics(pipeline, kafka)
        tables = names.view_tables(pipeline, topics)
        for sink in sinks:
            if sink.name in pipeline.sinks:
                _refuse_foreign(kafka, sink, tables)
    views = [parts.views(sink, tables) for sink in sinks]
    return Removal(
        pipeline,
        (
            parts.connector(pipeline),
            parts.slot(pipeline),
            parts.database(pipeline),
            *views,
            parts.topics(pipeline, topics),
        ),
    )


def _refuse_at_work(pipeline: Pipeline, kafka: Topics) -> None:
    """Raise SettingsError while something writes: it would make again what is removed."""
    if living := read_runs(pipeline, kafka).living:
        raise SettingsError(
            f"`cdc run` of {pipeline.pipeline} is at work on {', '.join(living)}.",
            hint="stop it (Ctrl-C or SIGTERM); one that was killed counts as dead after 30 s",
        )
    registry = Registry(pipeline, kafka).read()
    if busy := [sink for sink in pipeline.sinks if registry.for_sink(sink).in_progress]:
        raise SettingsError(
            f"A rebuild or rollback of {busy[0]} is at work.",
            hint="wait for its end: cdc -p FILE generations shows it",
        )


def _refuse_foreign(kafka: Topics, sink: Sink, tables: Sequence[Table]) -> None:
    """Raise Discontinued where a view is another pipeline's."""
    for table in tables:
        # A view that doesn't fit its table any more, or isn't there, is nobody else's.
        with suppress(SchemaMismatch):
            stored = positions(sink, [table])[table.qualified]
            existing = kafka.existing([table.topic])
            end = kafka.ends([table.topic])[table.topic] if existing else NOWHERE
            refuse_foreign(kafka, sink.name, table, stored, end)
