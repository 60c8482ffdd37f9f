"""A pipeline of two small tables on real servers, without Spark: its topics are what is looked at."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from psycopg import sql

from cdc import migrations
from cdc.capture.connector import register
from cdc.config.settings import Pipeline
from cdc.config.source_settings import TableSettings
from cdc.connectors.client import Connect
from cdc.control import registrations
from cdc.control.control_topics import Control
from cdc.control.floors import Floors
from cdc.errors import CdcError, SourceError
from cdc.kafka.clients import connection_settings, kafka
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.readiness.facts import read_slot
from tests.support.pipelines import changed, pipeline
from tests.support.wait import wait_until

PASSWORD = "replication-secret-0815"
TABLES = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (id int PRIMARY KEY, note text, hidden text, total int GENERATED ALWAYS AS (id + 1) STORED);
CREATE TABLE shop.counters (id int PRIMARY KEY, n bigint, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL);
INSERT INTO shop.orders SELECT n, 'a', 'secret' FROM generate_series(1, 100) n;
INSERT INTO shop.counters SELECT n, n FROM generate_series(1, 10) n;
"""


@dataclass(frozen=True)
class Change:
    """A record of a topic; a tombstone has no op."""

    key: dict[str, Any]
    op: str
    after: dict[str, Any] | None
    lsn: int
    offset: int
    written_ms: int


@dataclass
class Shop:
    pipeline: Pipeline
    conn: source.Connection
    kafka: str
    connect: str

    @property
    def tables(self) -> tuple[Table, ...]:
        return table_survey.describe(self.conn, self.pipeline)

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.qualified == name)

    def capturing(self, *tables: str | dict[str, Any]) -> "Shop":
        """The same pipeline with another list of tables."""
        entries = [{"table": entry} if isinstance(entry, str) else entry for entry in tables]
        listed = tuple(TableSettings.model_validate(entry) for entry in entries)
        changed = self.pipeline.source.model_copy(update={"tables": listed})
        return replace(self, pipeline=self.pipeline.model_copy(update={"source": changed}))

    def file(self, folder: Path, **sections: Any) -> Path:
        """Write the pipeline's file, with further sections."""
        tables = [
            entry.model_dump(mode="json", exclude_defaults=True)
            for entry in self.pipeline.source.tables
        ]
        source = {"dsn": self.pipeline.source.dsn, "tables": tables, "heartbeat_s": 0.5}
        tree = {
            "pipeline": self.pipeline.pipeline,
            "source": source | {"replication_password": PASSWORD},
            "kafka": self.kafka,
            "connect": self.connect,
        }
        path = folder / "shop.yaml"
        path.write_text(yaml.safe_dump(tree | sections))
        return path

    def migrate(self, password: str = PASSWORD) -> list[str]:
        migrations.migrate(self.conn)
        requirements = replace(table_survey.requirements(self.pipeline), password=password)
        return migrations.prepare_source(self.conn, requirements)

    def register(self, **settings: Any) -> Any:
        return register(changed(self.pipeline, **settings), self.tables)

    def refused(self, kind: type[CdcError] = SourceError, **settings: Any) -> str:
        """Return the text of a refused registration, after a check that nothing was made."""
        with pytest.raises(kind) as caught:
            self.register(**settings)
        assert self.topics() == []
        assert self.state() == "MISSING"
        text = f"{caught.value.message} {caught.value.hint}"
        assert PASSWORD not in text
        return text

    def topics(self) -> list[str]:
        with kafka.KafkaAdminClient(bootstrap_servers=self.kafka) as admin:
            return sorted(topic for topic in admin.list_topics() if self.pipeline.pipeline in topic)

    def state(self) -> str:
        with Connect(self.connect) as client:
            return client.state(self.pipeline.pipeline).connector

    def log(self, table: str) -> list[Change]:
        """Every committed record of a table's topic, partition by partition; tombstones left out."""
        return [change for change in read(self.kafka, self.pipeline.topic(table)) if change.op]

    def rows(self, table: str) -> dict[Any, Any]:
        """Return a table's rows by key as its topic has them; None for a deleted row."""
        changes = read(self.kafka, self.pipeline.topic(table))
        return {
            next(iter(change.key.values()))
            if len(change.key) == 1
            else tuple(change.key.values()): change.after
            for change in changes
        }

    def floors(self) -> Floors:
        return self._control().floors

    def aside(self) -> set[str]:
        """The tables that are set aside."""
        with Topics(self.kafka) as topics:
            registration = registrations.read(topics, self.pipeline)
        return set(registration.aside) if registration else set()

    def living(self, table: str) -> list[Change]:
        """The records of a table with one partition that aren't dead."""
        control, topic = self._control(), self.pipeline.topic(table)
        with Topics(self.kafka) as topics:
            (start,) = control.registration.start(topic, topics.ends([topic])[topic].topic_id) or (
                0,
            )
        return [
            change
            for change in self.log(table)
            if change.offset >= start and change.lsn >= control.floors.lsn(table)
        ]

    def _control(self) -> Control:
        with Topics(self.kafka) as topics:
            control = Control(self.pipeline, topics)
            control.read()
        return control

    def stop(self, *, forget: bool = False) -> None:
        """Delete the connector; with `forget` its offsets as well. Its slot stays, and is free."""
        name = self.pipeline.pipeline
        with Connect(self.connect) as client:
            client.reset(name) if forget else client.delete(name)
        wait_until(
            lambda: not (slot := read_slot(self.conn, name)) or not slot.active,
            60,
            f"slot {name} is let go",
        )

    def drop_slot(self) -> None:
        self.conn.execute("SELECT pg_drop_replication_slot(%s)", [self.pipeline.pipeline])


