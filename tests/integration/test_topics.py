"""Topics on a real broker: made once, checked before, measured as a read_committed reader sees them."""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from kafka.net.compat import KafkaNetClient

from cdc.apply.resume import SinkViews
from cdc.config.server_settings import KafkaSettings
from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError, KafkaUnavailable
from cdc.kafka import clients, records
from cdc.kafka.clients import kafka
from cdc.kafka.log_continuity import Continuity, request_name
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.records import Record
from cdc.kafka.topic_setup import check_topics, ensure_topics, topic_specs
from cdc.kafka.topics import PATIENCE_S, TOPICS_AT_ONCE, Topics, TopicsPool
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.observe.collection import read_topics
from cdc.rebuild.build import Rebuild
from cdc.sink.contract import Sink
from cdc.sinks.memory import Memory
from tests.support.envelopes import PLACEHOLDER, table
from tests.support.pipelines import NOWHERE, pipeline
from tests.support.wait import wait_until

Send = Callable[[str, list[dict[str, Any]], bool], None]


@pytest.fixture
def shop(stack: Any, unique: str) -> Pipeline:
    tables = (
        {"table": "public.orders", "partitions": 3},
        {"table": "public.lines", "partitions": 1},
    )
    return pipeline(unique, "postgresql://127.0.0.1:1/none", *tables, kafka=stack.endpoints.kafka)


@pytest.fixture
def admin(stack: Any, unique: str) -> Iterator[kafka.KafkaAdminClient]:
    with kafka.KafkaAdminClient(bootstrap_servers=stack.endpoints.kafka) as client:
        yield client
        if topics := [topic for topic in client.list_topics() if unique in topic]:
            client.delete_topics(topics)


@pytest.fixture
def topics(shop: Pipeline, admin: kafka.KafkaAdminClient) -> Iterator[Topics]:
    with Topics(shop.kafka) as connected:
        yield connected


@pytest.fixture
def orders(topics: Topics, shop: Pipeline) -> str:
    """The topic of a table, made with all others."""
    ensure_topics(topics, shop)
    return shop.topic("public.orders")


@pytest.fixture
def send(shop: Pipeline, unique: str) -> Iterator[Send]:
    """Write records to partition 0 in one transaction, which is committed or aborted."""
    producer = kafka.KafkaProducer(bootstrap_servers=shop.kafka, transactional_id=unique)
    producer.init_transactions()

    def write(topic: str, records: list[dict[str, Any]], commit: bool = True) -> None:
        producer.begin_transaction()
        for number, record in enumerate(records):
            future = producer.send(
                topic, json.dumps(record).encode(), key=str(number).encode(), partition=0
            )
            future.get(timeout=60)
        end = (
            kafka.KafkaProducer.commit_transaction
            if commit
            else kafka.KafkaProducer.abort_transaction
        )
        end(producer)

    yield write
    producer.close()


def test_what_is_missing_is_created(
    topics: Topics, shop: Pipeline, admin: kafka.KafkaAdminClient, unique: str
) -> None:
    results = ensure_topics(topics, shop)
    assert results == dict.fromkeys(topic_specs(shop), True)
    ends = topics.ends(list(results))
    assert {topic: end.partition_count for topic, end in ends.items()} == {
        f"{unique}.public.orders": 3,
        f"{unique}.public.lines": 1,
        f"{unique}.cdc.heartbeat": 1,
        f"{unique}.cdc.truncation": 1,
        f"{unique}.cdc.ddl": 1,
        f"{unique}.cdc.signal": 1,
        f"{unique}.cdc.debezium.{unique}": 1,
        f"{unique}.quarantine": 1,
        f"{unique}.settings": 1,
        f"{unique}.registered": 1,
        f"{unique}.generations": 1,
        f"{unique}.message": 1,
        f"{unique}.runs": 1,
        f"{unique}.operations": 1,
    }
    settings = described(admin, f"{unique}.public.orders")
    assert settings["cleanup.policy"] == "compact"
    assert settings["delete.retention.ms"] == str(7 * 24 * 3_600_000)
    assert settings["max.message.bytes"] == str(32 * 1024 * 1024)
    assert "min.cleanable.dirty.ratio" not in settings
    check_topics(topics, shop)
    assert ensure_topics(topics, shop) == dict.fromkeys(topic_specs(shop), False)


