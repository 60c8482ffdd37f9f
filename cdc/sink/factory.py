"""The destinations that a pipeline file names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cdc.config.settings import Pipeline
from cdc.config.view_settings import tables_of
from cdc.model.position import Position, ViewCheckpoint
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
    """The state of the pipeline's documents, a `cdc.views.state.StateSink`. Its file has one."""
    assert pipeline.state is not None, "a file with views has a state"
    return pipeline.state.build_state()


def open_documents(pipeline: Pipeline) -> Callable[[], Mapping[str, Mapping[str, Position]]]:
    """The function that reads up to where the documents are current, by view: the position of each
    of its tables' topics, and of its own.

    It raises SinkUnavailable or SinkRejected.
    """
    return _reader(pipeline, lambda state: state.current())


def open_waiting(pipeline: Pipeline) -> Callable[[], Mapping[str, list[str]]]:
    """The function that reads which views of several tables wait, since they don't fit their tables
    any more: the reason and a hint, by name. It raises as that of `open_documents` does.
    """
    return _reader(pipeline, lambda state: state.waiting())


def documents_reader(
    pipeline: Pipeline,
) -> Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]:
    """The function that reads up to where the documents are current, as checkpoints of the tables
    that they are made of, by name: of several views' the earliest.
    """
    read = open_documents(pipeline)

    def checkpoints(tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        notes = read().values()
        noted = {
            table.qualified: [note[table.topic] for note in notes if table.topic in note]
            for table in tables
        }
        return {
            name: ViewCheckpoint(min(positions, key=lambda position: sum(position.offsets)))
            if positions
            else None
            for name, positions in noted.items()
        }

    return checkpoints


def sizes_reader(pipeline: Pipeline) -> Callable[[], Mapping[str, Any]]:
    """The function that reads how much the state of documents holds, and has to do: the fields of
    `cdc.views.state.StateSizes`.
    """
    tables = sorted({name for view in pipeline.views.values() for name in tables_of(view)})
    return _reader(pipeline, lambda state: state.sizes(tables, list(pipeline.views))._asdict())


def _reader(pipeline: Pipeline, question: Callable[[Any], T]) -> Callable[[], T]:
    """The function that asks the state of the pipeline's documents."""
    sink = build_state(pipeline)
    state = sink.open_state()()

    def read() -> T:
        try:
            return question(state)
        except Failure as failure:
            raise reported_error(failure.kind, failure.message, {}, sink=sink.name) from None

    return read
