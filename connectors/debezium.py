"""Settings of Debezium that every pipeline shares, and the patterns in which its settings list
names.

Plain data and text: `cdc.capture.configuration` adds the settings of one pipeline file.
"""

import re
from collections.abc import Iterable

PLUGIN = "io.debezium.connector.postgresql.PostgresConnector"

TEMPLATE = {
    "connector.class": PLUGIN,
    "tasks.max": "1",
    "plugin.name": "pgoutput",
    # `cdc migrate` makes the publication: a connector that made it would have to own every table.
    "publication.autocreate.mode": "disabled",
    "slot.drop.on.stop": "false",
    "snapshot.mode": "initial",
    # A slot whose LSN differs from the stored offsets is an error. The default would continue from
    # wherever the slot stands.
    "offset.mismatch.strategy": "trust_offset",
    "exactly.once.support": "required",
    "transaction.boundary": "poll",
    "tombstones.on.delete": "true",
    # A truncate event has no key, which a compacted topic rejects; a row of cdc.truncation stands
    # for it.
    "skipped.operations": "t",
    "decimal.handling.mode": "string",
    # Numbers keep 24:00, years BC and infinity apart; as text 24:00 would become 00:00.
    "time.precision.mode": "microseconds",
    "interval.handling.mode": "string",
    # Arrives as base64 in JSON, too. The mode "base64" would write null for a large value that an
    # update left alone.
    "binary.handling.mode": "bytes",
    "hstore.handling.mode": "json",
    # A value that the connector can't convert stops it. By default it would become null, with a
    # line in the log.
    "event.converting.failure.handling.mode": "fail",
    # Columns of types that Debezium doesn't know arrive as Postgres' own text. By default they
    # would be left out.
    "include.unknown.datatypes": "true",
    # Of the logical messages in Postgres' log only the tokens of `cdc.client`: other messages are
    # other programs'.
    "message.prefix.include.list": r"cdc\.token",
    "signal.data.collection": "cdc.signal",
    "signal.enabled.channels": "source",
    # Each chunk of an incremental snapshot costs two rows of cdc.signal and a round trip through
    # the log.
    "incremental.snapshot.chunk.size": "4096",
    # These headers repeat the origin three times in every record, for a tenth of the connector's
    # work.
    "extended.headers.enabled": "false",
    "errors.tolerance": "none",
    # Every poll is a Kafka transaction, even an empty one. Measured idle: at 10 ms the worker takes
    # 20 % of a core and the broker 10 %, at 50 ms 7 % and 5 %.
    "poll.interval.ms": "50",
    "max.batch.size": "8192",
    "max.queue.size": "16384",
    # A larger queue would be moved about in memory before anybody takes its records. Bounded in
    # bytes, because rows may be large.
    "max.queue.size.in.bytes": "67108864",
    # Nothing reads the row before a change. With it, an update of a row of 8 MiB under REPLICA
    # IDENTITY FULL makes a record larger than a topic takes, which stops every table.
    "transforms": "before",
    "transforms.before.type": "org.apache.kafka.connect.transforms.ReplaceField$Value",
    "transforms.before.exclude": "before",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
    "producer.override.compression.type": "lz4",
    # Costs no latency: the end of a transaction sends a batch at once.
    "producer.override.linger.ms": "50",
    "producer.override.batch.size": "1000000",
}


def name_patterns(names: Iterable[str]) -> str:
    """Write names as one of Debezium's lists: regular expressions, made case-sensitive, because it
    ignores case.
    """
    return ",".join(f"(?-i:{name_pattern(name)})" for name in names)


def name_pattern(name: str) -> str:
    """Write a name as a pattern that matches exactly it, without a comma, a colon or white
    space.
    """

    def escaped(match: re.Match[str]) -> str:
        # The escape has four digits: characters beyond them stay as they are, and mean nothing
        # special in a pattern.
        return f"\\u{ord(match[0]):04x}" if match[0] <= "\uffff" else match[0]

    return re.sub(r"[^\w.-]", escaped, name).replace(".", r"\.")


def parse_names(patterns: str) -> list[str]:
    """Read the names of such a list."""

    def unescaped(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else "."

    return [
        re.sub(r"\\u([0-9a-f]{4})|\\\.", unescaped, pattern[len("(?-i:") : -len(")")])
        for pattern in patterns.split(",")
    ]
