"""Every kind of change, through the whole pipeline: what the log doesn't carry or say, and what
nobody can read.

One run serves several disruptions where it can: each costs seconds of its own only.
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import psycopg
import pytest

from cdc.capture.configuration import placeholder
from cdc.errors import KafkaUnavailable, SinkUnavailable
from cdc.kafka.topics import Topics
from cdc.quarantine.log import QuarantineKey, SinkQuarantine, request_redrive
from cdc.sink.contract import Batch, Outcome
from cdc.sinks.redis.sink import Redis
from tests.support import bad_records
from tests.support.load import load
from tests.support.shop import read_records
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

LARGE = "SELECT string_agg(md5(n::text || %s), '') FROM generate_series(1, 400) AS n"


def progress(world: "World", sink: str) -> dict[str, Any]:
    return asdict(world.progress()[sink])


def test_values_that_the_log_does_not_carry_stay(world: "World") -> None:
    """All shapes of the placeholder, with the default identity: in one batch, in a later one, after
    a restart.

    Arrays of bytea, numeric, date and time stamps aren't here: the connector itself stops at an
    unchanged large one.
    """
    world.sql(
        "CREATE EXTENSION IF NOT EXISTS hstore",
        "CREATE TABLE wide (id int PRIMARY KEY, n int, t text, b bytea, ts text[], ns int[], ls bigint[], us uuid[],"
        " h hstore, j jsonb, x numeric)",
        *(
            f"ALTER TABLE wide ALTER {c} SET STORAGE EXTERNAL"
            for c in ["t", "b", "ts", "ns", "ls", "us", "h", "j", "x"]
        ),
    )
    world.begin("public.wide")
    world.sql("ALTER TABLE wide REPLICA IDENTITY DEFAULT")
    insert = (
        "INSERT INTO wide SELECT {0}, 1, repeat('t', 9000), decode(repeat('ab', 9000), 'hex'),"
        " array_fill('text {0}'::text, ARRAY[2000]), array_fill({0}, ARRAY[5000]),"
        " array_fill({0}::bigint, ARRAY[5000]),"
        " array_fill(md5('{0}')::uuid, ARRAY[2000]),"
        " hstore('k', repeat('h', 9000)), jsonb_build_object('k', repeat('j', 9000)),"
        " repeat('7', 9000)::numeric"
    )
    with world.running():
        # Insert and updates in one batch.
        world.sql(
            *(insert.format(n) for n in range(1, 4)),
            "UPDATE wide SET n = 2",
            "UPDATE wide SET n = 3",
        )
        world.settle()
        world.assert_equal()
        # Updates alone.
        world.sql(
            "UPDATE wide SET n = n + 1, t = 'short' WHERE id = 1", "UPDATE wide SET n = n + 1"
        )
        world.sql(
            "DELETE FROM wide WHERE id = 3", insert.format(3), "UPDATE wide SET n = 0 WHERE id = 3"
        )
        world.settle()
        world.assert_equal()
        # A row under a new key, and nobody knows its large values under that: never null, but told.
        world.sql("UPDATE wide SET id = 9 WHERE id = 2")
        world.settle()
        places = {(entry["sink"], entry["id"]) for entry in world.quarantine()}
        assert places == {("search", "9"), ("cache", "9"), ("warehouse", "9")}
        assert {
            (comparison.missing, comparison.extra, comparison.different)
            for comparison in world.compare()
        } == {(1, 0, 0)}
        world.sql("DELETE FROM wide WHERE id = 9")
        world.settle()
        world.assert_equal()
    world.sql("UPDATE wide SET n = n + 1")
    with world.running():
        world.settle()
        world.assert_equal()
        assert sent_placeholder(world, "public.wide"), "this test has tested nothing"


def sent_placeholder(world: "World", table: str) -> bool:
    with Topics(world.stack.endpoints.kafka) as topics:
        text = placeholder(world.name, topics.cluster_id()).encode()
    return any(text in (record.value or b"") for record in records(world, table))


def records(world: "World", table: str) -> list[Any]:
    return read_records(world.stack.endpoints.kafka, f"{world.name}.{table}")


def test_truncated_rows_never_come_back(world: "World") -> None:
    """One table, several, CASCADE, between inserts of one transaction, while nobody reads, and in a rebuild."""
    world.sql(
        "CREATE TABLE parent (id int PRIMARY KEY, v text)",
        "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
        "CREATE TABLE alone (id int PRIMARY KEY, v text)",
    )
    world.sql("INSERT INTO alone SELECT n, 'old' FROM generate_series(1, 50) n")
    world.begin("public.parent", "public.child", "public.alone")
    with world.running():
        world.sql(
            "INSERT INTO parent SELECT n FROM generate_series(1, 50) n",
            "INSERT INTO child SELECT n, n FROM generate_series(1, 50) n",
        )
        world.settle()
        world.sql(
            "INSERT INTO alone VALUES (51, 'gone')",
            "TRUNCATE alone",
            "INSERT INTO alone VALUES (1, 'new'), (60, 'new')",
        )
        world.settle()
        world.assert_equal()
        # No change comes after it: an idle stream notices it too.
        world.sql("TRUNCATE parent CASCADE")
        world.settle()
        world.assert_equal()
        world.sql("INSERT INTO parent VALUES (1, 'again')", "INSERT INTO child VALUES (1, 1)")
        world.settle()
        world.assert_equal()
    world.sql("INSERT INTO alone VALUES (70, 'gone')")
    world.sql("TRUNCATE parent, child, alone", "INSERT INTO alone VALUES (2, 'last')")
    world.sql("UPDATE alone SET v = 'very last'")
    with world.running():
        world.settle()
        world.assert_equal()
    world.rebuild("cache")
    world.assert_equal()


def produce(world: "World", table: str, bad: list[tuple[bytes | None, bytes | None]]) -> None:
    bad_records.produce(world.stack.endpoints.kafka, f"{world.name}.{table}", bad)


def test_bad_records_are_put_aside_and_others_go_on(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int, at timestamp)",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 20) n",
    )
    world.begin("{table: public.items, partitions: 1}")
    good = {"schema": "public", "table": "items", "lsn": 2**60, "ts_us": 1}

    def change(row: Any, **fields: Any) -> bytes:
        return json.dumps({"op": "c", "after": row, "source": good, **fields}).encode()

    with world.running():
        world.settle()
        produce(
            world,
            "public.items",
            [
                (b'{"id":1}', b"\xff\xfenot json"),
                (b"", change({"id": 100, "n": 1, "at": None})),
                (b'{"id":2}', change({"id": 2, "n": 1, "at": None}, op="z")),
                (
                    b'{"id":3}',
                    change({"id": 3, "n": 1, "at": None}, source={**good, "table": "others"}),
                ),
                (b'{"id":4}', change(None)),
                (b'{"id":5}', change({"id": 5, "n": "a secret word", "at": None})),
            ],
        )
        world.sql("UPDATE items SET n = n + 100 WHERE id > 10")
        world.settle()
        listed = world.quarantine()
        by_sink = {
            sink: [entry for entry in listed if entry["sink"] == sink]
            for sink in ("search", "cache", "warehouse")
        }
        assert {sink: len(entries) for sink, entries in by_sink.items()} == {
            "search": 6,
            "cache": 6,
            "warehouse": 6,
        }
        assert {entry["id"] for entry in by_sink["cache"]} == {None, "1", "2", "3", "4", "5"}
        assert "secret" not in json.dumps(listed)
        world.assert_equal()

        read = len(records(world, "public.items"))

        def counted() -> Any:
            # A run publishes what it has counted some seconds after the batch.
            status = world.json("status")
            counts = {sink["name"]: sink["applied"]["read"] for sink in status["sinks"]}
            return status if counts == dict.fromkeys(by_sink, read) else None

        status = wait_until(counted, 30, "all that was read to be counted", 0.5)
        for sink in status["sinks"]:
            assert sink["views"][0]["quarantined"] == 6
            counts = sink["applied"]
            assert counts["quarantined"] == 6
            assert counts["read"] == sum(
                counts[name] for name in ("written", "deleted", "folded", "stale", "quarantined")
            )
        assert "degraded" in world.cdc("status").stdout
        shown = world.json("quarantine", "show", by_sink["cache"][-1]["place"])
        assert "a secret word" in shown["value"]

        # A whole newer change settles an entry; a redrive that can't help leaves it; the rest is
        # given up.
        world.sql("UPDATE items SET n = 0 WHERE id <= 3")
        wait_until(lambda: len(world.quarantine()) == 9, 120, "three of six to be settled")

        def redriven() -> Any:
            answer = world.json("quarantine", "redrive")
            return None if answer["waiting"] else answer

        answer = wait_until(redriven, 60, "the run to have tried them")
        assert (answer["asked"], len(answer["left"])) == (9, 9)
        world.cdc("quarantine", "discard", *(entry["place"] for entry in world.quarantine()))
        world.sql("UPDATE items SET n = n + 1")
        world.settle()
        world.assert_equal()

    produce(world, "public.items", [(b'{"id":1}', b"not json")])
    world.file.write_text("on_error: stop\n" + world.file.read_text())
    stopped = world.cdc("run", "--until-caught-up", "--sink", "cache", code=6)
    assert "public.items" in stopped.stderr
    assert world.quarantine() == []


def set_last(connection: "psycopg.Connection[Any]", number: int) -> None:
    connection.execute("UPDATE items SET x = %s WHERE id = 9", [number])


def test_a_row_that_the_index_refuses_is_redriven(world: "World") -> None:
    """The index refuses two rows; once it is repaired the one is applied, the other has had a newer
    change since.

    So does the index that is kept for a way back, and is given the row as well.
    """
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, x int)",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 9) n",
    )
    world.begin("{table: public.items, partitions: 1}")
    alias = f"/{world.name}-public.items"
    with (
        httpx.Client(base_url=world.stack.endpoints.elasticsearch, timeout=30) as search,
        world.running(),
    ):
        world.settle()
        world.rebuild("search")
        search.put(f"{alias}@*/_mapping", json={"dynamic": "strict"}).raise_for_status()
        for n in (1, 2):
            row = {"id": n, "x": n, "more": n}
            change = {
                "op": "u",
                "after": row,
                "source": {"schema": "public", "table": "items", "lsn": 2**60, "ts_us": 1},
            }
            produce(
                world,
                "public.items",
                [(json.dumps({"id": n}).encode(), json.dumps(change).encode())],
            )
        world.sql("UPDATE items SET x = 0 WHERE id > 5")
        world.settle()
        listed = world.quarantine()
        assert [(entry["sink"], entry["id"]) for entry in listed] == [
            ("search", "1"),
            ("search", "2"),
        ]
        world.assert_equal()
        world.sql("UPDATE items SET x = 5 WHERE id = 2")
        world.settle()
        # A newer change settles an entry once it is durable, so after it can be seen.
        wait_until(
            lambda: [entry["id"] for entry in world.quarantine()] == ["1"],
            30,
            "the second entry to be settled",
        )
        search.put(f"{alias}@*/_mapping", json={"dynamic": False}).raise_for_status()
        # Changes that keep coming leave no stream idle.
        with load(world.dsn, set_last, 0.3):
            assert world.json("quarantine", "redrive")["asked"] == 1
            # On a busy machine the command ends before the run has tried it.
            wait_until(lambda: not world.quarantine(), 60, "the cure")
        world.settle()
        for _ in ("before", "after a way back"):
            values = [search.get(f"{alias}/_doc/{n}").json()["_source"].get("more") for n in (1, 2)]
            assert values == [1, None]
            world.assert_equal()
            world.rollback("search")


def test_a_cure_that_nobody_could_settle_in_time_is_settled_later(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was killed between the batch and its entries, the broker was away there, or the
    answer of the sink was lost.
    """
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 9) n",
    )
    world.begin("{table: public.items, partitions: 1}")

    def ids() -> list[str]:
        entries = world.quarantine()
        return sorted(entry["id"] for entry in entries)

    def wait_for(*expected: str) -> None:
        wait_until(lambda: ids() == sorted(expected), 60, lambda: f"{expected}: {ids()}", 0.5)

    with world.running():
        produce(world, "public.items", [(b'{"id":%d}' % n, b"not json") for n in (1, 2, 3, 4)])
        wait_for(*"111222333444")
        entries = [(record.key, record.value) for record in records(world, "quarantine")]
        world.sql("UPDATE items SET n = 0 WHERE id = 1")
        wait_for(*"222333444")
    # What the topic holds if the run is killed once the views have the change.
    produce(world, "quarantine", [entry for entry in entries if b'"id":"1"' in (entry[0] or b"")])
    wait_for(*"111222333444")
    with world.running():
        wait_for(*"222333444")
    # From here on the cache alone.
    settle, apply, faults = SinkQuarantine.settle, Redis.apply, list[str]()

    def settle_but_once(quarantine: SinkQuarantine, cured: Any) -> None:
        if cured and not faults:
            faults.append("the broker is away")
            raise KafkaUnavailable("It is away.", hint="wait")
        settle(quarantine, cured)

    def answer_but_once(sink: Redis, batch: Batch) -> Outcome:
        outcome = apply(sink, batch)
        if outcome.cured and len(faults) == 1:
            faults.append("the answer is lost")
            raise SinkUnavailable("It is away.", hint="wait")
        return outcome

    with world.running("cache"):
        monkeypatch.setattr(SinkQuarantine, "settle", settle_but_once)
        monkeypatch.setattr(Redis, "apply", answer_but_once)
        world.sql("UPDATE items SET n = 0 WHERE id = 2")
        wait_for(*"22333444")
        world.sql("UPDATE items SET n = 0 WHERE id = 3")
        wait_for(*"2233444")
    assert len(faults) == 2


