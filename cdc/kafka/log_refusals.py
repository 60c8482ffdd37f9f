"""Refuse topics that differ from their description, and views that a log can't continue.

Out: Discontinued or ConnectorError, with a hint that repairs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError, KafkaForbidden, TopicMissing
from cdc.model.login import login_of
from cdc.model.position import Distance, Position, Reach, ViewCheckpoint, distance
from cdc.model.table import Table

if TYPE_CHECKING:
    from cdc.kafka.topics import Topics


METADATA_S = 5.0


class Discontinued(ConnectorError):
    """The log can't continue a view; other views may go on. `kind` is the key of the finding in an
    audit. `rereadable`: the log, read from its beginning, makes the view right.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "view-stopped",
        rereadable: bool = False,
        hint: str,
        **where: Any,
    ) -> None:
        super().__init__(message, hint=hint, **where)
        self.kind = kind
        self.rereadable = rereadable


def refuse_foreign(
    kafka: "Topics", sink: str, table: Table, stored: ViewCheckpoint | None, end: Position
) -> None:
    """Refuse a view of another pipeline's topic: a rebuild would take it away from that pipeline.

    Raises:
        Discontinued: naming that topic. A topic of another cluster can't be recognised.
    """
    if stored is None or distance(stored, end).reach is not Reach.OTHER_TOPIC:
        return
    actual_topic = kafka.topic_name(stored.position.topic_id)
    if actual_topic and actual_topic != table.topic:
        raise Discontinued(
            f"The view of {table.qualified} in {sink} is another pipeline's: it was made from {actual_topic}.",
            hint=f"give {place(sink)} of its own in the pipeline file",
            topic=table.topic,
            sink=sink,
        )


def refuse_gap(
    sink: str, table: Table, start: Position, end: Position, position: Position | None
) -> None:
    """Refuse a view at `position` that the log, from `start` to `end`, can't continue.

    Raises:
        Discontinued: the topic is another one, has other partitions, or no longer holds the next
            record.
    """
    name = table.topic
    repair = remaking(sink, table.qualified)
    renewed = f"{renewal(table.qualified)}, then {repair}"
    if position is None:
        if any(start.offsets):
            raise Discontinued(
                f"{name} no longer holds its first records (it starts at {list(start.offsets)}); a view made from it"
                " would lack rows.",
                hint=renewed,
                topic=name,
            )
        return
    lag = distance(position, end)
    if lag.reach is Reach.OTHER_TOPIC:
        problem = "is not the topic that the view was made from: it has been recreated"
    elif lag.reach is Reach.REPARTITIONED:
        problem = (
            f"has {end.partition_count} partitions, "
            f"the view was made from {position.partition_count}: keys have moved"
        )
    elif any(offset < first for offset, first in zip(position.offsets, start.offsets, strict=True)):
        problem = f"has lost records that the view still needs (it starts at {list(start.offsets)})"
    elif is_beyond(position, end):
        problem = f"ends at {list(end.offsets)}, before the view's position {list(position.offsets)}: its log was cut"
    else:
        return
    rereadable = lag.reach is not Reach.REPARTITIONED
    kind, hint = ("view-stopped", repair) if rereadable else ("topic-unfit/partitions", renewed)
    if lag.reach is Reach.OTHER_TOPIC:
        own = f"give {place(sink)} of its own instead"
        hint = f"{repair}; where a pipeline of another Kafka writes to it: {own}"
    raise Discontinued(
        f"{name} {problem}.", kind=kind, rereadable=rereadable, hint=hint, topic=name, sink=sink
    )


def is_beyond(position: Position, end: Position) -> bool:
    """Whether a position is after an end of the same topic."""
    pairs = zip(position.offsets, end.offsets, strict=False)
    return position.topic_id == end.topic_id and any(offset > last for offset, last in pairs)


def refuse_incomparable(sink: str, table: Table, lag: Distance) -> None:
    """Refuse to wait for a view whose offsets count other records: it never catches up. Raises
    Discontinued.
    """
    if lag.comparable:
        return
    repair = remaking(sink, table.qualified)
    moved = lag.reach is Reach.REPARTITIONED
    raise Discontinued(
        f"The view of {table.qualified} in {sink} {lag.reach}.",
        hint=f"{renewal(table.qualified)}, then {repair}" if moved else repair,
        topic=table.topic,
        sink=sink,
    )


def place(sink: str) -> str:
    """Name the setting of the pipeline file by which a sink, or the state of documents, has a place."""
    return "`state` a prefix" if sink == STATE else f"the sink {sink} a prefix or path"