def test_copies_are_as_the_file_says(topics: Topics, shop: Pipeline, unique: str) -> None:
    """One broker holds one copy: more are refused before the first topic is made."""
    asked = {"brokers": shop.kafka, "replication_factor": 3, "min_insync_replicas": 2}
    wanted = shop.model_copy(update={"kafka_settings": KafkaSettings.model_validate(asked)})
    with pytest.raises(ConnectorError) as caught:
        ensure_topics(topics, wanted)
    assert "kafka.replication_factor is larger than the number of brokers" in caught.value.hint
    assert not topics.existing(topic_specs(shop))
    asked |= {"replication_factor": 1, "min_insync_replicas": 1}
    ensure_topics(
        topics, shop.model_copy(update={"kafka_settings": KafkaSettings.model_validate(asked)})
    )
    table = f"{unique}.public.orders"
    assert topics.overrides([table])[table]["min.insync.replicas"] == "1"


def described(admin: kafka.KafkaAdminClient, topic: str) -> dict[str, str]:
    entries = admin.describe_configs([kafka.admin.ConfigResource("topic", topic)])["topic"][topic]
    return {name: entry["value"] for name, entry in entries.items()}


@pytest.mark.parametrize(
    ("partitions", "policy", "words"),
    [
        (5, "compact", ["5 partitions", "says 1", "partitions: 5", "rebuild"]),
        (1, "delete", ["cleanup.policy delete", "takes compact", "rebuild"]),
        (1, "compact,delete", ["cleanup.policy compact,delete"]),
    ],
)
def test_a_topic_of_another_shape_stops_everything(
    topics: Topics,
    shop: Pipeline,
    admin: kafka.KafkaAdminClient,
    unique: str,
    partitions: int,
    policy: str,
    words: list[str],
) -> None:
    # The last table of the file: had anything been created before the check, it would be there.
    other_topic = f"{unique}.public.lines"
    admin.create_topics(
        {other_topic: {"num_partitions": partitions, "configs": {"cleanup.policy": policy}}}
    )
    with pytest.raises(ConnectorError) as caught:
        ensure_topics(topics, shop)
    message = f"{caught.value.message} {caught.value.hint}"
    assert all(word in message for word in [other_topic, *words]), message
    assert [topic for topic in admin.list_topics() if unique in topic] == [other_topic]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("more partitions", ["has 2 partitions", "made with 1", "topics renew --table public.lines", "rebuild"]),
        ("delete", ["cleanup.policy delete", "takes compact", "rebuild"]),
        ("compact,delete", ["cleanup.policy compact,delete"]),
        ("gone", ["no topic", "register"]),
    ],
)  # fmt: skip
def test_a_topic_that_was_changed_since(
    topics: Topics,
    shop: Pipeline,
    admin: kafka.KafkaAdminClient,
    unique: str,
    change: str,
    words: list[str],
) -> None:
    lines = f"{unique}.public.lines"
    ensure_topics(topics, shop)
    if change == "more partitions":
        admin.create_partitions({lines: 2})
    elif change == "gone":
        admin.delete_topics([lines])
    else:
        admin.alter_configs(
            [kafka.admin.ConfigResource("topic", lines, {"cleanup.policy": change})]
        )

    def refused() -> str:
        try:
            check_topics(topics, shop)
        except ConnectorError as error:
            return f"{error.message} {error.hint}"
        return ""

    message = wait_until(refused, 10, "the broker to tell of the change")
    assert all(word in message for word in [lines, *words]), message


def test_positions_of_an_empty_and_of_a_missing_topic(
    topics: Topics, unique: str, orders: str
) -> None:
    start, end = topics.starts([orders])[orders], topics.ends([orders])[orders]
    assert start == end
    assert end.offsets == (0, 0, 0)
    with pytest.raises(ConnectorError, match="no topic") as caught:
        topics.ends([orders, f"{unique}.public.nothing"])
    assert "register" in caught.value.hint


