"""An audit of topics with planted defects: each is found, by its kind and its keys, and nothing else is."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.audit.auditor import Audit, Auditor, row_flaw, view_flaws
from cdc.cli import topics as cli_topics
from cdc.config.settings import Pipeline
from cdc.errors import DivergenceError
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.model.mask import Mask
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Projection, Table
from cdc.sinks.delta.sink import Delta
from tests.support.envelopes import PLACEHOLDER, encoded
from tests.support.envelopes import envelope as enveloped
from tests.support.pipelines import with_topics
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FLOOR, CHANGED = 100, 1000
"""LSNs: of the TRUNCATE of every table, and of the definition that gave `other` a column with a
default.
"""
Value = dict[str, Any] | None
Planted = list[tuple[bytes | None, Value, int]]
"""Records: key, value, partition."""


def row(
    id_: int, v: str | None = "v", lsn: int = 500, op: str = "u", **more: Any
) -> tuple[bytes, Value, int]:
    value = enveloped(op, None, {"id": id_, "v": v, "w": "w", **more}, lsn)
    return key(id_), value, id_ % 2


def deletion(id_: int, lsn: int = 500) -> Planted:
    """Return the records that a delete leaves."""
    return [(key(id_), enveloped("d", {"id": id_}, None, lsn), id_ % 2), (key(id_), None, id_ % 2)]


def key(id_: int) -> bytes:
    return json.dumps({"id": id_}).encode()


MASKED = PLACEHOLDER
CLEAN: Planted = [
    row(1),
    row(1, MASKED),
    # One value from one record, the other from another.
    row(2),
    row(2, MASKED, w=MASKED),
    row(2, "new", w=MASKED),
    # Not a row any more, whatever it lacked.
    row(3, MASKED),
    *deletion(3),
    row(4, MASKED),
    (key(4), None, 0),
    # From before the TRUNCATE.
    row(5, MASKED, lsn=50),
    # A column that came without a default.
    row(6, more=1),
]
UNKNOWN: Planted = [
    *CLEAN,
    row(11, MASKED),
    row(12),
    *deletion(12),
    row(12, MASKED),
    row(13, lsn=50),
    row(13, MASKED),
    row(14, MASKED, w=MASKED),
    row(14, "v", w=MASKED),
    (key(15), None, 1),
    row(15, MASKED),
]
OUTDATED: Planted = [
    row(1, lsn=999),
    row(2, lsn=999),
    row(2, lsn=1000, more=1),
    row(3, lsn=999),
    *deletion(3, lsn=1001),
    row(4, lsn=1001),
    row(4, lsn=999),
    row(5, lsn=50),
]
FOREIGN: Planted = [
    *CLEAN,
    (b'{"id":1,"x":2}', None, 0),
    (b'{"x":2}', None, 0),
    (b"", None, 0),
    (b"no", None, 1),
]
MOVED: Planted = [*CLEAN, (key(1), row(1)[1], 0), (key(6), None, 1)]
UNREADABLE: Planted = [
    *CLEAN,
    (key(7), {"op": "z"}, 1),
    (key(8), enveloped("u", None, {"id": "eight", "v": None, "w": None}, 500), 0),
]
UNMASKED: Planted = [
    row(1, "clear"),
    row(1, "********"),
    row(2, "clear"),
    row(3, "clear"),
    (key(3), enveloped("d", {"id": 3, "v": "clear"}, None, 500), 1),
    (key(3), None, 1),
    # From before the TRUNCATE, but still there to read.
    row(5, "clear", lsn=50),
    row(6, "********", w="clear"),
]
Change = Callable[["Broker", str], object]


class Broker:
    def __init__(self, shop: Pipeline, topics: Topics) -> None:
        self.shop, self.topics = shop, topics
        self.admin = kafka.KafkaAdminClient(bootstrap_servers=shop.kafka)
        self.producer = kafka.KafkaProducer(bootstrap_servers=shop.kafka, acks="all")

    def table(self, name: str) -> Table:
        mask = Mask(redact=True) if name == "unmasked" else None
        columns = (
            Column("id", "integer"),
            Column("v", "text", mask=mask),
            *(Column(name, "text") for name in ("w", "more")),
        )
        return Table("public", name, columns, ("id",), self.shop.topic(f"public.{name}"))

    def send(self, topic: str, planted: Planted) -> None:
        for key_, value, partition in planted:
            self.producer.send(topic, key=key_, value=encoded(value), partition=partition).get(60)

    def define(self, table: str) -> None:
        """A journal as the connector writes it: `more` was added, with a default, while the table was captured."""
        for id_, names, lsn in ((1, ("id", "v", "w"), 1), (2, ("id", "v", "w", "more"), CHANGED)):
            columns: list[dict[str, Any]] = [
                {
                    "name": name,
                    "type": "text",
                    "number": number,
                    "default": "'x'" if name == "more" else None,
                    "missing": False,
                    "key": None,
                    "types": [],
                    "identified": True,
                }
                for number, name in enumerate(names)
            ]
            row = {
                "id": id_,
                "table_name": table,
                "relation": 1,
                "lsn": f"0/{lsn:X}",
                "command": "ALTER TABLE",
            }
            row |= {"columns": json.dumps(columns), "partitions": None}
            value = {"op": "c", "after": row}
            self.send(self.shop.topic("cdc.ddl"), [(json.dumps({"id": id_}).encode(), value, 0)])

    def truncate(self, table: str) -> None:
        value = {"op": "c", "after": {"table_name": table, "lsn": f"0/{FLOOR:X}"}}
        self.send(
            self.shop.topic("cdc.truncation"),
            [(json.dumps({"table_name": table}).encode(), value, 0)],
        )

    def policy(self, topic: str, value: str) -> None:
        self.topics.override({topic: {"cleanup.policy": value}})
        wait_until(
            lambda: self.topics.settings([topic])[topic]["cleanup.policy"] == value,
            10,
            "the policy",
        )

    def without_keys(self, topic: str) -> None:
        """A compacted topic takes none."""
        self.policy(topic, "delete")
        wait_until(lambda: self._takes_no_key(topic), 10, "records without a key")
        self.policy(topic, "compact")

    def _takes_no_key(self, topic: str) -> bool:
        try:
            self.send(topic, [(None, row(1)[1], 0), (None, row(2)[1], 1)])
        except kafka.errors.InvalidRecordError:
            return False
        return True

    def cut(self, topic: str) -> None:
        """Cut a topic's beginning off, after a change of its settings: a topic that is only
        compacted can't be cut.
        """
        self.policy(topic, "delete")
        wait_until(lambda: self._cuts(topic), 10, "records to be deleted")
        self.policy(topic, "compact")

    def _cuts(self, topic: str) -> bool:
        try:
            self.admin.delete_records({kafka.TopicPartition(topic, 0): 1})
        except kafka.errors.PolicyViolationError:
            return False
        return True

    def grow(self, topic: str) -> None:
        self.admin.create_partitions({topic: 3})
        wait_until(
            lambda: self.topics.ends([topic])[topic].partition_count == 3, 10, "the third partition"
        )


DEFECTS: dict[str, tuple[Planted, Change | None, dict[str, tuple[int, tuple[str, ...]]]]] = {
    "clean": (CLEAN, None, {}),
    "unknown": (UNKNOWN, None, {"records-incomplete/values": (5, ("11", "12", "13", "14", "15"))}),
    "outdated": (OUTDATED, None, {"records-incomplete/outdated": (2, ("1", "4"))}),
    "unmasked": (UNMASKED, None, {"topic-unfit/unmasked": (5, ()), "records-incomplete/unmasked": (1, ("2",))}),
    "foreign": (FOREIGN, None, {"topic-unfit/foreign": (4, ())}),
    "keyless": (CLEAN, Broker.without_keys, {"topic-unfit/keyless": (2, ())}),
    "moved": (MOVED, None, {"topic-unfit/moved": (2, ("1", "6"))}),
    "unreadable": (UNREADABLE, None, {"records-unreadable": (2, ())}),
    "policy": (CLEAN, lambda broker, topic: broker.policy(topic, "compact,delete"), {"topic-unfit/policy": (1, ())}),
    "start": ([row(2), *CLEAN], Broker.cut, {"topic-unfit/truncated": (1, ())}),
    "partitions": (CLEAN, Broker.grow, {"topic-unfit/partitions": (1, ())}),
    "retention": (
        CLEAN,
        lambda broker, topic: broker.topics.override({topic: {"delete.retention.ms": "3600000"}}),
        {"setting-differs/delete.retention.ms": (1, ())},
    ),
}  # fmt: skip


@pytest.fixture
def broker(stack: Any, unique: str) -> Iterator[Broker]:
    tables = ({"table": f"public.{name}", "partitions": 2} for name in DEFECTS)
    with with_topics(unique, stack.endpoints.kafka, *tables) as (shop, topics):
        broker = Broker(shop, topics)
        yield broker
        broker.producer.close()
        broker.admin.close()


def test_every_planted_defect_is_found_and_nothing_else(
    broker: Broker, spark: "SparkSession"
) -> None:
    for name, (planted, change, _) in DEFECTS.items():
        table = broker.table(name)
        broker.truncate(table.qualified)
        broker.send(table.topic, planted)
        if change:
            change(broker, table.topic)
    broker.define("public.outdated")
    auditor = Auditor(spark, broker.shop, broker.topics, PLACEHOLDER, [])
    audits = {name: auditor.audit(broker.table(name)) for name in DEFECTS}
    findings = {
        name: {flaw.key: (flaw.count, flaw.keys) for flaw in audit.flaws}
        for name, audit in audits.items()
    }
    assert findings == {name: expected for name, (_, _, expected) in DEFECTS.items()}
    warnings = {"clean", "unreadable", "retention"}
    assert {name for name, audit in audits.items() if not audit.defects} == warnings
    clean = audits["clean"]
    assert (clean.records, clean.keys, clean.tombstones, clean.saved) == (
        len(CLEAN),
        6,
        2,
        len(CLEAN) - 6,
    )
    assert clean.dirty_ratio == round(clean.saved / len(CLEAN), 4)


def test_views_that_have_missed_something(broker: Broker) -> None:
    table = broker.table("clean")
    broker.send(table.topic, CLEAN)
    end = broker.topics.ends([table.topic])[table.topic]
    odd, even = end.offsets[1], end.offsets[0]
    # What is aborted tells how old it is for as long as it is there.
    aborted = kafka.KafkaProducer(bootstrap_servers=broker.shop.kafka, transactional_id=table.topic)
    aborted.init_transactions()
    aborted.begin_transaction()
    aborted.send(table.topic, key=key(1), value=None, partition=1).get(60)
    aborted.abort_transaction()
    aborted.close()
    wait_until(
        lambda: broker.topics.ends([table.topic])[table.topic].offsets[1] == odd + 2, 10, "the end"
    )

    def checkpoint(*offsets: int, topic_id: str = end.topic_id, days: float = 0) -> ViewCheckpoint:
        return ViewCheckpoint(Position(topic_id, offsets), changed_at=time.time() - days * 86400)

    views = {
        "new": None,
        "there": checkpoint(even, odd + 2, days=30),
        # The next record is a minute old at most, so are the tombstones behind it.
        "behind": checkpoint(even - 1, odd + 2, days=30),
        "idle": checkpoint(even, odd, days=30),
        "recreated": checkpoint(even, odd, topic_id="another"),
        "ahead": checkpoint(even + 1, odd + 2),
        "narrow": checkpoint(even),
    }

    def missed_views() -> dict[str, bool]:
        listed = view_flaws(broker.topics, broker.shop, table, views)
        assert all(flaw.defect and "--table public.clean" in flaw.hint for flaw in listed)
        assert [flaw.sink for flaw in listed if "partitions" in flaw.key] == ["narrow"]
        for flaw in listed:
            finding = flaw.finding(table.qualified)
            stopped = ("view-stopped", f"Kafka -> {flaw.sink}")
            moved = ("topic-unfit", "Kafka")
            assert (finding.code, finding.hop) == (moved if "partitions" in flaw.key else stopped)
        return {
            flaw.hint.split("rebuild ")[1].split()[0]: "missed deletes" in flaw.what
            for flaw in listed
        }

    broken = {"recreated": False, "ahead": False, "narrow": False}
    assert missed_views() == broken
    broker.topics.override({table.topic: {"delete.retention.ms": "1000"}})
    late = {**broken, "behind": True, "idle": True}
    wait_until(lambda: missed_views() == late, 20, "what they haven't seen to be of age")


def test_a_warehouse_need_not_hold_a_column_that_it_does_not_have(
    broker: Broker, spark: "SparkSession", tmp_path: Path
) -> None:
    """`n` is NaN, which its column there can't be."""
    table = broker.table("clean")
    columns = (*table.columns, Column("n", "numeric(10,2)"))
    whole = replace(table, columns=columns)
    without = replace(whole, projections={"warehouse": Projection(None, ("n",))})
    broker.send(table.topic, [row(1, n="NaN"), row(1, MASKED, n="1")])
    warehouse = Delta("warehouse", str(tmp_path), broker.shop.pipeline)
    auditor = Auditor(spark, broker.shop, broker.topics, PLACEHOLDER, [warehouse])
    keys = [[flaw.key for flaw in auditor.audit(each).flaws] for each in (whole, without)]
    assert keys == [["records-incomplete/values", "records-unreadable"], []]