def test_a_redrive_tells_what_was_tried_of_what_was_asked_for(world: "World") -> None:
    """Neither what was asked of a sink that isn't run, nor what is of a table that waits."""
    world.sql("CREATE TABLE items (id int PRIMARY KEY)", "CREATE TABLE others (id int PRIMARY KEY)")
    world.begin("{table: public.items, partitions: 1}", "public.others")
    topics = {name: f"{world.name}.public.{name}" for name in ("items", "others")}
    tried, waits = (QuarantineKey("cache", topic, 0, 0, "1") for topic in topics.values())
    of_another = QuarantineKey("search", topics["items"], 0, 0, "1")
    with Topics(world.pipeline.kafka) as kafka_topics:
        kafka_topics.remove([topics["others"]])
        produce(world, "public.items", [(b'{"id":1}', b"not json")])
        request_redrive(kafka_topics, world.pipeline, [of_another])
        kafka_topics.write(
            world.pipeline.quarantine_topic, [(waits.to_key(), b'{"reason":"too large"}')]
        )
    with world.running("cache"):
        wait_until(lambda: len(world.quarantine()) == 2, 60, "the entries")
        answer = world.json("quarantine", "redrive", tried.place)
        assert answer == {"asked": 1, "left": [tried.place], "waiting": False}
        with mock.patch("cdc.cli.quarantine.WAIT_S", 5.0):
            # In this process, so that it waits no longer.
            redriven = run_with_spark(world.words("quarantine", "redrive", waits.place, "--json"))
        answer = json.loads(redriven.stdout)
        assert answer == {"asked": 1, "left": [waits.place], "waiting": True}
        # Nobody starts over for a request that can't be answered.
        assert world.progress()["cache"].restarts["quarantine"] == 1