def test_what_the_broker_keeps_is_counted_compressed(
    topics: Topics, shop: Pipeline, send: Send, unique: str
) -> None:
    ensure_topics(topics, shop)
    orders, nothing = f"{unique}.public.orders", f"{unique}.public.nothing"
    assert topics.log_size_bytes([orders]) == topics.log_size_bytes([nothing]) == 0
    send(orders, [{"a": random.randbytes(50_000).hex()}], True)
    # And what ends the transaction, a little later.
    assert 100_000 < topics.log_size_bytes([orders, nothing]) < 101_000
    assert topics.log_size_bytes([nothing]) == 0


def test_a_recreated_topic_has_another_id(
    topics: Topics, shop: Pipeline, admin: kafka.KafkaAdminClient, orders: str
) -> None:
    topic_id = topics.ends([orders])[orders].topic_id
    admin.delete_topics([orders])
    # A broker answers with what it knows, and hears of it a moment after the controller.
    wait_until(lambda: orders not in admin.list_topics(), 10, "the topic to go")
    ensure_topics(topics, shop)
    assert topics.ends([orders])[orders].topic_id != topic_id


def test_another_pipelines_view_is_left_alone(topics: Topics, shop: Pipeline, unique: str) -> None:
    """Both have the same place for a view of orders: it is neither gone on with nor made again."""
    other_shop = pipeline(
        f"{unique}2", "postgresql://127.0.0.1:1/none", "public.orders", kafka=shop.kafka
    )
    ensure_topics(topics, shop)
    ensure_topics(topics, other_shop)
    theirs, ours = f"{unique}2.public.orders", table(f"{unique}.public.orders", "orders")
    checkpoint = ViewCheckpoint(topics.ends([theirs])[theirs])
    assert topics.topic_name(checkpoint.position.topic_id) == theirs
    assert topics.topic_name("another") is topics.topic_name("AAAAAAAAAAAAAAAAAAAAAA") is None
    continuity = Continuity(shop, topics).read([ours.topic])
    with pytest.raises(
        Discontinued, match="in cache is another pipeline's: it was made from"
    ) as caught:
        continuity.refuse("cache", ours, checkpoint)
    assert "rebuild" not in caught.value.hint
    assert "the sink cache a prefix or path of its own" in caught.value.hint
    with pytest.raises(Discontinued, match="another pipeline's") as caught:
        continuity.refuse(STATE, ours, checkpoint)
    assert caught.value.hint == "give `state` a prefix of its own in the pipeline file"
    nothing: Any = None
    with pytest.raises(Discontinued, match="another pipeline's"):
        Rebuild(
            nothing,
            shop,
            topics,
            cast("Sink", Standing(checkpoint)),
            [ours],
            describe=nothing,
            placeholder="",
            retention_s=0,
            verify=nothing,
            show=nothing,
        ).run()
    topics.remove(list(topic_specs(other_shop)))


def test_a_table_of_the_state_is_read_again_once_its_topic_has_all_rows(
    topics: Topics, shop: Pipeline
) -> None:
    """A view of a sink waits for its rebuild; the state has no other generation, and no readers."""
    ensure_topics(topics, shop)
    orders = table(shop.topic("public.orders"), "orders")
    end = topics.ends([orders.topic])[orders.topic]
    continuity = Continuity(shop, topics).read([orders.topic])
    # Its log was cut: as much as there is.
    ahead = ViewCheckpoint(replace(end, offsets=(9, 0, 0)))
    assert continuity.resume(STATE, orders, ahead) is None
    with pytest.raises(Discontinued, match="its log was cut"):
        continuity.resume("cache", orders, ahead)
    # Keys have moved: all there is isn't in order.
    with pytest.raises(Discontinued, match="keys have moved"):
        continuity.resume(STATE, orders, ViewCheckpoint(replace(end, offsets=(0,))))
    current = ViewCheckpoint(end)
    assert continuity.resume(STATE, orders, current) is current
    assert continuity.resume(STATE, orders, None) is None

    former = ViewCheckpoint(replace(end, topic_id="AAAAAAAAAAAAAAAAAAAAAA"))
    signals, heartbeats = shop.topic("cdc.signal"), shop.heartbeat_topic

    def is_refused() -> bool:
        with suppress(Discontinued):
            assert continuity.resume(STATE, orders, former) is None
            return False
        return True

    def write(topic: str, column: str, name: str, op: str) -> None:
        key, value = json.dumps({column: name}).encode(), json.dumps({"op": op}).encode()
        topics.write(topic, [(key, value)])

    assert is_refused()
    beside, held_up = request_name("it is new here", end), request_name("it has another key", end)
    write(signals, "id", beside, "c")
    write(signals, "id", request_name("it is new here", former.position), "r")
    assert is_refused()
    write(signals, "id", beside, "r")
    assert not is_refused()
    # Asked for once more, with the log held up: its mark is among the heartbeats.
    write(signals, "id", held_up, "c")
    write(heartbeats, "pipeline", shop.pipeline, "r")
    write(heartbeats, "pipeline", held_up, "u")
    assert is_refused()
    write(heartbeats, "pipeline", held_up, "r")
    topics.write(signals, [(json.dumps({"id": beside}).encode(), None)])
    assert not is_refused()


