"""The parts of a pipeline in each server: how to find them, how to remove them.

Invariant: both may be repeated, so that a removal that was interrupted is finished by the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.kafka.topics import Topics
from cdc.migrations import removal
from cdc.model.table import Table
from cdc.postgres import source
from cdc.sink.contract import Sink


@dataclass(frozen=True)
class Part:
    """What a pipeline has in one place. `find` lists it, a line each; `remove` removes it. Both may
    raise CdcError.
    """

    place: str
    find: Callable[[], list[str]]
    remove: Callable[[], object]


def connector(pipeline: Pipeline) -> Part:
    """The connector, with its offsets: with them a pipeline of this name would go on from there."""

    def find() -> list[str]:
        with Connect(pipeline.connect) as connect:
            # Not its state, which the workers tell for a moment after they have deleted it.
            present = connect.config(pipeline.pipeline) is not None
        return [f"connector {pipeline.pipeline}, with its offsets"] if present else []

    def remove() -> None:
        with Connect(pipeline.connect) as connect:
            connect.reset(pipeline.pipeline)

    return Part("Kafka Connect", find, remove)


def slot(pipeline: Pipeline) -> Part:
    """The replication slot: while it is there Postgres keeps its log."""

    def find() -> list[str]:
        with source.connect(pipeline.source.dsn) as conn:
            names = removal.find_slots(conn, pipeline.pipeline)
        return [f"slot {pipeline.pipeline}"] if names else []

    def remove() -> None:
        with source.connect(pipeline.source.dsn) as conn:
            removal.drop_slot(conn, pipeline.pipeline)

    return Part("Postgres", find, remove)


def database(pipeline: Pipeline) -> Part:
    """The publication, triggers, control rows and the role; the control schema, if no other pipeline
    is prepared in the database.
    """
    name, role = pipeline.pipeline, pipeline.replication_user

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


def views(sink: Sink, tables: Sequence[Table]) -> Part:
    """The views in a sink, of all generations, with their positions."""
    return Part(sink.name, partial(sink.remains, tables), partial(sink.remove, tables))


def topics(pipeline: Pipeline, names: Sequence[str]) -> Part:
    """The topics of these names; last those that tell the names of others."""
    telling = {pipeline.settings_topic, pipeline.registered_topic}

    def find() -> list[str]:
        with Topics(pipeline.kafka) as kafka:
            return [f"topic {name}" for name in sorted(kafka.existing(names))]

    def remove() -> None:
        with Topics(pipeline.kafka) as kafka:
            kafka.remove([name for name in names if name not in telling])
            kafka.remove([name for name in names if name in telling])

    return Part("Kafka", find, remove)
