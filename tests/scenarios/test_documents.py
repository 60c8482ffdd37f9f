"""Documents of several tables in three views: equal to Postgres' own query, whatever happens on the way."""

import json
import random
import re
import signal
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import psycopg
import pytest
import redis

from cdc import client
from cdc.documents.state import shard_prefix
from cdc.errors import SettingsError
from cdc.kafka.clients import kafka as kafka_client
from cdc.kafka.topics import Topics
from cdc.model.position import distance
from cdc.observe import diagnosis
from cdc.sink.factory import open_documents
from tests.support.bad_records import produce
from tests.support.cache import cache
from tests.support.document_history import repetitions
from tests.support.postgres import await_reads
from tests.support.shop import read
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cdc.model.position import Position
    from tests.scenarios.conftest import World

TABLES = ("public.customers", "public.orders", "public.items", "public.products")
SHOP = """
CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL, city text);
CREATE TABLE products (id int PRIMARY KEY, name text NOT NULL, price numeric(10,2));
CREATE TABLE orders (
    id int PRIMARY KEY, customer_id int, placed timestamptz NOT NULL, is_open boolean NOT NULL DEFAULT true
);
CREATE TABLE items (
    order_id int, line int, product_id int, quantity int NOT NULL, PRIMARY KEY (order_id, line)
);
"""
VIEWS = """
state: {{type: redis, url: "{state}", prefix: {name}}}
views:
  order_docs:
    root: public.orders
    include:
      customer: {{table: public.customers, on: {{customer_id: id}}}}
      items:
        table: public.items
        on: {{id: order_id}}
        many: true
        order_by: [line]
        aggregates: {{pieces: sum(quantity), lines: count(*)}}
        include:
          product: {{table: public.products, on: {{product_id: id}}}}
    to: [search, cache, warehouse]
  customer_docs:
    root: public.customers
    columns: [name]
    include:
      open_orders:
        table: public.orders
        on: {{id: customer_id}}
        where: is_open
        many: true
        order_by: [-placed]
        limit: 3
        columns: [id, placed]
    to: [cache]
"""


TIMED_VIEWS = """
state: {{type: redis, url: "{state}", prefix: {name}}}
views:
  order_steps:
    root: public.orders
    include:
      former:
        table: public.orders
        on: {{customer_id: customer_id}}
        previous: {{placed: placed}}
        columns: [id, placed]
      recent:
        table: public.orders
        on: {{customer_id: customer_id}}
        during: {{placed: placed}}
        before: 1 minute
        many: true
        columns: [id]
        aggregates: {{orders: count(*)}}
    having: orders > 1
    to: [search, cache]
  late_orders:
    root: public.orders
    where: is_open AND now() > placed + interval '8 seconds'
    columns: [placed]
    to: [cache, warehouse]
  order_minutes:
    from: public.orders
    window: {{hopping: 1 minute, every: 20 seconds, time: placed}}
    group_by: {{customer: customer_id, open: is_open}}
    select: {{orders: count(*), first: min(id), last_placed: max(placed), mean: avg(id)}}
    to: [search, cache, warehouse]
  order_runs:
    from: public.orders
    window: {{session: 1 second, time: placed}}
    select: {{orders: count(*)}}
    to: [cache]
  orders_before:
    from: public.orders
    window: {{sliding: 1 minute, time: placed}}
    group_by: [customer_id]
    select: {{orders: count(*), open: count(*) FILTER (WHERE is_open), mean: avg(id)}}
    to: [search, cache, warehouse]
  closing_orders:
    from: public.orders
    window: {{tumbling: 4 seconds, time: placed, lateness: 2 seconds}}
    group_by: {{open: is_open}}
    select: {{orders: count(*), last_order: last(id)}}
    to: [search, cache, warehouse]
"""
DEADLINE = """
  late_orders:
    root: public.orders
    where: is_open AND now() > placed + interval '20 seconds'
    columns: [placed]
    to: [cache]
"""


def shop(
    world: "World",
    begin: "Callable[[World], None]" = lambda _: None,
    state: str | None = None,
    views: str = VIEWS,
) -> None:
    """The tables with some rows, their connector, and the file with the views. `begin` is called
    before the connector is made; `state` is a database beside the cache's if no other is given.
    """
    world.write_file(*TABLES)
    state = state or world.cache[:-1] + "4"
    with redis.Redis.from_url(state) as server:
        server.flushdb()
    world.file.write_text(world.file.read_text() + views.format(state=state, name=world.name))
    world.sql(*filter(str.strip, SHOP.split(";")))
    change(world, random.Random(1), 60)
    world.cdc("migrate")
    begin(world)
    world.cdc("register")


