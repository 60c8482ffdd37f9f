"""From a prepared source to a connector whose changes arrive; and every way in which that is refused."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc.capture.connector import register
from cdc.connectors.client import Connect
from cdc.control.heartbeat import first_heartbeat_since
from cdc.errors import ConnectorError
from cdc.kafka.clients import kafka
from cdc.kafka.topic_setup import topic_specs
from cdc.kafka.topics import Topics
from cdc.model.position import Position, ViewCheckpoint
from cdc.observe.collection import collect
from cdc.observe.diagnosis import diagnose
from cdc.observe.status import Status
from cdc.readiness.facts import read_slot
from tests.support.pipelines import NOWHERE, position_by_table
from tests.support.shop import PASSWORD, Shop, shop_on
from tests.support.wait import wait_until


def test_a_registered_pipeline_carries_the_snapshot_and_the_log_until_the_file_changes(
    shop: Shop, unique: str
) -> None:
    def pid() -> int | None:
        slot = read_slot(shop.conn, unique)
        return slot.active_pid if slot else None

    shop.migrate()
    heard: list[str] = []
    result = register(shop.pipeline, shop.tables, progress=heard.append)
    assert result.changed
    assert len(result.created) == len(topic_specs(shop.pipeline))
    assert result.beat.delay_s < 30
    assert json.loads(json.dumps(asdict(result)))["connector"] == unique
    assert "connector RUNNING, task RUNNING" in heard
    assert shop.rows("shop.orders") == {
        n: {"id": n, "note": "a", "total": n + 1} for n in range(1, 101)
    }
    assert shop.rows("shop.counters") == {n: {"id": n, "n": n} for n in range(1, 11)}

    shop.conn.execute(
        "UPDATE shop.orders SET note = 'b' WHERE id = 1; DELETE FROM shop.orders WHERE id = 2"
    )
    shop.conn.execute("INSERT INTO shop.counters VALUES (11, 11)")

    def arrived() -> bool:
        orders = shop.rows("shop.orders")
        return orders[1] == {"id": 1, "note": "b", "total": 2} and orders[2] is None

    wait_until(arrived, 20, "the update and the deletion")
    wait_until(lambda: shop.rows("shop.counters").get(11) == {"id": 11, "n": 11}, 20, "the insert")
    assert PASSWORD not in " ".join(heard) + json.dumps(asdict(result))

    # With beats so fast that the old task may still beat after another configuration was accepted.
    quick = shop.pipeline.source.model_copy(update={"heartbeat_s": 0.05})
    slower = shop.pipeline.source.model_copy(update={"heartbeat_s": 0.06})
    first = shop.register(source=quick)
    assert first.changed
    old_pid = pid()
    result = shop.register(source=quick)
    assert (result.changed, result.created) == (False, [])
    assert result.beat.offset > first.beat.offset
    assert pid() == old_pid is not None
    with Topics(shop.kafka) as topics:
        beat = first_heartbeat_since(topics, shop.pipeline, 0.0)
        assert first_heartbeat_since(topics, shop.pipeline, time.time() + 60) is None
    assert beat is not None
    assert beat.offset <= first.beat.offset
    assert beat.lsn < result.beat.lsn
    assert shop.register(source=slower).changed
    new_pid = pid()
    assert new_pid not in (None, old_pid)
    # A slot that was let go just now is taken over.
    with Connect(shop.connect) as client:
        client.delete(unique)
    assert shop.register(source=slower).changed
    assert pid() not in (None, new_pid)


def test_a_first_snapshot_is_no_trouble(shop: Shop) -> None:
    """While it copies rows, which takes some seconds here, nobody is woken for the heartbeat."""
    shop.conn.execute("INSERT INTO shop.counters SELECT n, n FROM generate_series(11, 300000) n")
    shop.migrate()
    tables, positions = shop.tables, {"cache": position_by_table(lambda _: None)}

    def codes() -> list[str]:
        findings = diagnose(collect(shop.pipeline, positions=positions)).findings
        return [finding.code for finding in findings if finding.sink is None]

    with ThreadPoolExecutor(1) as pool:
        registration = pool.submit(register, shop.pipeline, tables)
        wait_until(
            lambda: codes() == ["snapshot-running"] or registration.done(), 30, lambda: str(codes())
        )
        assert not registration.done()
        registration.result()
    wait_until(lambda: codes() == [], 30, lambda: str(codes()))


def test_the_status_of_a_healthy_pipeline(shop: Shop, unique: str) -> None:
    shop.migrate()
    shop.register()
    topics = [table.topic for table in shop.tables]
    with Topics(shop.kafka) as connected:
        ends = connected.ends(topics)
    behind = {
        topic: ViewCheckpoint(Position(end.topic_id, (0,) * end.partition_count))
        for topic, end in ends.items()
    }
    positions = {
        "ahead": position_by_table(lambda table: ViewCheckpoint(ends[table.topic])),
        "behind": position_by_table(lambda table: behind[table.topic]),
        "empty": position_by_table(lambda _: None),
        "elsewhere": position_by_table(
            lambda table: ViewCheckpoint(Position("another", ends[table.topic].offsets))
        ),
    }
    took_s: list[float] = []

    def in_time() -> Status | None:
        """A look at which the heartbeat, which comes twice a second here, was in time, and every answer."""
        started = time.monotonic()
        status = collect(shop.pipeline, positions=positions)
        took_s.append(time.monotonic() - started)
        is_silent = any("no answer within" in finding.message for finding in status.findings)
        is_late = not status.heartbeat or status.heartbeat.late
        # A look that waits for an answer in vain takes 4 s.
        return None if is_silent or is_late or took_s[-1] >= 4 else status

    status = wait_until(in_time, 10, lambda: f"a heartbeat in time; looks took {took_s} s")
    assert status
    assert status.findings == ()
    assert status.connector is not None
    assert (status.connector.state, status.connector.tasks) == ("RUNNING", ("RUNNING",))
    assert status.slot is not None
    assert status.slot.active
    views = {sink.name: sink.views for sink in status.sinks}
    assert [(view.lag_records, view.lag_seconds) for view in views["ahead"]] == [(0, 0.0), (0, 0.0)]
    assert all(
        (view.lag_seconds or 0) > 0 and (view.lag_records or 0) >= 10 for view in views["behind"]
    )
    assert [view.lag_records for view in views["empty"]] == [
        view.lag_records for view in views["behind"]
    ]
    recreated = "is not the topic that the view was made from: it has been recreated."
    assert all(view.problem and view.problem.endswith(recreated) for view in views["elsewhere"])
    assert "rebuild elsewhere" in " ".join(finding.fix for finding in diagnose(status).findings)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DROP SCHEMA cdc CASCADE", ["has no schema cdc", "cdc -p FILE migrate"]),
        ("DROP OWNED BY {name}_replication; DROP ROLE {name}_replication", ["no role", "_replication"]),
        ("DROP PUBLICATION {name}", ["no publication", "migrate"]),
        ("ALTER PUBLICATION {name} DROP TABLE cdc.heartbeat", ["lacks cdc.heartbeat", "migrate"]),
        (
            "ALTER PUBLICATION {name} DROP TABLE shop.counters;"
            " ALTER PUBLICATION {name} ADD TABLE shop.counters WHERE (id > 5)",
            ["leaves out rows or columns of shop.counters", "migrate"],
        ),
        ("REVOKE UPDATE ON cdc.heartbeat FROM {name}_replication", ["cdc.heartbeat", "migrate"]),
        ("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY", ["hide rows", "CREATE POLICY"]),
    ],
)  # fmt: skip
def test_a_source_that_was_damaged(shop: Shop, unique: str, damage: str, words: list[str]) -> None:
    shop.migrate()
    shop.conn.execute(damage.format(name=unique))
    message = shop.refused()
    assert all(word in message for word in words), message


@pytest.fixture
def stranger(shop: Shop, unique: str) -> Iterator[str]:
    """A role that may look around in the shop, and owns nothing there."""
    role = f"{unique}_stranger"
    shop.conn.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA shop TO {role}"
    )
    yield role
    shop.conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_publication_of_someone_else(shop: Shop, stranger: str, unique: str) -> None:
    shop.migrate()
    dsn = make_conninfo(shop.pipeline.source.dsn, user=stranger)
    message = shop.refused(source=shop.pipeline.source.model_copy(update={"dsn": dsn}))
    assert f"Publication {unique} belongs to" in message
    assert stranger in message


@pytest.fixture
def hold(shop: Shop, unique: str) -> Iterator[Callable[[], int]]:
    """Stream from the pipeline's slot, as another pipeline of that name would."""
    dsn = make_conninfo(shop.pipeline.source.dsn, replication="database")
    # Not as its own context manager: that would want to commit, which a streaming connection can't.
    with closing(psycopg.connect(dsn, autocommit=True)) as walsender:

        def start() -> int:
            shop.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
            statement = f"START_REPLICATION SLOT {unique} LOGICAL 0/0 (proto_version '1', publication_names '{unique}')"
            result = walsender.pgconn.exec_(statement.encode())
            assert result.status == psycopg.pq.ExecStatus.COPY_BOTH, walsender.pgconn.error_message
            return walsender.info.backend_pid

        yield start