def test_a_run_that_moves_a_view_meanwhile_makes_no_log_look_cut(
    topics: Topics, shop: Pipeline
) -> None:
    """Ends are read before positions, which may be of records written since."""
    ensure_topics(topics, shop)
    orders = table(shop.topic("public.orders"), "orders")

    def apply_what_comes() -> ViewCheckpoint:
        topics.write(orders.topic, [(b"1", b"{}")])
        return ViewCheckpoint(topics.ends([orders.topic])[orders.topic])

    continuity = Continuity(shop, topics).read([orders.topic])
    moved = apply_what_comes()
    assert continuity.resume("cache", orders, moved) is moved
    # As `status` does.
    with closing(TopicsPool()) as pool:
        report = read_topics(
            shop,
            {"cache": [orders]},
            lambda: {"cache": {orders.topic: apply_what_comes()}},
            pool,
        )
    (view,) = report.views["cache"]
    assert (view.problem, view.lag_records) == (None, 0)
    first, *others = moved.position.offsets
    ahead = replace(moved, position=replace(moved.position, offsets=(first + 9, *others)))
    with pytest.raises(Discontinued, match="its log was cut"):
        continuity.refuse("cache", orders, ahead)


def test_a_state_that_a_floor_empties_waits_for_the_rows_that_were_requested_with_it(
    topics: Topics, shop: Pipeline
) -> None:
    """Of a topic that was recreated, and of one whose keys were changed. After a TRUNCATE none come."""
    ensure_topics(topics, shop)
    orders = table(shop.topic("public.orders"), "orders")
    end = topics.ends([orders.topic])[orders.topic]
    views = SinkViews(Memory(STATE), shop, topics, lambda *_: ([], {}), PLACEHOLDER)
    continuity = Continuity(shop, topics).read([orders.topic])
    current, former = (
        ViewCheckpoint(replace(end, topic_id=topic_id), floor=100)
        for topic_id in (end.topic_id, "AAAAAAAAAAAAAAAAAAAAAA")
    )

    def is_refused(stored: ViewCheckpoint) -> bool:
        with suppress(Discontinued):
            views.refuse_unfilled(continuity, orders, stored)
            return False
        return True

    def write(name: str, column: str, value: dict[str, Any]) -> None:
        topics.write(
            shop.topic(name), [(json.dumps({column: "x"}).encode(), json.dumps(value).encode())]
        )
        views.read_control()

    def request(op: str, lsn: int) -> None:
        key = json.dumps({"id": request_name("it has another key", end)}).encode()
        value = json.dumps({"op": op, "source": {"lsn": lsn}}).encode()
        topics.write(shop.topic("cdc.signal"), [(key, value)])

    def raise_floor(lsn: int) -> None:
        row = {"table_name": orders.qualified, "lsn": f"0/{lsn:X}"}
        write("cdc.truncation", "table_name", {"after": row})

    assert (is_refused(current), is_refused(former)) == (False, True)
    request("c", 150)
    # A TRUNCATE after it: what comes by the log is all there is, unless the topic was recreated.
    raise_floor(200)
    assert (is_refused(current), is_refused(former)) == (False, True)
    # Another key: the floor and the request are of one transaction.
    raise_floor(300)
    request("c", 301)
    assert (is_refused(current), is_refused(former)) == (True, True)
    assert not is_refused(replace(current, floor=300))
    request("r", 310)
    assert (is_refused(current), is_refused(former)) == (False, False)


