"""The destinations that a pipeline file names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, tables_of
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Sink
from cdc.sink.lane import Failure
from cdc.sink.lane_run import reported_error

T = TypeVar("T")


def build(pipeline: Pipeline, name: str) -> Sink:
    """The sink of that name, of whatever kind. Clients are imported only when used."""
    sink: Sink = pipeline.sinks[name].build(name, pipeline.pipeline)
    return sink


def build_state(pipeline: Pipeline) -> Any:
    """The state of the pipeline's documents, a `cdc.documents.state.StateSink`. Its file has one."""
    assert pipeline.state is not None, "a file with views has a state"
    return pipeline.state.build_state()


Notes = Mapping[str, Mapping[str, ViewCheckpoint]]
"""Up to where the documents are current, by view: position and floor of each of its tables' topics, and
the position of its own.
"""


def open_documents(pipeline: Pipeline) -> Callable[[], Notes]:
    """The function that reads up to where the documents are current. See `state_reader`."""
    return state_reader(pipeline, lambda state: state.current())


class Clocks(NamedTuple):
    """The clocks of views whose documents depend on the time, in microseconds since 1970, by view.

    read   up to when documents may have been sent
    noted  up to when all of them were
    """

    read: Mapping[str, int]
    noted: Mapping[str, int]


def open_clocks(pipeline: Pipeline) -> Callable[[], Clocks]:
    """The function that reads the clocks of views. See `state_reader`."""
    # The noted ones first: a clock that was read is never behind its note.
    return state_reader(
        pipeline, lambda state: Clocks(noted=state.noted_clocks(), read=state.clocks())
    )


def late_topics(
    notes: Notes, view: Table, ends: Mapping[str, Position], floor_of: Callable[[str], int]
) -> list[str]:
    """Return the topics of a view's tables in which its documents aren't current yet; its own while
    they have never been.

    ends: by topic of its tables; floor_of: the number of a table's last floor, by its name.
    """
    note = notes.get(view.name, {})
    tables = view.derivation.tables if view.derivation else ()
    late = [
        topic
        for name, topic in tables
        if not distance(note.get(topic), ends[topic], floor_of(name)).reached
    ]
    return late if view.topic in note else [*late, view.topic]


def documents_reader(
    pipeline: Pipeline,
) -> Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]:
    """The function that reads up to where the documents are current, as checkpoints of the tables
    that they are made of, by name. In all views that have a table, but for those that wait: the
    earliest offsets; None where one of them has never been current in it.
    """
    read = state_reader(pipeline, lambda state: (state.current(), state.waiting()))

    def checkpoints(tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        notes, waiting = read()
        views = {
            name: tables_of(view)
            for name, view in pipeline.views.items()
            if f"{SCHEMA}.{name}" not in waiting
        }
        return {
            table.qualified: earliest_checkpoint(
                [
                    notes.get(name, {}).get(table.topic)
                    for name, used in views.items()
                    if table.qualified in used
                ]
            )
            for table in tables
        }

    return checkpoints


def earliest_checkpoint(noted: Sequence[ViewCheckpoint | None]) -> ViewCheckpoint | None:
    """Return the least offset of each partition; None where one is missing, or of another topic."""
    present = [checkpoint.position for checkpoint in noted if checkpoint]
    kinds = {(position.topic_id, position.partition_count) for position in present}
    if len(present) < len(noted) or len(kinds) != 1:
        return None
    offsets = zip(*(position.offsets for position in present), strict=True)
    return ViewCheckpoint(Position(present[0].topic_id, tuple(map(min, offsets))))


def sizes_reader(pipeline: Pipeline) -> Callable[[], Mapping[str, Any]]:
    """The function that reads how much the state of documents holds, and has to do: the fields of
    `cdc.documents.state.StateSizes`; and `clocks`, see `State.clocks`, of views whose documents have all
    been sent as of some time.
    """
    tables = sorted({name for view in pipeline.views.values() for name in tables_of(view)})

    def measure(state: Any) -> Mapping[str, Any]:
        # A view that had `now()` once has a clock still, but no note of it.
        noted = state.noted_clocks()
        clocks = {view: now for view, now in state.clocks().items() if view in noted}
        return {**state.sizes(tables, list(pipeline.views))._asdict(), "clocks": clocks}

    return state_reader(pipeline, measure)


def state_reader(pipeline: Pipeline, question: Callable[[Any], T]) -> Callable[[], T]:
    """The function that asks the state of the pipeline's documents, a `cdc.documents.state.State`.

    It raises SinkUnavailable or SinkRejected.
    """
    sink = build_state(pipeline)
    state = sink.open_state()

    def read() -> T:
        try:
            return question(state)
        except Failure as failure:
            raise reported_error(failure.kind, failure.message, {}, sink=sink.name) from None

    return read