def test_a_second_pipeline_on_the_slot(
    shop: Shop, hold: Callable[[], int], unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.migrate()
    pid = hold()
    monkeypatch.setattr("cdc.capture.connector.RELEASE_S", 0.5)
    message = shop.refused()
    assert f"Slot {unique} is in use by process {pid}" in message
    assert "second pipeline" in message


def test_a_slot_in_another_database(shop: Shop, stack: Any, unique: str) -> None:
    shop.migrate()
    with psycopg.connect(stack.endpoints.postgres, autocommit=True) as elsewhere:
        elsewhere.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
        message = shop.refused()
        elsewhere.execute("SELECT pg_drop_replication_slot(%s)", [unique])
        assert (
            f"belongs to something else: plugin pgoutput, database {elsewhere.info.dbname}"
            in message
        )
    assert "another name" in message


def test_a_topic_of_another_shape(shop: Shop, unique: str) -> None:
    shop.migrate()
    counters = f"{unique}.shop.counters"
    with kafka.KafkaAdminClient(bootstrap_servers=shop.kafka) as admin:
        admin.create_topics(
            {counters: {"num_partitions": 3, "configs": {"cleanup.policy": "compact"}}},
            wait_for_metadata=True,
        )
    with pytest.raises(ConnectorError, match="has 3 partitions"):
        shop.register()
    assert shop.topics() == [counters]
    assert shop.state() == "MISSING"


@pytest.mark.own_source
def test_a_wrong_replication_password(stack: Any, guarded: str, unique: str) -> None:
    with psycopg.connect(guarded, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE db_{unique}")
    for shop in shop_on(make_conninfo(guarded, dbname=f"db_{unique}"), unique, stack):
        shop.migrate(password="another-password-2342")
        message = shop.refused(ConnectorError)
        assert "password authentication failed" in message
        assert "source.replication_password" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kafka": NOWHERE}, "Kafka at 127.0.0.1:1"),
        ({"connect": f"http://{NOWHERE}"}, "Kafka Connect at 127.0.0.1:1"),
    ],
)
def test_a_server_that_is_down(shop: Shop, settings: dict[str, str], words: str) -> None:
    shop.migrate()
    message = shop.refused(ConnectorError, **settings)
    assert words in message
    assert "cdc -p FILE up" in message


@pytest.mark.parametrize("recreated", [False, True])
def test_a_lost_slot_fails_loudly(shop: Shop, unique: str, recreated: bool) -> None:
    """A slot that vanished took changes with it: the connector must not go on from where a new one starts."""
    shop.migrate()
    shop.register()
    shop.stop()
    shop.drop_slot()
    shop.conn.execute("UPDATE shop.orders SET note = 'unseen'")
    if recreated:
        shop.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
    with pytest.raises(ConnectorError) as caught:
        shop.register()
    assert "has failed" in caught.value.message
    assert "no longer available" in caught.value.message
    assert "register --new-snapshot" in caught.value.hint
    # It didn't make itself a new slot either, from which the next start would have gone on.
    assert (read_slot(shop.conn, unique) is not None) == recreated

    register(shop.pipeline, shop.tables, new_snapshot=True)
    assert {row["note"] for row in shop.rows("shop.orders").values()} == {"unseen"}


def test_a_connector_that_is_not_there_is_reset(shop: Shop, unique: str) -> None:
    """As when another removal has just deleted it, while the workers still reported its state."""
    with Connect(shop.connect) as client:
        client.reset(unique)
        assert client.config(unique) is None