def renewal(*tables: str) -> str:
    """The command that recreates topics whose records can't make correct views."""
    return " ".join(["cdc -p FILE topics renew", *(f"--table {table}" for table in tables)])


def renewed_name(topic: str) -> str | None:
    """The name that `topics renew` takes for a topic: its table or view. None for the pipeline's
    own topics.
    """
    _, _, name = topic.partition(".")
    schema, dot, _ = name.partition(".")
    return name if dot and schema != "cdc" else None


def remaking(sink: str, table: str) -> str:
    """The command by which a view is made again. The state of documents has no other generation: a
    run reads its tables again.
    """
    if sink == STATE:
        return f"cdc -p FILE run --sink {STATE}"
    return f"cdc -p FILE rebuild {sink} --table {table}"


def unfilled_topic(table: Table) -> Discontinued:
    """The error for a table of the state whose rows are sent again, and may not all be there yet."""
    return Discontinued(
        f"{table.topic} may not have all rows of {table.qualified} yet, which are sent again:"
        " documents without them would be wrong.",
        hint="cdc -p FILE status; the table is read again once they are there, and if that is never:"
        f" {renewal(table.qualified)}",
        topic=table.topic,
        sink=STATE,
    )


def shape_errors(
    topic: str, partitions: int, actual: int, policy: str, original: int | None = None
) -> Iterator[ConnectorError]:
    """Yield why a topic is refused that differs from what `ensure_topics` creates: for its number of
    partitions, and for its cleanup policy.

    `original`: the number of partitions that it was created with; None if unknown.
    """
    name = renewed_name(topic)
    # Floors and definitions come to these topics once; a snapshot sends them again.
    is_history = topic.partition(".")[2] in ("cdc.truncation", "cdc.ddl")
    register = f"cdc -p FILE register{' --new-snapshot' if is_history else ''}"
    renewed = (
        f"{renewal(name)}; then rebuild its views"
        if name
        else f"the topic is the pipeline's own: delete it by kafka-topics.sh, then: {register}"
    )
    if actual != (original or actual):
        yield ConnectorError(
            f"Topic {topic} has {actual} partitions, it was made with {original}: keys have moved, their records"
            " have no order.",
            finding_key="topic-unfit/partitions",
            hint=renewed,
            topic=topic,
        )
    elif actual != partitions:
        yield ConnectorError(
            f"Topic {topic} has {actual} partitions, the pipeline file says {partitions}.",
            finding_key="topic-unfit/partitions",
            hint=f"{renewed}; or write partitions: {actual} again" if name else renewed,
            topic=topic,
        )
    if policy != "compact":
        yield ConnectorError(
            f"Topic {topic} has cleanup.policy {policy}, the pipeline takes compact: it may have lost records.",
            finding_key="topic-unfit/policy",
            hint=renewed
            if name
            else f"set cleanup.policy=compact by kafka-configs.sh, then: {register}",
            topic=topic,
        )


def forbidden(bootstrap: str, operation: str, name: str, kind: str = "topic") -> KafkaForbidden:
    """The error for what the broker's ACLs don't allow. `operation` and `kind` are options of
    kafka-acls.sh; a kind is `topic`, `group`, `transactional-id` or `cluster`.
    """
    resource = "--cluster" if kind == "cluster" else f"--{kind} {name}"
    login = login_of(bootstrap)
    # The broker's rules make the principal of a certificate.
    principal = "ANONYMOUS" if login.protocol == "PLAINTEXT" else login.user or "PRINCIPAL"
    return KafkaForbidden(
        f"Kafka's ACLs don't allow {operation} on the {kind.replace('-', ' ')} {name}.",
        hint=f"kafka-acls.sh --bootstrap-server {bootstrap} --add --allow-principal User:{principal}"
        f" --operation {operation} {resource}; an ACL that denies it has to go, too",
        topic=name if kind == "topic" else None,
    )


def is_hidden(client: Any, topic: str) -> bool | None:
    """Whether ACLs hide a topic from a client of librdkafka, for which it is as one that doesn't
    exist. None if the brokers don't answer: then the topic may be there.
    """
    from confluent_kafka import KafkaError, KafkaException

    try:
        error = client.list_topics(topic, timeout=METADATA_S).topics[topic].error
    except KafkaException:
        return None
    return error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def missing_topic(topic: str) -> TopicMissing:
    return TopicMissing(
        f"There is no topic {topic}.",
        hint="create the topics with: cdc -p FILE register",
        topic=topic,
    )