def without_other_sinks(world: "World") -> None:
    """Leave the cache alone in the file, where the other sinks have nothing to prove."""
    text = re.sub(r"  (search|warehouse): \{.*\n", "", world.file.read_text())
    world.file.write_text(re.sub(r"to: \[[a-z, ]+\]", "to: [cache]", text))


def change(world: "World", chance: random.Random, transactions: int) -> None:
    """Random transactions over all tables; one that a key refuses is left out."""
    with psycopg.connect(world.dsn) as connection:
        for _ in range(transactions):
            with suppress(psycopg.errors.UniqueViolation), connection.transaction():
                for _ in range(chance.choice([1, 2, 5])):
                    connection.execute(*statement(chance))


def statement(chance: random.Random) -> tuple[str, list[Any]]:
    customer, order, product = chance.randrange(8), chance.randrange(20), chance.randrange(6)
    name = chance.choice(["Ann", "", 'B "quoted" \\', "ü\x1e"])
    statements: list[tuple[str, list[Any]]] = [
        (
            "INSERT INTO customers VALUES (%s, %s, 'x')"
            " ON CONFLICT (id) DO UPDATE SET name = excluded.name",
            [customer, name],
        ),
        (
            "INSERT INTO products VALUES (%s, %s, %s)"
            " ON CONFLICT (id) DO UPDATE SET price = excluded.price",
            [product, name, chance.randrange(1000)],
        ),
        (
            "INSERT INTO orders VALUES (%s, %s, now(), %s)"
            " ON CONFLICT (id) DO UPDATE SET customer_id = excluded.customer_id,"
            " is_open = excluded.is_open",
            [order, chance.choice([None, customer]), chance.random() < 0.7],
        ),
        (
            "INSERT INTO items VALUES (%s, %s, %s, 2)"
            " ON CONFLICT (order_id, line) DO UPDATE SET product_id = excluded.product_id,"
            " quantity = items.quantity + 1",
            [order, chance.randrange(4), product],
        ),
        ("DELETE FROM items WHERE order_id = %s AND line = 1", [order]),
        ("DELETE FROM orders WHERE id = %s", [order]),
        ("DELETE FROM customers WHERE id = %s", [customer]),
        ("UPDATE orders SET id = id + 100 WHERE id = %s", [order]),
    ]
    return chance.choice(statements)


def states(world: "World") -> dict[str, str]:
    return {sink["name"]: sink["state"] for sink in world.json("status")["sinks"]}


def test_documents_follow_their_tables_through_a_kill(world: "World") -> None:
    shop(world)
    chance = random.Random(2)

    def documents_alone_run(_: str) -> bool:
        running = {name for name, state in states(world).items() if state == "running"}
        return running == {"documents"}

    world.run_until(documents_alone_run, "--sink", "documents")
    with world.process() as process:
        change(world, chance, 100)
        world.wait_for("cache", 1)
        change(world, chance, 100)
        process.send_signal(signal.SIGKILL)
        process.wait()
    change(world, chance, 30)
    with world.running():
        change(world, chance, 50)
        views = {(result.sink, result.table) for result in world.verified()}
        assert {
            ("search", "view.order_docs"),
            ("cache", "view.order_docs"),
            ("warehouse", "view.order_docs"),
            ("cache", "view.customer_docs"),
        } <= views
        assert ("search", "view.customer_docs") not in views