def test_a_topic_that_is_not_there(broker: Broker, spark: "SparkSession") -> None:
    shop = broker.shop.model_copy(update={"pipeline": "another"})
    table = Table("public", "clean", (), ("id",), "another.public.clean")
    audit = Auditor(spark, shop, broker.topics, PLACEHOLDER, []).audit(table)
    assert {(flaw.key, flaw.defect) for flaw in audit.flaws} == {("topic-missing", True)}
    assert {finding.code for finding in audit.findings} == {"topic-missing"}


def test_what_is_found_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    keys = tuple(map(str, range(100)))
    flaw = row_flaw("records-incomplete/values", 123, keys)
    remark = row_flaw("records-unreadable", 1)
    damaged = Audit("public.items", "t.public.items", (flaw,), 20_000, 150, 3)
    warned = Audit("public.others", "t.public.others", (remark,), 10, 10, repaired=7)
    with pytest.raises(DivergenceError, match="1 of 2 topics") as caught:
        cli_topics.report([damaged, warned], as_json=False)
    assert "--repair" in caught.value.hint
    output = capsys.readouterr().out
    # Piped, a sentence is one line, so that it can be searched for.
    (sentence,) = [line for line in output.splitlines() if line.startswith("public.items: 123")]
    assert ": 0, 1, 2, 3, 4 and more" in sentence
    assert output.count("\n") < 10
    codes = ("(records-incomplete)", "(records-unreadable)")
    for words in (*codes, "can't be replayed", "replayable", "19,850", "99%", "quarantine"):
        assert words in " ".join(output.split()), output
    cli_topics.report([warned], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["replayable"], document["topics"][0]["repaired"]) == (True, 7)
    (finding,) = document["topics"][0]["findings"]
    assert finding["message"].startswith("public.others: 1 records are no changes")
    said = {"code": "records-unreadable", "severity": "warning", "count": 1, "defect": False}
    assert finding.items() >= said.items()
    assert finding["fix"]
