"""A row that the log can't take: its table goes aside, the others go on, nothing is lost."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.capture.lookout import looking_out
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import end_transaction
from tests.support.shop import PASSWORD, Shop, shop_on
from tests.support.verbs import run_verb
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTES = """
CREATE TABLE shop.notes (id int PRIMARY KEY, note text);
ALTER TABLE shop.notes REPLICA IDENTITY FULL;
INSERT INTO shop.notes SELECT n, 'first' FROM generate_series(1, 20) n;
"""
SILENT_S = 45.0
"""Less than the 60 s that a broker takes to abort a transaction that nobody commits."""
LONG = "repeat('0123456789', %s)"
"""A text of ten times so many characters."""


FILE = """\
pipeline: {name}
kafka: {kafka}
connect: {connect}
source:
  dsn: {dsn}
  replication_password: {password}
  heartbeat_s: 0.5
  tables: [{{table: shop.notes, partitions: 1}}, {{table: shop.counters, partitions: 1}}]
sinks:
  cache: {{type: redis, url: "{redis}", prefix: {name}}}
"""


@dataclass
class Verbs:
    """The command line on the shop's pipeline."""

    file: Path

    def cdc(self, *words: str) -> str:
        answer = run_verb(["-p", str(self.file), "--state", str(self.file.parent), *words])
        text = f"{answer.stdout}{answer.stderr}"
        assert words[0] == "status" or answer.returncode == 0, text
        return text

    def findings(self) -> dict[str, str]:
        """What `status` has to say of the capture: its message by code."""

        def answer() -> str | None:
            text = self.cdc("status", "--json")
            return None if "gives no answer within" in text else text

        text = wait_until(answer, 60, "all servers to answer")
        assert text
        return {
            finding["code"]: f"{finding['message']} {finding['fix']}"
            for finding in json.loads(text)["findings"]
            if finding["hop"] == "Postgres -> Kafka"
        }


@pytest.fixture
def verbs(stack: Any, shop: Shop, tmp_path: Path) -> Verbs:
    file = tmp_path / "pipeline.yaml"
    text = FILE.format(
        name=shop.pipeline.pipeline,
        kafka=shop.kafka,
        connect=shop.connect,
        dsn=shop.pipeline.source.dsn,
        password=PASSWORD,
        redis=stack.endpoints.redis,
    )
    file.write_text(text)
    return Verbs(file)


@pytest.fixture
def shop(stack: Any, postgres_dsn: str, unique: str) -> Iterator[Shop]:
    for shop in shop_on(postgres_dsn, unique, stack):
        shop.conn.execute(NOTES)
        few = shop.capturing(
            *({"table": name, "partitions": 1} for name in ("shop.notes", "shop.counters"))
        )
        few.migrate()
        few.register()
        yield few


@pytest.fixture
def neighbour(shop: Shop, stack: Any, postgres_dsn: str, unique: str) -> Iterator[Shop]:
    """Another pipeline of the same worker, of the same tables."""
    name = f"{unique}_b"
    requirements = shop.capturing({"table": "shop.counters", "partitions": 1})
    other = replace(
        requirements, pipeline=requirements.pipeline.model_copy(update={"pipeline": name})
    )
    other.migrate()
    other.register()
    yield other
    other.stop()


def longest_silence_s(shop: Shop) -> float:
    """The longest time between two heartbeats of a pipeline, by Kafka's clock."""
    with Topics(shop.kafka) as topics:
        records = topics.read_all(shop.pipeline.heartbeat_topic)
    times = [record.timestamp_ms for record in records]
    return max(later - earlier for earlier, later in pairwise(times)) / 1000


def rows(shop: Shop, table: str) -> dict[Any, Any]:
    """The rows of a table, as Postgres has them."""
    query = f"SELECT id, to_jsonb(t) FROM {table} t".encode()
    return dict(shop.conn.execute(query).fetchall())


def sent(shop: Shop, table: str) -> dict[Any, Any]:
    """The rows of a table, as the living records of its topic have them."""
    newest = {change.key["id"]: change.after for change in shop.living(table)}
    return {key: row for key, row in newest.items() if row is not None}


def arrived(shop: Shop, table: str) -> None:
    """Wait until the topic has the table's rows as they are now."""

    def equal() -> bool:
        topic = sent(shop, table)
        expected = rows(shop, table)
        return topic.keys() == expected.keys() and all(
            row.items() <= expected[key].items() for key, row in topic.items()
        )

    wait_until(equal, 60, f"the rows of {table} are in its topic", 0.2)