def test_documents_are_rebuilt_waited_for_and_truncated(world: "World") -> None:
    """What works for tables works for documents: rebuild, rollback, tokens, TRUNCATE, status."""
    shop(world)
    with world.running():
        world.verified()
        with psycopg.connect(world.dsn) as connection:
            connection.execute("INSERT INTO products VALUES (77, 'new', 1.50)")
            connection.execute("INSERT INTO orders VALUES (77, NULL, now(), true)")
            connection.execute("INSERT INTO items VALUES (77, 0, 77, 3)")
            connection.commit()
            token = client.token(connection)
        view = client.view(world.file, "cache", "view.order_docs")
        client.wait_for(view, token, timeout_s=120)
        assert cached(world, "order_docs", "77")["pieces"] == 3
        for pieces in (4, 5):
            world.sql(f"UPDATE items SET quantity = {pieces} WHERE order_id = 77")
            wait_by_hand(world)
            document = cached(world, "order_docs", "77")
            assert document["pieces"] == pieces
            assert document["items"][0]["product"]["name"] == "new"
        # A document that somebody has changed in the cache is found, and sent again.
        with redis.Redis.from_url(world.cache) as server:
            server.set(f"{world.name}:view.order_docs:77", json.dumps({**document, "pieces": 9}))
        mended = world.json("verify", "--timeout", "180", "--repair")
        assert mended["equal"]
        repaired = [(view["sink"], view["table"], view["repaired"]) for view in mended["views"]]
        assert [view for view in repaired if view[2]] == [("cache", "view.order_docs", 1)]
        assert cached(world, "order_docs", "77") == document
        # The index is made again beside the live one, documents among it, and shown.
        world.rebuild("search")
        world.sql("UPDATE products SET name = 'renamed' WHERE id = 77")
        world.rollback("search")
        world.verified()
        world.sql("TRUNCATE items")
        wait_for_documents(world, view)
        assert cached(world, "order_docs", "77")["items"] == []
        view.close()
        world.verified()
        (listed,) = [v for v in world.json("views", "list")["views"] if v["view"] == "order_docs"]
        assert (listed["tables"], listed["sinks"]) == (
            sorted(TABLES),
            ["search", "cache", "warehouse"],
        )
        query = world.cdc("views", "sql", "order_docs").stdout.rstrip().removesuffix(";")
        with psycopg.connect(world.dsn) as connection:
            where = "WHERE id = 77"
            row = connection.execute(f"SELECT pieces FROM ({query}) AS it {where}").fetchone()
        assert row == (None,)
        wait_until(world.is_current, 30, "no view to be behind")
        status = world.json("status")
        hops = {sink["name"]: sink for sink in status["sinks"]}
        assert hops["documents"]["state"] == "running"
        assert {view["table"] for view in hops["documents"]["views"]} == set(TABLES)
        assert "view.order_docs" in {view["table"] for view in hops["search"]["views"]}


def wait_by_hand(world: "World") -> None:
    """Wait until the cache's documents have all that is committed, as docs/use/read-your-writes.md
    tells other languages.
    """
    with psycopg.connect(world.dsn) as connection:
        token = client.Token.parse(client.token(connection))
    documents = world.pipeline.view_topic("order_docs")
    sources = [f"{world.name}.{table}" for table in TABLES]

    def is_in_the_log() -> bool:
        record = kafka.last_record(world.pipeline.message_topic)
        return record is not None and json.loads(record.value or b"")["source"]["lsn"] >= token.lsn

    def are_made_of(ends: "Mapping[str, Position]") -> bool:
        fields = hash_of(world.cache[:-1] + "4", f"{shard_prefix(world.name)}:_documents")
        names = {topic: f"order_docs {topic}" for topic in (documents, *ends)}
        return {*names.values()} <= fields.keys() and all(
            offset >= goal
            for topic, end in ends.items()
            for offset, goal in zip(json.loads(fields[names[topic]])[1], end.offsets, strict=True)
        )

    def is_in_the_cache(barrier: "Position") -> bool:
        fields = hash_of(world.cache, f"{world.name}:_cdc:view.order_docs")
        return all(int(fields[str(n)]) >= goal for n, goal in enumerate(barrier.offsets))

    with Topics(world.pipeline.kafka) as kafka:
        wait_until(is_in_the_log, 30, "the token to be in the log")
        ends = kafka.log_ends(sources)
        wait_until(lambda: are_made_of(ends), 60, "documents to be made of all that is in the log")
        barrier = kafka.log_ends([documents])[documents]
        wait_until(lambda: is_in_the_cache(barrier), 60, "the cache to have the documents")


def hash_of(url: str, key: str) -> dict[str, str]:
    with redis.Redis.from_url(url, decode_responses=True) as server:
        fields: dict[str, str] = server.hgetall(key)
        return fields


