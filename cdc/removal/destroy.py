"""Destroy a pipeline: remove what it has in every server, and leave everything else.

In:  the pipeline file, its sinks. Out: what there is, and its removal, place by place: first what
writes, so that nothing comes back, and last the topics, which record what there is.
Invariant: every step may be repeated; a removal that was interrupted is finished by the next one.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.control import registrations
from cdc.errors import SettingsError
from cdc.generations.registry import Registry
from cdc.kafka.ledger import Ledger
from cdc.kafka.log_refusals import refuse_foreign
from cdc.kafka.topic_setup import topic_specs
from cdc.kafka.topics import Topics
from cdc.migrations import removal
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.observe.run_log import read_runs
from cdc.postgres import source
from cdc.sink.contract import Applier, SchemaMismatch, positions

WATCH_S = 60.0
"""Seconds in which a worker that was busy may make the slot again."""
POLL_S = 1.0
NOWHERE = Position("", ())
Report = Callable[[str], object]


def find_topics(pipeline: Pipeline, kafka: Topics) -> list[str]:
    """Find the topics of the pipeline that exist, also of tables and views that the file no longer
    names. Raises ConnectorError.

    Those come from what the pipeline itself has noted, so that no topic of others is among them,
    whatever its name begins with.
    """
    names = {*topic_specs(pipeline), *Ledger(pipeline, kafka).read().original_shapes}
    if registration := registrations.read(kafka, pipeline):
        names |= {pipeline.topic(table) for table in registration.names}
    names |= {topic for topic in kafka.names() if topic.startswith(pipeline.view_topic(""))}
    return sorted(kafka.existing(names))


def view_tables(pipeline: Pipeline, topics: Iterable[str]) -> list[Table]:
    """List what sinks may have views of, by name only: of these topics, and of the file."""
    captured = [pipeline.topic(entry.table) for entry in pipeline.source.tables]
    views = [pipeline.view_topic(name) for name in pipeline.views]
    begin = pipeline.topic("")
    tables = []
    for topic in sorted({*captured, *views, *topics}):
        schema, dot, name = topic.removeprefix(begin).partition(".")
        if topic.startswith(begin) and dot and schema != "cdc":
            tables.append(Table(schema, name, (), (), topic))
    return tables


@dataclass(frozen=True)
class Part:
    """What a pipeline has in one place. `find` lists it, a line each; `remove` removes it. Both may
    raise CdcError.
    """

    place: str
    find: Callable[[], list[str]]
    remove: Callable[[], object]


def _connector(pipeline: Pipeline) -> Part:
    """The connector, with its offsets: with them a pipeline of this name would go on from there."""

    def find() -> list[str]:
        with Connect(pipeline.connect) as connect:
            # Not its state, which the workers report for a moment after they have deleted it.
            present = connect.config(pipeline.pipeline) is not None
        return [f"connector {pipeline.pipeline}, with its offsets"] if present else []

    def remove() -> None:
        with Connect(pipeline.connect) as connect:
            connect.reset(pipeline.pipeline)

    return Part("Kafka Connect", find, remove)


def _slot(pipeline: Pipeline) -> Part:
    """The replication slot: while it is there Postgres keeps its log."""

    def find() -> list[str]:
        with source.connect(pipeline.source.dsn) as conn:
            names = removal.find_slots(conn, pipeline.pipeline)
        return [f"slot {pipeline.pipeline}"] if names else []

    def remove() -> None:
        with source.connect(pipeline.source.dsn) as conn:
            removal.drop_slot(conn, pipeline.pipeline)

    return Part("Postgres", find, remove)


def _database(pipeline: Pipeline) -> Part:
    """The publication, triggers, control rows and the role; the control schema, if no other pipeline
    is prepared in the database.
    """
    name = pipeline.pipeline
    role = pipeline.replication_user

    def find() -> list[str]:
        with source.connect(pipeline.source.dsn) as conn:
            with conn.transaction():
                statements = removal.removals(conn, name)
            lines = [line for statement in statements for line in statement.lines]
            return lines + ([f"role {role}"] if removal.has_role(conn, name, role) else [])

    def remove() -> None:
        with source.connect(pipeline.source.dsn) as conn:
            removal.remove_from_source(conn, name, role)

    return Part("Postgres", find, remove)


def _topics(pipeline: Pipeline, names: Sequence[str]) -> Part:
    """The topics of these names. The topics that name the others go last."""
    last = {pipeline.settings_topic, pipeline.registered_topic}

    def find() -> list[str]:
        with Topics(pipeline.kafka) as kafka:
            return [f"topic {name}" for name in sorted(kafka.existing(names))]

    def remove() -> None:
        with Topics(pipeline.kafka) as kafka:
            kafka.remove([name for name in names if name not in last])
            kafka.remove([name for name in names if name in last])

    return Part("Kafka", find, remove)


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

    def run(self, report: Report, watch_s: float = WATCH_S) -> None:
        """Remove every part, and report each thing that is gone; then watch the slot until
        `watch_s` seconds after its removal.

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
                report(f"{part.place}: {'kept' if line in remaining else 'removed'} {line}")
        self._watch_slot(report, began + watch_s)

    def _watch_slot(self, report: Report, deadline: float) -> None:
        """Drop the slot again where a worker makes it again."""
        slot = _slot(self.pipeline)
        if (left_s := deadline - time.monotonic()) > POLL_S:
            report(f"looking for {left_s:.0f} s whether a worker makes the slot again")
        while time.monotonic() < deadline:
            if slot.find():
                slot.remove()
                report(
                    f"{slot.place}: removed slot {self.pipeline.pipeline}, which had been made again"
                )
            time.sleep(POLL_S)


def prepare(pipeline: Pipeline, sinks: Sequence[Applier]) -> Removal:
    """Find out what belongs to the pipeline. `sinks`: all of its file, and the state of documents
    where it has one.

    Raises:
        SettingsError: a run or a rebuild is at work. Discontinued: a view is another pipeline's.
        CdcError: Kafka or a sink can't be asked.
    """
    with Topics(pipeline.kafka) as kafka:
        _refuse_at_work(pipeline, kafka)
        topics = find_topics(pipeline, kafka)
        tables = view_tables(pipeline, topics)
        for sink in sinks:
            if sink.name in pipeline.sinks:
                _refuse_foreign(kafka, sink, tables)
    # Of all generations, with their positions.
    views = [
        Part(sink.name, partial(sink.remains, tables), partial(sink.remove, tables))
        for sink in sinks
    ]
    return Removal(
        pipeline,
        (
            _connector(pipeline),
            _slot(pipeline),
            _database(pipeline),
            *views,
            _topics(pipeline, topics),
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


def _refuse_foreign(kafka: Topics, sink: Applier, tables: Sequence[Table]) -> None:
    """Raise Discontinued where a view is another pipeline's."""
    for table in tables:
        # A view that doesn't fit its table any more, or isn't there, is nobody else's.
        with suppress(SchemaMismatch):
            stored = positions(sink, [table])[table.qualified]
            existing = kafka.existing([table.topic])
            end = kafka.ends([table.topic])[table.topic] if existing else NOWHERE
            refuse_foreign(kafka, sink.name, table, stored, end)
