"""How every pipeline's Debezium connector is set, and how its lists of names are written and read.

Plain data and text: `cdc.capture.configuration` adds what one pipeline file says.
"""

import re
from collections.abc import Iterable

PLUGIN = "io.debezium.connector.postgresql.PostgresConnector"

TEMPLATE = {
    "connector.class": PLUGIN,
    "tasks.max": "1",
    "plugin.name": "pgoutput",
    # The owner makes the publication: a connector that may do so has to own every table.
    "publication.autocreate.mode": "disabled",
    "slot.drop.on.stop": "false",
    "snapshot.mode": "initial",
    # A slot that isn't where the offsets say is an error; the default goes on from wherever the slot stands.
    "offset.mismatch.strategy": "trust_offset",
    "exactly.once.support": "required",
    "transaction.boundary": "poll",
    "tombstones.on.delete": "true",
    # A truncate event has no key, which a compacted topic rejects; a row of cdc.truncation stands for it.
    "skipped.operations": "t",
    "decimal.handling.mode": "string",
    # Numbers, which keep 24:00, years BC and infinity apart; as text the first is 00:00.
    "time.precision.mode": "microseconds",
    "interval.handling.mode": "string",
    # Base64 in JSON as well; the mode "base64" writes null for a large value that an update left alone.
    "binary.handling.mode": "bytes",
    "hstore.handling.mode": "json",
    # A value that the connector can't convert stops it; by default it would be null, with a line in its log.
    "event.converting.failure.handling.mode": "fail",
    # Columns of types that Debezium doesn't know come as Postgres' own text, instead of not at all.
    "include.unknown.datatypes": "true",
    # Of the logical messages in Postgres' log only those that readers wait for (`cdc.client`): others aren't ours.
    "message.prefix.include.list": r"cdc\.token",
    "signal.data.collection": "cdc.signal",
    "signal.enabled.channels": "source",
    # Each chunk of an incremental snapshot costs two rows of cdc.signal and a round trip through the log.
    "incremental.snapshot.chunk.size": "4096",
    # Who wrote it, three times in every record: a tenth of its work.
    "extended.headers.enabled": "false",
    "errors.tolerance": "none",
    # Every poll is a Kafka transaction, also an empty one: at 10 ms an idle worker takes 20 % of a core and the broker
    # 10, at 50 ms 7 and 5.
    "poll.interval.ms": "50",
    "max.batch.size": "8192",
    "max.queue.size": "16384",
    # More than this, and they are moved about in memory before anybody takes them. Rows may be large, too.
    "max.queue.size.in.bytes": "67108864",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
    "producer.override.compression.type": "lz4",
    # Nobody waits for it: the end of a transaction sends what there is.
    "producer.override.linger.ms": "50",
    "producer.override.batch.size": "1000000",
}


def name_patterns(names: Iterable[str]) -> str:
    """Debezium's lists hold regular expressions, which it compares without case, and trims."""
    return ",".join(f"(?-i:{name_pattern(name)})" for name in names)


def name_pattern(name: str) -> str:
    """A pattern of exactly this name, without a comma, a colon or white space of its own."""

    def escaped(match: re.Match[str]) -> str:
        # What lies beyond four digits means nothing in a pattern.
        return f"\\u{ord(match[0]):04x}" if match[0] <= "\uffff" else match[0]

    return re.sub(r"[^\w.-]", escaped, name).replace(".", r"\.")


def parse_names(patterns: str) -> list[str]:
    """The way back, also from patterns as they once were: a backslash before what isn't a letter, and before commas."""
    listed = (pattern.replace(r"\,", ",") for pattern in re.split(r"(?<!\\),", patterns))
    return [parse_name(re.sub(r"^\(\?-i:(.*)\)$", r"\1", pattern, flags=re.DOTALL)) for pattern in listed if pattern]


def parse_name(pattern: str) -> str:
    def unescaped(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else match[2]

    return re.sub(r"\\u([0-9a-f]{4})|\\(.)", unescaped, pattern, flags=re.DOTALL)