def shop_on(dsn: str, name: str, stack: Any) -> Iterator[Shop]:
    shop_pipeline = pipeline(
        name,
        dsn,
        {"table": "shop.orders", "partitions": 2, "exclude": ["hidden"]},
        {"table": "shop.counters", "partitions": 1},
        kafka=stack.endpoints.kafka,
        connect=stack.endpoints.connect,
        source_replication_password=PASSWORD,
        source_heartbeat_s=0.5,
    )
    with source.connect(dsn) as conn:
        conn.execute(TABLES)
        shop = Shop(shop_pipeline, conn, stack.endpoints.kafka, stack.endpoints.connect)
        yield shop
        shop.stop()
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
            [name],
        )
        if conn.execute(
            "SELECT 1 FROM pg_roles WHERE rolname = %s", [shop_pipeline.replication_user]
        ).fetchone():
            role = sql.Identifier(shop_pipeline.replication_user)
            conn.execute(
                sql.SQL("DROP OWNED BY {role} CASCADE; DROP ROLE {role}").format(role=role)
            )
        if topics := shop.topics():
            with kafka.KafkaAdminClient(bootstrap_servers=shop.kafka) as admin:
                admin.delete_topics(topics)


def read(bootstrap: str, topic: str) -> list[Change]:
    """Read the committed changes of a topic."""
    changes: list[Change] = []
    for record in read_records(bootstrap, topic):
        value = json.loads(record.value) if record.value else {}
        lsn = _lsn(value.get("source", {}))
        changes.append(
            Change(
                json.loads(record.key),
                value.get("op", ""),
                value.get("after"),
                lsn,
                record.offset,
                record.timestamp,
            )
        )
    return sorted(changes, key=lambda change: change.offset)


def read_records(bootstrap: str, topic: str) -> list[Any]:
    """Read the committed records of a topic as they are."""
    consumer = kafka.KafkaConsumer(
        **connection_settings(bootstrap),
        isolation_level="read_committed",
        group_id=None,
        enable_auto_commit=False,
    )
    with Topics(bootstrap) as topics:
        end = topics.ends([topic])[topic]
    places = [kafka.TopicPartition(topic, partition) for partition in range(end.partition_count)]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    result: list[Any] = []
    while any(consumer.position(place) < end.offsets[place.partition] for place in places):
        for records in consumer.poll(timeout_ms=100).values():
            result += records
    consumer.close()
    return result


def _lsn(source: dict[str, Any]) -> int:
    """A row of an incremental snapshot has none of its own, only that of the log at the time."""
    return int(source.get("lsn") or json.loads(source.get("sequence") or "[0]")[-1])