class Standing:
    """A sink whose views stand somewhere."""

    name = "cache"

    def __init__(self, stored: ViewCheckpoint) -> None:
        self._stored = stored

    def position(self, table: Table) -> ViewCheckpoint:
        return self._stored


@pytest.fixture
def patient_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are read for as long as a busy broker takes to answer."""
    monkeypatch.setattr(records, "TIMES_S", 60.0)


@pytest.mark.usefixtures("patient_times")
def test_the_end_is_that_of_decided_transactions(
    topics: Topics, shop: Pipeline, send: Send, unique: str, orders: str
) -> None:
    send(orders, [{"n": 1}, {"n": 2}], True)
    until_end(topics, orders, 3)
    send(orders, [{"n": 3}], False)
    until_end(topics, orders, 5)
    assert topics.write_times([(orders, 0, 2)]) == {}
    send(orders, [{"n": 4}], True)
    until_end(topics, orders, 7)
    assert list(topics.write_times([(orders, 0, 2)])) == [(orders, 0, 2)]
    # An open one isn't counted.
    with kafka.KafkaProducer(bootstrap_servers=shop.kafka, transactional_id=unique) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(orders, b"{}", key=b"1", partition=0).get(timeout=60)
        assert topics.ends([orders])[orders].offsets == (7, 0, 0)
        producer.commit_transaction()
    until_end(topics, orders, 9)


def until_end(topics: Topics, topic: str, offset: int) -> None:
    """The broker writes a transaction's marker after it has answered the producer."""
    wait_until(
        lambda: topics.ends([topic])[topic].offsets[0] == offset,
        10,
        f"end offset {offset} of {topic}",
    )


@pytest.mark.usefixtures("patient_times")
def test_times_are_those_of_the_records(
    topics: Topics, shop: Pipeline, send: Send, unique: str
) -> None:
    ensure_topics(topics, shop)
    orders, lines = f"{unique}.public.orders", f"{unique}.public.lines"
    start = time.time() * 1000
    send(orders, [{"n": 1}], True)
    send(orders, [{"n": 2}], True)
    send(lines, [{"n": 3}], True)
    until_end(topics, orders, 4)
    until_end(topics, lines, 2)
    places = [
        (orders, 0, 0),
        (orders, 0, 1),
        (orders, 0, 2),
        (lines, 0, 0),
        (orders, 1, 0),
        (orders, 0, 99),
    ]
    times = topics.write_times(places)
    assert set(times) == set(places[:4])
    # Offset 1 is the first transaction's marker: the next record is the one at 2.
    assert times[orders, 0, 1] == times[orders, 0, 2]
    assert (
        start
        <= times[orders, 0, 0]
        <= times[orders, 0, 2]
        <= times[lines, 0, 0]
        <= time.time() * 1000
    )


def test_the_last_record_is_found_behind_markers(
    topics: Topics, shop: Pipeline, send: Send, unique: str
) -> None:
    ensure_topics(topics, shop)
    beats = shop.heartbeat_topic
    assert topics.last_record(beats) is None
    send(beats, [{"pipeline": "ours"}], True)
    for number in range(15):
        send(beats, [{"pipeline": "theirs", "n": number}], number % 2 == 0)
    send(beats, [{"pipeline": "theirs", "n": 99}], False)

    def ours(record: Record) -> bool:
        return bool(json.loads(record.value or b"{}")["pipeline"] == "ours")

    until_end(topics, beats, 2 + 15 * 2 + 2)
    newest, own_record = topics.last_record(beats), topics.last_record(beats, ours)
    assert newest is not None
    assert own_record is not None
    assert json.loads(newest.value or b"")["n"] == 14
    assert own_record.offset == 0
    assert abs(own_record.timestamp_ms / 1000 - time.time()) < 60
    assert topics.last_record(beats, lambda _: False) is None


@pytest.mark.parametrize("address", [NOWHERE, "nonsense", f"{NOWHERE},127.0.0.1:2"])
def test_a_broker_that_is_down(address: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectorError) as caught:
        Topics(address)
    assert time.monotonic() - started < 10
    assert "can't be reached" in caught.value.message
    assert "cdc -p FILE up" in caught.value.hint