def test_documents_change_with_the_time(world: "World") -> None:
    """A deadline passes and a window closes, not too early, while no table changes; deadlines pass while
    nothing runs, and while the state is lost; and each time the views are equal to Postgres' query.
    """
    shop(world, views=TIMED_VIEWS)
    chance = random.Random(5)
    with world.running():
        change(world, chance, 100)
        world.verified()
        world.sql("INSERT INTO orders VALUES (500, 1, now(), true)")
        with psycopg.connect(world.dsn) as connection:
            query = "SELECT extract(epoch FROM placed)::float8 FROM orders WHERE id = 500"
            (placed,) = connection.execute(query).fetchone() or (0.0,)
        begin = placed // 4 * 4
        opened = datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
        window = json.dumps([True, opened], separators=(",", ":"))

        def is_closed() -> bool:
            return bool(cached(world, "closing_orders", window)["final"])

        wait_until(lambda: is_cached(world, "closing_orders", window), 60, "the window to be there")
        wait_until(is_closed, 60, "the window to close")
        assert time.time() >= begin + 4 + 2
        wait_until(lambda: is_cached(world, "late_orders", "500"), 60, "the order to be late")
        assert time.time() >= placed + 8
        clocks = world.json("status")["documents"]["clocks"]
        assert clocks["late_orders"]["at"] > placed + 8
        assert clocks["closing_orders"]["at"] >= begin + 6
        world.sql("UPDATE orders SET placed = now() + interval '1 hour' WHERE id = 500")
        wait_until(lambda: not is_cached(world, "late_orders", "500"), 60, "it to be withdrawn")
    change(world, chance, 100)
    with redis.Redis.from_url(world.cache[:-1] + "4") as server:
        server.flushdb()
    with world.running():
        change(world, chance, 50)
        compared = world.verified()
        results = {(result.sink, result.table): result.source_rows for result in compared}
        for view in (
            ("search", "view.order_steps"),
            ("warehouse", "view.late_orders"),
            ("warehouse", "view.order_minutes"),
            *((sink, "view.orders_before") for sink in ("search", "cache", "warehouse")),
        ):
            assert results[view] > 1
        closed = [result.closed for result in compared if result.table == "view.closing_orders"]
        assert len(closed) == 3
        assert min(closed) > 1
        # A document that somebody has changed in the cache is sent again, though it hasn't changed.
        with redis.Redis.from_url(world.cache) as server:
            key = next(server.scan_iter(f"{world.name}:view.order_steps:*"))
            server.set(key, "{}")
            server.delete(next(server.scan_iter(f"{world.name}:view.order_minutes:*")))
        assert world.json("verify", "--timeout", "180", "--repair")["equal"]
    repaired = json.loads(key.decode().rpartition(":")[2])
    assert repeated(world, "late_orders") == []
    assert repeated(world, "order_steps") == [repaired]


def test_a_table_that_is_not_applied_holds_clocks_back_and_is_named(world: "World") -> None:
    shop(world, without_other_sinks, views=VIEWS + DEADLINE)

    def clock() -> float:
        at: float = world.json("status")["documents"]["clocks"].get("late_orders", {"at": 0})["at"]
        return at

    with world.running():
        wait_until(clock, 60, "the view to have a clock")
    stood_at = clock()
    items = f"{world.name}.public.items"
    with Topics(world.pipeline.kafka) as topics:
        former = sum(topics.ends([items])[items].offsets)
        world.sql("INSERT INTO items SELECT 9, n, 1, 1 FROM generate_series(100, 199) n")
        wait_until(
            lambda: sum(topics.ends([items])[items].offsets) >= former + 100, 60, "the rows to come"
        )
        ends = topics.ends([items])[items].offsets
        # The log no longer has what the state needs next.
        topics.override({items: {"cleanup.policy": "compact,delete"}})
        with kafka_client.KafkaAdminClient(bootstrap_servers=world.pipeline.kafka) as admin:
            admin.delete_records(
                {kafka_client.TopicPartition(items, number): end for number, end in enumerate(ends)}
            )
        topics.override({items: {"cleanup.policy": "compact"}})

    held = "it waits for the topic of public.items, which isn't applied"

    def stands() -> list[dict[str, Any]]:
        """A status in this process, to which a few seconds are as long as a minute."""
        with mock.patch.object(diagnosis, "LATE_S", 5.0):
            status = json.loads(run_with_spark(world.words("status", "--json")).stdout)
        found = [finding for finding in status["findings"] if finding["code"] == "clock-stands"]
        return [finding for finding in found if held in finding["message"]]

    with world.running():
        (finding,) = wait_until(stands, 120, "the clock to be behind, and why", 0.5)
    assert finding["table"] == "view.late_orders"
    assert finding["since"] == stood_at


