"""Which moments of the log the documents of views are compared at.

In:  the position vectors that the state notes once all documents of a view are sent: what its
tables had been read up to, and where its topic ended then.
Out: a `Vector` for the views whose notes agree; UndecidedError.
Invariant: when a vector is handed out, the log still has every record that its documents are of.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc.codec.decode_options import DecodeOptions
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.errors import UndecidedError
from cdc.kafka.log_continuity import HOLES_S
from cdc.kafka.topic_specs import COMPACTION_LAG
from cdc.kafka.topics import Topics
from cdc.model.position import Position, Reach, ViewCheckpoint, distance
from cdc.sink.factory import Notes
from cdc.views.plan import StatePlan, View

Note = Mapping[str, ViewCheckpoint]
"""By topic of a view's tables and its own: up to where its documents were current."""


@dataclass(frozen=True)
class Vector:
    """One moment of the log: the views whose documents are of it; by topic, of their tables and
    their own, the position; and how records of the tables are decoded.
    """

    plan: StatePlan
    positions: Mapping[str, Position]
    reading: DecodeOptions


def read_vectors(
    kafka: Topics,
    pipeline: Pipeline,
    plan: StatePlan,
    current: Notes,
    placeholder: str,
) -> Iterator[Vector]:
    """Take the vectors that the state has noted last, `current`: one of all views, unless they are of
    different moments, as while some have documents to send. Each is looked at when it is asked for,
    since what it needs of the log is compacted some day.

    Raises:
        UndecidedError: some documents have never been current, or are so old that compaction may
            have removed records that they are of; a topic was made anew since, or a table's rows
            went with a TRUNCATE that the documents don't know yet.
        ConnectorError: from the broker.
    """
    control = Control(pipeline, kafka)
    control.read()
    for part, note in moments(plan, current):
        yield _vector(kafka, pipeline, part, note, control, placeholder)


def moments(plan: StatePlan, current: Notes) -> list[tuple[StatePlan, Note]]:
    """Put views together whose notes agree about the tables that they share.

    A view whose note lacks one of its tables, as after a TRUNCATE, stands alone: another view's note
    says nothing of up to where its documents are.
    """
    shared: list[tuple[list[View], dict[str, ViewCheckpoint]]] = []
    alone: list[tuple[list[View], dict[str, ViewCheckpoint]]] = []
    for view in plan.views:
        note = dict(current.get(view.name, {}))
        if not note.keys() >= set(view.topics.values()):
            alone.append(([view], note))
            continue
        for views, united in shared:
            if all(united.get(topic, noted) == noted for topic, noted in note.items()):
                views.append(view)
                united.update(note)
                break
        else:
            shared.append(([view], note))
    return [(StatePlan(tuple(views)), note) for views, note in (*alone, *shared)]


def _vector(
    kafka: Topics,
    pipeline: Pipeline,
    plan: StatePlan,
    note: Note,
    control: Control,
    placeholder: str,
) -> Vector:
    floors_by_topic = {table.topic: control.floors.number(table.qualified) for table in plan.tables}
    topics = [*floors_by_topic, *(pipeline.view_topic(view.name) for view in plan.views)]
    ends = kafka.ends(topics)
    for topic, end in ends.items():
        lag = distance(note.get(topic), end, floors_by_topic.get(topic, 0))
        # No note names a table's topic that never had a record. A TRUNCATE leaves none in it, too:
        # the documents may still hold what it removed.
        is_noted = topic in note or (topic in floors_by_topic and lag.reached)
        if not is_noted or not lag.comparable or lag.reach is Reach.BEFORE_FLOOR:
            raise UndecidedError(
                f"The documents of this pipeline aren't current: {topic} isn't where the state is.",
                hint="cdc -p FILE run: it makes them current; then the same command",
            )
    current = {topic: note[topic].position if topic in note else end for topic, end in ends.items()}
    _refuse_superseded(kafka, current, ends)
    lsns, first_offsets = control.floors.lsns, dict[str, Sequence[int]]()
    for topic, end in ends.items():
        if first := control.registration.start(topic, end.topic_id):
            first_offsets[topic] = first
    floors = {
        table.topic: lsns[table.qualified] for table in plan.tables if table.qualified in lsns
    }
    return Vector(plan, current, DecodeOptions(placeholder, floors, first_offsets))


def _refuse_superseded(
    kafka: Topics, current: Mapping[str, Position], ends: Mapping[str, Position]
) -> None:
    """Raise UndecidedError where a record behind the vector is about as old as superseded ones
    are kept.
    """
    places = {
        (topic, partition, offset)
        for topic, end in ends.items()
        for partition, offset in enumerate(current[topic].offsets)
        if offset < end.offsets[partition]
    }
    lags_ms = {
        topic: int(settings[COMPACTION_LAG]) or HOLES_S * 1000
        for topic, settings in kafka.settings(ends).items()
    }
    now_ms = time.time() * 1000
    for (topic, _, _), record in kafka.next_records(places).items():
        if record is not None and now_ms - record[1] > lags_ms[topic] / 2:
            raise UndecidedError(
                f"The documents are older than what compaction leaves of {topic}.",
                hint="cdc -p FILE run: it makes them current; then the same command",
            )