def test_register_goes_on_without_a_table_that_has_no_key(shop: Shop, verbs: Verbs) -> None:
    """The other tables go on from where they were; the table comes back, with all of its rows."""
    snapshots = len(shop.log("shop.counters"))
    shop.conn.execute(b"ALTER TABLE shop.notes DROP CONSTRAINT notes_pkey")
    shop.conn.execute(b"UPDATE shop.notes SET note = 'second' WHERE id = 1")
    shop.conn.execute(b"DELETE FROM shop.notes WHERE id = 2")
    shop.conn.execute(b"UPDATE shop.counters SET n = 100 WHERE id = 1")
    verbs.cdc("register")
    arrived(shop, "shop.counters")
    assert len(shop.log("shop.counters")) == snapshots + 1
    findings = verbs.findings()
    assert set(findings) == {"table-aside"}
    assert "shop.notes is aside" in findings["table-aside"]
    assert "has no key" in findings["table-aside"]
    shop.conn.execute(b"ALTER TABLE shop.notes ADD PRIMARY KEY (id)")
    verbs.cdc("register")
    arrived(shop, "shop.notes")
    assert verbs.findings() == {}


def test_a_run_sets_a_table_aside_and_takes_it_back(
    shop: Shop, neighbour: Shop, spark: "SparkSession"
) -> None:
    """By itself, while a connector of the same worker goes on; a column of a key is renamed in the
    transaction that has changed a row before.

    The connector looks the key up in Postgres when it reads the change. It is stopped until the new
    name is in force: a running one may still see the old one after the commit.
    """
    renamed_back = threading.Event()

    def load() -> Pipeline:
        """Called before each look: the old name is back before one that can take the table back."""
        if shop.aside() and not renamed_back.is_set():
            shop.conn.execute(b"ALTER TABLE shop.notes RENAME number TO id")
            renamed_back.set()
        return shop.pipeline

    with Connect(shop.connect) as connect:
        connect.stop(shop.pipeline.pipeline)
        with shop.conn.transaction():
            shop.conn.execute(b"UPDATE shop.notes SET note = 'second' WHERE id = 1")
            shop.conn.execute(b"ALTER TABLE shop.notes RENAME id TO number")
        shop.conn.execute(b"DELETE FROM shop.notes WHERE number = 2")
        shop.conn.execute(b"UPDATE shop.counters SET n = 100 WHERE id = 1")
        connect.resume(shop.pipeline.pipeline)
    with looking_out(spark, load):
        arrived(shop, "shop.counters")
        wait_until(renamed_back.is_set, 60, "shop.notes is aside")
        arrived(shop, "shop.notes")
    assert shop.floors().lsn("shop.notes"), "it was never taken back"
    assert longest_silence_s(neighbour) < SILENT_S


def test_a_task_that_has_lost_its_transaction_goes_on(shop: Shop, spark: "SparkSession") -> None:
    """A transaction may be taken for stuck while the task is at work: nothing is lost then."""
    with looking_out(spark, lambda: shop.pipeline):
        end_transaction(shop.kafka, f"cdc-connect-{shop.pipeline.pipeline}-0")
        shop.conn.execute(b"UPDATE shop.counters SET n = 100 WHERE id = 1")
        arrived(shop, "shop.counters")
    assert len(shop.log("shop.counters")) == 11, "a change was sent twice"


def test_a_row_that_is_too_large_sets_its_table_aside(shop: Shop, verbs: Verbs) -> None:
    """The trace doesn't name the table: it is found in what the slot holds."""
    # Under REPLICA IDENTITY FULL the log has the row before an update as well: with both a record
    # would be larger than a topic takes.
    shop.conn.execute(f"INSERT INTO shop.notes VALUES (99, {LONG % 900_000})".encode())
    shop.conn.execute(b"UPDATE shop.notes SET note = note || '!' WHERE id = 99")
    arrived(shop, "shop.notes")
    shop.conn.execute(b"UPDATE shop.counters SET n = 100 WHERE id = 1")
    shop.conn.execute(f"INSERT INTO shop.notes VALUES (100, {LONG % 1_900_000})".encode())
    shop.conn.execute(b"UPDATE shop.counters SET n = 200 WHERE id = 2")
    assert "shop.notes can't be captured yet" in verbs.cdc("register")
    arrived(shop, "shop.counters")
    assert "shop.notes is aside" in verbs.findings()["table-aside"]
    shop.conn.execute(b"UPDATE shop.notes SET note = 'short' WHERE id = 100")
    verbs.cdc("register")
    arrived(shop, "shop.notes")
    assert verbs.findings() == {}