def repeated(world: "World", view: str) -> list[object]:
    """See `repetitions`."""
    records = read(world.pipeline.kafka, world.pipeline.view_topic(view))
    return repetitions((record.key["id"], record.op, record.after) for record in records)


def is_cached(world: "World", view: str, row_id: str) -> bool:
    with redis.Redis.from_url(world.cache) as server:
        return bool(server.exists(f"{world.name}:view.{view}:{row_id}"))


def test_a_view_that_no_longer_fits_its_tables_stops_only_itself(world: "World") -> None:
    shop(world, without_other_sinks)
    world.sql(
        "CREATE TYPE kind AS ENUM ('draft', 'open')",
        "ALTER TABLE customers ADD kind kind NOT NULL DEFAULT 'open'",
        "INSERT INTO customers VALUES (52, 'Cid', 'x', 'draft')",
    )
    root = "    root: public.customers\n"
    text = world.file.read_text()
    world.file.write_text(text.replace(root, f"{root}    where: kind <> 'draft'\n"))
    world.sql(
        "INSERT INTO customers VALUES (50, 'Ann', 'x'), (51, 'Bob', 'x')",
        "INSERT INTO orders VALUES (50, 50, now(), true), (51, 51, now(), true)",
    )
    with world.running():
        world.verified()
        orders, customers = (
            client.view(world.file, "cache", f"view.{name}")
            for name in ("order_docs", "customer_docs")
        )
        # A label of its `where`: what that hid isn't shown.
        world.sql("ALTER TYPE kind RENAME VALUE 'draft' TO 'hidden'")
        _follow_without_customer_docs(world, orders, customers, "third")
        finding = _find_waiting_view(world)
        assert "public.customers.kind has no label 'draft'" in finding["message"]
        with redis.Redis.from_url(world.cache) as server:
            assert not server.exists(f"{world.name}:view.customer_docs:52")
        world.sql("ALTER TYPE kind RENAME VALUE 'hidden' TO 'draft'")
        _wait_until_all_views_fit(world)
        world.verified()
        # A column that `where` of customer_docs names; order_docs has whatever columns there are.
        world.sql("ALTER TABLE orders RENAME COLUMN is_open TO is_active")
        _follow_without_customer_docs(world, orders, customers, "first")
        finding = _find_waiting_view(world)
        assert finding["table"] == "view.customer_docs"
        assert "public.orders has no column is_open" in finding["message"]
        assert finding["severity"] == "degraded"
        result = world.json("verify", "--timeout", "180", "--sink", "cache", code=10)
        equal = {(view["sink"], view["table"]): view["equal"] for view in result["views"]}
        assert [view for view, is_equal in equal.items() if not is_equal] == [
            ("cache", "view.customer_docs")
        ]
        assert len(equal) == 6
        assert not result["equal"]
    plan = world.json("views", "plan")
    assert list(plan["waiting"]) == ["customer_docs"]
    assert plan["views"] == {"order_docs": False}
    # A later run starts with it as it is.
    with world.running():
        _follow_without_customer_docs(world, orders, customers, "second")
        world.sql("DELETE FROM customers WHERE id = 50")
        wait_for_documents(world, orders)
        assert cached(world, "customer_docs", "50")["open_orders"][0]["id"] == 50
        # The column is back: all its documents are made again, and the deleted one's goes.
        world.sql("ALTER TABLE orders RENAME COLUMN is_active TO is_open")
        _wait_until_all_views_fit(world)
        world.verified()
        assert cached(world, "customer_docs", "51")["name"] == "second"
        with redis.Redis.from_url(world.cache) as server:
            assert not server.exists(f"{world.name}:view.customer_docs:50")
    for view in (orders, customers):
        view.close()