def test_a_connection_is_used_again_by_one_at_a_time_unless_it_failed(
    topics: Topics, shop: Pipeline
) -> None:
    with closing(TopicsPool()) as pool:
        with pool.borrowed(shop.kafka) as first:
            assert first.cluster_id() == topics.cluster_id()
        with pool.borrowed(shop.kafka) as again, pool.borrowed(shop.kafka) as another:
            assert again is first
            assert another is not first
        with pytest.raises(ConnectorError), pool.borrowed(shop.kafka) as failed:
            failed.ends(["no.such.topic"])
        with pool.borrowed(shop.kafka) as remaining, pool.borrowed(shop.kafka) as fresh:
            assert failed not in (remaining, fresh)
        with pytest.raises(ConnectorError), pool.borrowed(NOWHERE):
            pass


def test_settings_are_in_force_on_return(
    topics: Topics, shop: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_topics(topics, shop)
    topic = shop.topic("public.orders")
    for value in ("3600000", None, "7200000", None):
        topics.override({topic: {"segment.ms": value}})
        assert topics.overrides([topic])[topic].get("segment.ms") == value
    # A broker that doesn't take them over.
    monkeypatch.setattr(topics, "alter", lambda _: None)
    with pytest.raises(ConnectorError, match=f"doesn't go by {topic}'s new settings"):
        topics.override({topic: {"segment.ms": "3600000"}})


def test_a_new_connection_looks_for_its_first_topic_at_once(
    shop: Pipeline, admin: kafka.KafkaAdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka's client for Python would wait for 100 ms, of a writer and of a reader: measured in
    turn with its own, for how long the rest takes depends on the machine; more often where that is
    busy.
    """
    with Topics(shop.kafka) as topics:
        ensure_topics(topics, shop)
    took_s: dict[Any, list[float]] = {clients.quick_client: [], KafkaNetClient: []}
    for number in range(50):
        for turn, (client, seconds) in enumerate(took_s.items()):
            for module in (clients, records):
                monkeypatch.setattr(module, "quick_client", client)
            end = 2 * number + turn + 1
            with Topics(shop.kafka) as topics:
                began = time.monotonic()
                topics.write(shop.generations_topic, [(b"key", b"value")])
                read = list(topics.iterate_range(shop.generations_topic, 0, end))
                seconds.append(time.monotonic() - began)
                assert len(read) == end
        ours, theirs = (min(seconds) for seconds in took_s.values())
        if number >= 4 and ours < theirs - 0.1:
            return
    pytest.fail(str(took_s))


def test_a_busy_broker_is_waited_for(stack: Any, topics: Topics, shop: Pipeline) -> None:
    """It answers nothing for longer than most commands wait, which say so."""
    ensure_topics(topics, shop)
    entry = [(b"key", b"value")]
    with Topics(shop.kafka, PATIENCE_S) as patient, ThreadPoolExecutor() as pool:
        for connected in (topics, patient):
            connected.write(shop.runs_topic, entry)
        with stack.servers.frozen("kafka"):
            late, waiting = (
                pool.submit(connected.write, shop.runs_topic, entry)
                for connected in (topics, patient)
            )
            with pytest.raises(KafkaUnavailable, match="answers too late") as caught:
                late.result()
        waiting.result()
    assert "the same command again" in caught.value.hint


def test_topics_are_made_by_a_broker_that_falls_silent(
    stack: Any, topics: Topics, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time, each of which has its logs before the next are made."""
    tables = [f"public.t{number:03}" for number in range(3 * TOPICS_AT_ONCE)]
    big_shop = pipeline(
        unique, "postgresql://127.0.0.1:1/none", *tables, kafka=stack.endpoints.kafka
    )
    names = list(topic_specs(big_shop))
    with monkeypatch.context() as impatient:
        impatient.setattr("cdc.kafka.topics.TIMEOUT_MS", 2500)
        with Topics(big_shop.kafka, PATIENCE_S) as patient, ThreadPoolExecutor() as pool:
            made = pool.submit(ensure_topics, patient, big_shop)
            wait_until(lambda: topics.existing(names), 20, "the first topics", 0.01)
            with stack.servers.frozen("kafka"):
                # Longer than the client waits for an answer, and once more.
                time.sleep(6)
            assert len(made.result()) == len(names)
    assert topics.ends(names).keys() == set(names)
