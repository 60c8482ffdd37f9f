"""Whether a topic is still what was made, and can continue a view from where it stands: DESIGN guarantee G5."""

from cdc.change import Position, Reach, Table, distance
from cdc.errors import ConnectorError


def refuse_gap(sink: str, table: Table, start: Position, end: Position, at: Position | None) -> None:
    """Stop where the log, from `start` to `end`, can't continue a view that stands at `at`.

    Raises:
        ConnectorError: the topic is another one, has other partitions, or no longer holds the next record.
    """
    name = table.topic
    repair = f"rebuild the view of {table.qualified} in {sink} from the topic's start"
    if at is None:
        if any(start.offsets):
            raise ConnectorError(
                f"{name} no longer holds its first records (it starts at {list(start.offsets)}); a view made from it"
                " would lack rows.",
                hint="delete the topic and the connector's offsets, then register again: a new snapshot fills it",
                topic=name,
            )
        return
    there = distance(at, end)
    if there.reach is Reach.OTHER_TOPIC:
        what = "is not the topic that the view was made from: it has been created anew"
    elif there.reach is Reach.REPARTITIONED:
        what = f"has {end.partition_count} partitions, the view was made from {at.partition_count}: keys have moved"
    elif any(have < first for have, first in zip(at.offsets, start.offsets, strict=True)):
        what = f"has lost records that the view still needs (it starts at {list(start.offsets)})"
    elif any(have > last for have, last in zip(at.offsets, end.offsets, strict=True)):
        what = f"ends at {list(end.offsets)}, before the view's position {list(at.offsets)}: its log was cut"
    else:
        return
    raise ConnectorError(f"{name} {what}.", hint=repair, topic=name, sink=sink)


def check_shape(topic: str, partitions: int, found: int, policy: str) -> None:
    """Refuse a topic that isn't what `Topics.ensure` makes. Raises ConnectorError."""
    if found != partitions:
        raise ConnectorError(
            f"Topic {topic} has {found} partitions, the pipeline file says {partitions}: keys may have moved.",
            hint=f"write partitions: {found} for it in the pipeline file, or delete the topic, then run"
            " cdc -p FILE register and cdc -p FILE rebuild",
            topic=topic,
        )
    if policy != "compact":
        raise ConnectorError(
            f"Topic {topic} has cleanup.policy {policy}, the pipeline takes compact.",
            hint="it may have lost records: delete it, then run cdc -p FILE register and cdc -p FILE rebuild",
            topic=topic,
        )