def _find_waiting_view(world: "World") -> dict[str, Any]:
    """The only finding on views. The sink's stream may report a moment before the documents' does."""

    def look() -> list[dict[str, Any]]:
        findings = world.json("status")["findings"]
        found = [finding for finding in findings if "_docs" in finding["message"]]
        return found if [finding["code"] for finding in found] == ["documents-waiting"] else []

    (finding,) = wait_until(look, 60, "status to report the view whose documents aren't made")
    return finding


def _wait_until_all_views_fit(world: "World") -> None:
    wait_until(
        lambda: "documents-waiting" not in [f["code"] for f in world.json("status")["findings"]],
        120,
        "the view to fit again",
    )


def _follow_without_customer_docs(
    world: "World", orders: client.View, customers: client.View, name: str
) -> None:
    """Documents of orders follow a change. Documents of customers stay, and who waits for one gets an error."""
    former = cached(world, "customer_docs", "51")
    world.sql(f"UPDATE customers SET name = '{name}' WHERE id = 51")
    token = wait_for_documents(world, orders)
    assert cached(world, "order_docs", "51")["customer"]["name"] == name
    with pytest.raises(SettingsError, match=r"view\.customer_docs waits"):
        client.wait_for(customers, token, timeout_s=120)
    assert cached(world, "customer_docs", "51") == former


def wait_for_documents(world: "World", view: client.View) -> str:
    """Wait until a view has all that is committed now; return the token for it."""
    with psycopg.connect(world.dsn) as connection:
        token = client.token(connection)
    client.wait_for(view, token, timeout_s=120)
    return token


def cached(world: "World", view: str, row_id: str) -> dict[str, Any]:
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        text = server.get(f"{world.name}:view.{view}:{row_id}")
    document: dict[str, Any] = json.loads(str(text))
    return document


def test_a_changed_view_and_a_lost_state_make_documents_again(world: "World") -> None:
    shop(world, without_other_sinks)
    with world.running():
        world.verified()
    text = world.file.read_text()
    world.file.write_text(text.replace("limit: 3", "limit: 1"))
    change(world, random.Random(3), 30)
    world.sql("INSERT INTO customers VALUES (900, 'x')")
    with world.running():
        world.verified()
        # Documents that nobody has made so: another, and one of no row.
        send_documents(world, 900, 901)
        world.sql("INSERT INTO customers VALUES (902, 'x')")
        customers = client.view(world.file, "cache", "view.customer_docs")
        wait_for_documents(world, customers)
        customers.close()
        verified = world.json("verify", "--sink", "cache", code=8)
        wrong = {
            view["table"]: [difference["kind"] for difference in view["sample"]]
            for view in verified["views"]
            if not view["equal"]
        }
        assert wrong == {"view.customer_docs": ["different", "extra"]}
    change(world, random.Random(4), 30)
    with redis.Redis.from_url(world.cache[:-1] + "4") as server:
        server.flushdb()
    with world.running():
        world.verified()


def send_documents(world: "World", *customers: int) -> None:
    """Write documents of customers to their topic, beside the pipeline."""
    records = []
    for number in customers:
        row = {"id": number, "name": "nobody", "open_orders": "[]"}
        source = {"schema": "view", "table": "customer_docs", "ts_us": 1}
        value = json.dumps({"op": "u", "after": row, "source": source}).encode()
        records.append((b'{"id":%d}' % number, value))
    produce(world.pipeline.kafka, world.pipeline.view_topic("customer_docs"), records, None)


READS = """
SELECT relname, seq_scan + coalesce(idx_scan, 0) FROM pg_stat_user_tables
WHERE schemaname = 'public' ORDER BY 1
"""
PEOPLE = """
SELECT application_name, count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
GROUP BY 1
"""


def reads(world: "World") -> dict[str, int]:
    """How often each table has been read, by whomever."""
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        await_reads(connection)
        return dict(connection.execute(READS).fetchall())


def statements(world: "World", offset: int) -> tuple[list[str], int]:
    """The statements since an offset of the server's log that name a table of the shop, and where
    it ends; those of triggers aside.
    """
    log = (world.stack.state / "postgres" / "log" / "postgres.log").read_bytes()
    entries = re.split(rb"^(?=\d{4}-\d\d-\d\d )", log[offset:], flags=re.MULTILINE)
    texts = [entry.decode() for entry in entries if b"statement: " in entry or b"execute " in entry]
    # The start of a run lets Postgres plan the queries of views, which runs none.
    texts = [text for text in texts if "statement: EXPLAIN SELECT" not in text]
    names = [table.removeprefix("public.") for table in TABLES]
    return [text for text in texts if any(re.search(rf"\b{n}\b", text) for n in names)], len(log)


