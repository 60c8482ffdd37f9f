"""The configuration of the Debezium connector, from the pipeline file.

In:  the pipeline file, its tables, the id of the Kafka cluster.
Out: the JSON object for `PUT /connectors/NAME/config`.
Invariant: the same input gives the same text, so a repeated registration restarts nothing.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from cdc.config.settings import Pipeline
from cdc.connectors.debezium import TEMPLATE, name_pattern, name_patterns
from cdc.errors import SettingsError
from cdc.kafka.topic_setup import MAX_MESSAGE_BYTES
from cdc.migrations import heartbeat_query
from cdc.model import secrets
from cdc.model.session_settings import CATALOG_FIRST, ZONE_GUARD, session_options
from cdc.model.table import CONTROL_TABLES, Table
from cdc.postgres.row_query import snapshot_overrides
from cdc.postgres.source import parse_dsn

CONNECTOR = {**TEMPLATE, "producer.override.max.request.size": str(MAX_MESSAGE_BYTES)}
"""Settings that are the same for every pipeline. A record may be as large as a topic accepts."""


def configuration(
    pipeline: Pipeline,
    *,
    tables: Sequence[Table],
    server_version: int,
    cluster_id: str = "",
    unpublished: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, str]:
    """Make the whole configuration. It has passwords: never print it.

    `server_version` is Postgres' `server_version_num`. `unpublished` lists by table the generated
    columns that the log doesn't carry (`table_survey.unreplicated_columns`).

    Raises:
        SettingsError: for a DSN that only libpq can use.
    """
    name = pipeline.pipeline
    captured = [table.qualified for table in tables] + list(CONTROL_TABLES)
    excluded = [
        f"{entry.table}.{column}" for entry in pipeline.source.tables for column in entry.exclude
    ]
    excluded += [
        f"{table}.{column}" for table, columns in (unpublished or {}).items() for column in columns
    ]
    config = {
        **CONNECTOR,
        "name": name,
        "topic.prefix": name,
        "slot.name": name,
        "publication.name": name,
        "table.include.list": name_patterns(captured),
        "topic.heartbeat.prefix": pipeline.debezium_prefix,
        "heartbeat.interval.ms": str(int(pipeline.source.heartbeat_s * 1000)),
        "heartbeat.action.query": heartbeat_query(name),
        "unavailable.value.placeholder": placeholder(name, cluster_id),
        # Also applies to the replication session; `database.initial.statements` doesn't.
        "driver.options": session_options(server_version),
        # The connector splits statements at `;`, and reads `;;` as the character.
        "database.initial.statements": ";".join(
            statement.replace(";", ";;") for statement in (CATALOG_FIRST, ZONE_GUARD)
        ),
        **_database(pipeline),
        **snapshot_overrides(tables),
    }
    if excluded:
        config["column.exclude.list"] = name_patterns(excluded)
    masked: dict[str, list[str]] = {}
    for entry in pipeline.source.tables:
        for column, mask in entry.mask.items():
            masked.setdefault(mask.setting, []).append(f"{entry.table}.{column}")
    config |= {setting: name_patterns(columns) for setting, columns in masked.items()}
    keyed = [entry for entry in pipeline.source.tables if entry.key]
    if keys := [
        f"{name_pattern(entry.table)}:{','.join(map(name_pattern, entry.key))}" for entry in keyed
    ]:
        config["message.key.columns"] = ";".join(keys)
    return config


def placeholder(pipeline: str, cluster_id: str) -> str:
    """Derive the placeholder: what the connector writes for a TOASTed value that the log doesn't
    carry.

    It must stay the same as long as the topics exist, so it is derived from the id of their Kafka
    cluster. It survives the deletion of a connector, and somebody who may only write rows can't
    forge it.
    """
    return (
        f"__cdc_unavailable_{hashlib.sha256(f'{cluster_id}/{pipeline}'.encode()).hexdigest()[:32]}"
    )


def _database(pipeline: Pipeline) -> dict[str, str]:
    parameters = parse_dsn(pipeline.source.dsn, with_passwords=False)
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    if "," in host or host.startswith(("/", "@")):
        raise SettingsError(
            "source.dsn names several hosts or a socket's folder; the connector takes one host over TCP.",
            hint="write postgresql://user:password@host:port/database",
        )
    user = pipeline.replication_user
    config = {
        "database.hostname": host,
        "database.port": str(parameters.get("port") or 5432),
        "database.dbname": parameters.get("dbname") or parameters.get("user") or "postgres",
        "database.user": user,
    }
    # What is in a file is read by the worker: Connect's own topic holds the configuration.
    if pipeline.source.replication_password:
        written = pipeline.source.replication_password.get_secret_value()
        config["database.password"] = secrets.for_worker(written)
    for name in ("sslmode", "sslrootcert"):
        if parameters.get(name):
            config[f"database.{name}"] = parameters[name]
    # Not the DSN's: its key would let whoever has the worker's machine in as the owner.
    if certificate := pipeline.source.replication_certificate:
        config["database.sslcert"] = certificate.certificate
        config["database.sslkey"] = certificate.key
    return config
