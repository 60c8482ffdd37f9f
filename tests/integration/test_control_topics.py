"""The pipeline's own topics on a real broker: however much they hold, they are read, and each time
only what is new.
"""

import json
import random
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.control.control_topics import Control
from cdc.control.registrations import Registration
from cdc.errors import KafkaUnavailable
from cdc.kafka.clients import kafka
from cdc.kafka.records import Record, Records
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.quarantine.log import QuarantineKey, QuarantineLog, settle_entries
from tests.support.pipelines import with_topics
from tests.support.wait import wait_until

ENTRIES = 20_000
WIDTH = 1500
"""Bytes of each row in quarantine: two thousand in base64."""
PATIENCE_S = 3.0


@pytest.fixture
def shop(stack: Any, unique: str) -> Iterator[Pipeline]:
    with with_topics(unique, stack.endpoints.kafka, "public.orders") as (shop, _):
        yield shop


def write(shop: Pipeline, topic: str, records: Iterable[tuple[bytes, bytes]]) -> None:
    producer = Producer({"bootstrap.servers": shop.kafka, "linger.ms": 20, "log_level": 0})
    for key, value in records:
        producer.produce(topic, key=key, value=value)
        while len(producer) > 50_000:
            producer.poll(0.1)
    assert producer.flush(60) == 0


def entry(offset: int, sink: str = "warehouse") -> QuarantineKey:
    return QuarantineKey(sink, "t.public.orders", 0, offset, str(offset))


def fill(shop: Pipeline, offsets: Iterable[int]) -> None:
    row = b64encode(random.Random(3).randbytes(WIDTH)).decode()
    value = json.dumps(
        {"reason": "not a number", "at": 1.0, "key": b64encode(b"{}").decode(), "value": row}
    ).encode()
    write(shop, shop.quarantine_topic, ((entry(offset).to_key(), value) for offset in offsets))


class CountingTopics(Topics):
    """Counts the records that are read."""

    count = 0

    def iterate_range(self, topic: str, start: int, end: int) -> Iterator[Record]:
        for record in super().iterate_range(topic, start, end):
            self.count += 1
            yield record


def test_a_long_quarantine_is_read_in_full_and_once(shop: Pipeline) -> None:
    fill(shop, range(ENTRIES))
    with Topics(shop.kafka, patience_s=PATIENCE_S) as topics:
        began, count = time.monotonic(), 0
        for count, _ in enumerate(topics.iterate_range(shop.quarantine_topic, 0, ENTRIES), 1):
            # The patience is the longest time without a record. Whoever takes them is slow: twice
            # the patience in all.
            if count % 100 == 0:
                time.sleep(2 * PATIENCE_S * 100 / ENTRIES)
        assert count == ENTRIES
        assert time.monotonic() - began > 2 * PATIENCE_S
    topics = CountingTopics(shop.kafka)
    with topics:
        ledger = QuarantineLog(topics, shop)
        assert len(ledger.read()) == topics.count == ENTRIES
        assert not ledger.has_changed()
        fill(shop, [ENTRIES])
        settle_entries(topics, shop, [entry(7)])
        assert ledger.has_changed()
        assert len(ledger.read()) == ENTRIES
        # The news alone: an entry, and that another is settled.
        assert topics.count == ENTRIES + 2
        entries = {record.entry: record for record in ledger.read()}
        assert entry(7) not in entries
        key, value = ledger.read_record(entries[entry(ENTRIES)])
        assert (key, len(value or b"")) == (b"{}", WIDTH)


def test_a_read_that_gets_nothing_ends(shop: Pipeline, unique: str) -> None:
    """What isn't there is no end: offsets that were promised and don't come are an error, in time."""
    fill(shop, range(3))
    records = Records(shop.kafka, patience_s=0.3)
    try:
        with pytest.raises(KafkaUnavailable):
            list(records.read(shop.quarantine_topic, 0, 4))
    finally:
        records.close()


def ddl(number: int, table: str) -> tuple[bytes, bytes]:
    row = {
        "id": number,
        "table_name": table,
        "relation": number,
        "lsn": f"0/{number:X}",
        "command": "CREATE TABLE",
        "columns": "[]",
        "partitions": None,
    }
    return json.dumps({"id": number}).encode(), json.dumps({"op": "c", "after": row}).encode()


def truncation(table: str, lsn: int) -> tuple[bytes, bytes]:
    row = {"table_name": table, "lsn": f"0/{lsn:X}"}
    return json.dumps({"table_name": table}).encode(), json.dumps(
        {"op": "u", "after": row}
    ).encode()


def test_floors_and_definitions_are_followed(shop: Pipeline) -> None:
    truncations, journal = (shop.topic(f"cdc.{name}") for name in ("truncation", "ddl"))
    write(shop, truncations, [truncation("public.orders", 5), truncation("public.lines", 6)])
    write(shop, journal, (ddl(number, f"public.s{number}") for number in range(2000)))
    with Topics(shop.kafka) as topics:
        control = Control(shop, topics)
        control.read()
        assert not control.has_changed()
        assert control.floors.lsns == {"public.orders": 5, "public.lines": 6}
        assert len(control.definitions) == 2000
        write(shop, truncations, [truncation("public.orders", 9)])
        write(shop, journal, [ddl(2000, "public.orders")])
        assert control.has_changed()
        control.read()
        assert control.floors.lsns == {"public.orders": 9, "public.lines": 6}
        assert [definition.id for definition in control.definitions] == list(range(2001))
        # Another server: what was before says nothing about its log, though it isn't read again.
        ends = topics.ends([truncations, journal])
        write(shop, truncations, [truncation("public.lines", 1)])
        registrations.write(topics, shop, Registration(epoch=1, since=ends))
        assert control.has_changed()
        control.read()
        assert (control.floors.epoch, control.floors.lsns, control.definitions) == (
            1,
            {"public.lines": 1},
            (),
        )


def test_a_topic_that_was_made_again_is_read_from_its_start(shop: Pipeline) -> None:
    fill(shop, range(5))
    with (
        Topics(shop.kafka) as topics,
        kafka.KafkaAdminClient(bootstrap_servers=shop.kafka) as admin,
    ):
        ledger = QuarantineLog(topics, shop)
        assert len(ledger.read()) == 5
        admin.delete_topics([shop.quarantine_topic])
        wait_until(
            lambda: shop.quarantine_topic not in topics.existing([shop.quarantine_topic]),
            10,
            "it to be gone",
        )
        ensure_topics(topics, shop)
        fill(shop, [100, 101])
        assert ledger.has_changed()
        assert [record.entry.offset for record in ledger.read()] == [100, 101]


def test_what_is_followed_is_compacted_soon_and_keeps_deletions_for_a_day(shop: Pipeline) -> None:
    names = [shop.quarantine_topic, shop.generations_topic, shop.topic("public.orders")]
    with Topics(shop.kafka) as topics:
        ensure_topics(topics, shop.model_copy(update={"delete_retention_hours": 1.0}))

        def retentions() -> list[str]:
            return [value["delete.retention.ms"] for value in topics.overrides(names).values()]

        expected = ["86400000", "86400000", "3600000"]
        wait_until(lambda: retentions() == expected, 10, "the broker to take over the settings")
        *followed, table = topics.overrides(names).values()
    compaction = {"segment.ms": "600000", "min.cleanable.dirty.ratio": "0.1"}
    assert all(settings.items() >= compaction.items() for settings in followed)
    assert not table.keys() & compaction.keys()
    assert table["cleanup.policy"] == "compact"
