"""The Debezium connector's configuration: what a pipeline file means to Connect.

In:  the pipeline file, its tables, the id of the Kafka cluster.
Out: the JSON object that `PUT /connectors/NAME/config` takes.
Invariant: the same input gives the same text, so registering twice restarts nothing.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

from cdc.config.settings import Pipeline
from cdc.control.registrations import Captured
from cdc.errors import SettingsError
from cdc.kafka.topics import MAX_MESSAGE_BYTES
from cdc.model.table import Table
from cdc.postgres.snapshot_query import overrides
from cdc.postgres.source import CONTROL_TABLES, parsed
from migrations import heartbeat_query

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
    "producer.override.max.request.size": str(MAX_MESSAGE_BYTES),
}
OVERRIDES = tuple(name.removeprefix("producer.override.") for name in TEMPLATE if name.startswith("producer.override."))
"""Client settings that the worker's override policy has to allow."""


def configuration(
    pipeline: Pipeline,
    *,
    tables: Sequence[Table],
    cluster_id: str = "",
    unpublished: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, str]:
    """The whole configuration, passwords included: never print it.

    `unpublished` names, by table, generated columns that the log doesn't carry (`source.unpublished`).

    Raises:
        SettingsError: for a DSN that only libpq can use.
    """
    name = pipeline.pipeline
    captured = [table.qualified for table in tables] + list(CONTROL_TABLES)
    excluded = [f"{entry.table}.{column}" for entry in pipeline.source.tables for column in entry.exclude]
    excluded += [f"{table}.{column}" for table, columns in (unpublished or {}).items() for column in columns]
    config = {
        **TEMPLATE,
        "name": name,
        "topic.prefix": name,
        "slot.name": name,
        "publication.name": name,
        "table.include.list": _patterns(captured),
        "heartbeat.interval.ms": str(int(pipeline.source.heartbeat_s * 1000)),
        "heartbeat.action.query": heartbeat_query(name),
        "unavailable.value.placeholder": placeholder(name, cluster_id),
        **_database(pipeline),
        **overrides(tables),
    }
    if excluded:
        config["column.exclude.list"] = _patterns(excluded)
    keyed = [entry for entry in pipeline.source.tables if entry.key]
    if keys := [f"{_literal(entry.table)}:{','.join(map(_literal, entry.key))}" for entry in keyed]:
        config["message.key.columns"] = ";".join(keys)
    return config


def captured_by(config: Mapping[str, str], tables: Sequence[Table]) -> dict[str, Captured]:
    """How a connector with this configuration sends those of the tables that it captures."""
    included = _names(config.get("table.include.list", ""))
    excluded = _names(config.get("column.exclude.list", ""))
    entries = (entry.rsplit(":", 1) for entry in config.get("message.key.columns", "").split(";") if entry)
    keys = {_name(table): tuple(map(_name, columns.split(","))) for table, columns in entries}
    found = {}
    for table in tables:
        name = table.qualified
        if name in included:
            columns = [column.removeprefix(f"{name}.") for column in excluded if column.startswith(f"{name}.")]
            found[name] = Captured(tuple(columns), keys.get(name, ()))
    return found


def placeholder(pipeline: str, cluster_id: str) -> str:
    """What stands in a record for a TOASTed value that the log doesn't carry.

    It lives exactly as long as the topics, so it is derived from the cluster that holds them: the same after
    a connector was deleted, and unknown to someone who may only write rows and would like to forge it.
    """
    return f"__cdc_unavailable_{hashlib.sha256(f'{cluster_id}/{pipeline}'.encode()).hexdigest()[:32]}"


def _patterns(names: Iterable[str]) -> str:
    """Debezium's lists hold regular expressions, which it compares without case, and trims."""
    return ",".join(f"(?-i:{_literal(name)})" for name in names)


def _literal(name: str) -> str:
    """A pattern of exactly this name, without a comma, a colon or white space of its own."""

    def escaped(found: re.Match[str]) -> str:
        # What lies beyond four digits means nothing in a pattern.
        return f"\\u{ord(found[0]):04x}" if found[0] <= "\uffff" else found[0]

    return re.sub(r"[^\w.-]", escaped, name).replace(".", r"\.")


def _names(patterns: str) -> list[str]:
    """The way back, also from patterns as they once were: a backslash before what isn't a letter, and before commas."""
    listed = (pattern.replace(r"\,", ",") for pattern in re.split(r"(?<!\\),", patterns))
    return [_name(re.sub(r"^\(\?-i:(.*)\)$", r"\1", pattern, flags=re.DOTALL)) for pattern in listed if pattern]


def _name(pattern: str) -> str:
    def unescaped(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else found[2]

    return re.sub(r"\\u([0-9a-f]{4})|\\(.)", unescaped, pattern, flags=re.DOTALL)


def _database(pipeline: Pipeline) -> dict[str, str]:
    known = parsed(pipeline.source.dsn)
    host = known.get("host") or known.get("hostaddr") or "localhost"
    if "," in host or host.startswith(("/", "@")):
        raise SettingsError(
            "source.dsn names several hosts or a socket's folder; the connector takes one host over TCP.",
            hint="write postgresql://user:password@host:port/database",
        )
    user = pipeline.replication_user
    config = {
        "database.hostname": host,
        "database.port": str(known.get("port") or 5432),
        "database.dbname": known.get("dbname") or known.get("user") or "postgres",
        "database.user": user,
    }
    # As given: "${file:...}" and the like are resolved by a config provider of the worker, not here.
    if pipeline.source.replication_password:
        config["database.password"] = pipeline.source.replication_password.get_secret_value()
    for name in ("sslmode", "sslrootcert"):
        if known.get(name):
            config[f"database.{name}"] = known[name]
    return config