@pytest.mark.own_source
def test_documents_are_made_without_the_source_and_without_sinks(
    world: "World", tmp_path: Path
) -> None:
    with cache(tmp_path / "state") as state:
        shop(world, state=state)
        _make_without_the_source(world, state)


def _make_without_the_source(world: "World", state: str) -> None:
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        database = connection.info.dbname
        connection.execute(f"ALTER DATABASE {database} SET log_statement = 'all'")
    before, (_, logged) = reads(world), statements(world, 0)
    with world.running():
        documents = client.view(world.file, "cache", "view.order_docs")
        with psycopg.connect(world.dsn) as connection:
            for number in range(1100, 1140):
                connection.execute("INSERT INTO customers VALUES (%s, 'x')", [number])
                connection.execute("INSERT INTO orders VALUES (%s, %s, now())", [number, number])
                connection.execute("INSERT INTO items VALUES (%s, 0, 1, 2)", [number])
                connection.commit()
            token = client.token(connection)
            client.wait_for(documents, token, timeout_s=300)
            assert cached(world, "order_docs", "1139")["customer"]["name"] == "x"
            # The first load, changes of all tables, and the wait: nobody has read a table.
            assert reads(world) == before
            # While documents are kept there are the connector and what looks for other tables.
            people_by_flight: dict[str, int] = dict(connection.execute(PEOPLE).fetchall())
            assert sum(people_by_flight.values()) <= 4, people_by_flight
            texts, logged = statements(world, logged)
            inserts = [text for text in texts if "INSERT INTO" in text]
            assert len(inserts) == 3 * 40
            # Nobody else names a table: rows are neither counted nor locked, nor asked for.
            assert [text for text in texts if text not in inserts] == []
        documents.close()
    # Making all again from the topics reads no table and no sink either, nor do changes after it.
    with redis.Redis.from_url(state) as server:
        server.flushdb()
    served = sink_reads(world)

    def have_changed(_: str) -> bool:
        changed = {f"{world.name}.{table}" for table in TABLES}
        with Topics(world.pipeline.kafka) as kafka:
            ends = kafka.log_ends(sorted(changed))
        current = open_documents(world.pipeline)()
        # Together the views have all tables.
        noted = {topic: place for note in current.values() for topic, place in note.items()}
        if not all(distance(noted.get(topic), end).reached for topic, end in ends.items()):
            return False
        if inserted_later.is_set():
            return True
        with psycopg.connect(world.dsn) as connection:
            connection.execute("INSERT INTO customers VALUES (1140, 'x')")
        inserted_later.set()
        return False

    inserted_later = threading.Event()
    world.run_until(have_changed, "--sink", "documents")
    assert sink_reads(world) == served
    topic = world.pipeline.view_topic("customer_docs")
    records = read(world.pipeline.kafka, topic)
    assert [record.key["id"] for record in records if record.key["id"] == 1140] == [1140]
    assert [record.key["id"] for record in records].count(1139) == 2
    assert reads(world) == before
    assert [text for text in statements(world, logged)[0] if "INSERT INTO" not in text] == []
    cached(world, "order_docs", "1139")
    alias = f"{world.stack.endpoints.elasticsearch}/{world.name}-view.order_docs"
    assert httpx.get(f"{alias}/_search").status_code == 200
    later = sink_reads(world)
    assert {name for name in later if later[name] != served.get(name)} == {"get", "searches"}


def sink_reads(world: "World") -> dict[str, int]:
    """How often the cache's server was asked, by command, and the index for searches and documents."""
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        commands: dict[str, Any] = server.info("commandstats")
    counts = {
        name.removeprefix("cmdstat_"): int(counted["calls"]) for name, counted in commands.items()
    }
    url = f"{world.stack.endpoints.elasticsearch}/_stats/search,get?expand_wildcards=all"
    totals = httpx.get(url).json()["_all"]["total"]
    asking = ("info", "hello", "select", "client|setinfo", "ping")
    return {
        **{name: calls for name, calls in counts.items() if name not in asking},
        "searches": totals["search"]["query_total"],
        "documents": totals["get"]["total"],
    }
