"""Tables that change their definition while the pipeline runs: nothing is lost, and nobody restarts anything."""

import json
from typing import TYPE_CHECKING, Any

import psycopg
import redis

from cdc.readiness.checks import hidden_rows
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def caught_up(world: "World") -> bool:
    """Tell whether all views are equal, also after rows that are on their way: rows that are sent
    again come some time after the definition has changed.
    """
    world.settle()
    return len(world.census()) == 3 * len(world.described)


def equal_soon(world: "World") -> None:
    wait_until(
        lambda: caught_up(world),
        240,
        lambda: str(
            [comparison.to_dict() for comparison in world.compare() if not comparison.equal]
        ),
        0.5,
    )


def aside(world: "World") -> dict[str, dict[str, Any]]:
    return {sink["name"]: sink["aside"] for sink in world.json("status")["sinks"]}


def stuck(world: "World") -> bool:
    waiting = aside(world)
    return set(waiting["search"]) == set(waiting["warehouse"]) == {"public.items"}


def test_columns_come_go_and_change_their_names(world: "World") -> None:
    world.sql(
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE TABLE items (id int PRIMARY KEY, n int, v text, m mood)",
        "INSERT INTO items SELECT n, n, 'first', 'good' FROM generate_series(1, 30) n",
    )
    world.begin("public.items")
    with world.running():
        world.settle()
        world.sql("ALTER TABLE items ADD plain text", "UPDATE items SET plain = 'new' WHERE id < 5")
        equal_soon(world)
        # Old rows send no event: neither for a constant, which isn't even stored, nor for a
        # rewrite.
        world.sql("ALTER TABLE items ADD constant int NOT NULL DEFAULT 7")
        world.sql(
            "ALTER TABLE items ADD each uuid DEFAULT gen_random_uuid()",
            "DELETE FROM items WHERE id = 30",
        )
        world.sql(
            "INSERT INTO items (id, n) VALUES (31, 31)", "UPDATE items SET n = 0 WHERE id = 31"
        )
        equal_soon(world)
        world.sql(
            "ALTER TABLE items RENAME n TO number",
            "UPDATE items SET number = number + 1 WHERE id < 10",
        )
        world.sql("ALTER TABLE items DROP v", "ALTER TYPE mood ADD VALUE 'indifferent'")
        world.sql(
            "UPDATE items SET m = 'indifferent' WHERE id = 3",
            "ALTER TABLE items REPLICA IDENTITY FULL",
        )
        world.sql("UPDATE items SET id = 100 WHERE id = 1")
        equal_soon(world)


def test_a_type_that_a_view_can_not_take_waits_for_a_rebuild(world: "World") -> None:
    """The cache takes it as it is; index and warehouse say what to do, other tables go on meanwhile."""
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "CREATE TABLE others (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 30) n",
    )
    world.begin("public.items", "public.others")
    with world.running():
        world.settle()
        world.sql("ALTER TABLE items ALTER n TYPE bigint USING n * 10000000000")
        world.sql("UPDATE items SET n = n + 1 WHERE id > 20", "INSERT INTO others VALUES (1, 1)")
        wait_until(lambda: stuck(world), 120, "aside")
        assert aside(world)["cache"] == {}
        hint = aside(world)["search"]["public.items"][1]
        assert hint == "cdc -p FILE rebuild search --table public.items"
        assert hint.removeprefix("cdc -p FILE ") in " ".join(world.cdc("status").stdout.split())
        world.sql("INSERT INTO others VALUES (2, 2)")
        others = {(sink, "public.others") for sink in world.pipeline.sinks}
        wait_until(lambda: others <= world.census().keys(), 60, "others go on", 0.5)
        assert ("search", "public.items") not in world.census()
        assert_verify_waits_for_no_rebuild(world)
        for sink in ("search", "warehouse"):
            world.rebuild(sink, "public.items")
        equal_soon(world)
        # Whoever does what is printed gets a verdict.
        world.cdc("verify", "--sink", "search")
        wait_until(lambda: not any(aside(world).values()), 20, "nothing is aside")
        # Dropped and added again under the same name, with a type of another family.
        world.sql("ALTER TABLE items DROP n", "ALTER TABLE items ADD n text DEFAULT 'text'")
        wait_until(lambda: stuck(world), 120, "aside")
        for sink in ("search", "warehouse"):
            world.rebuild(sink, "public.items")
        equal_soon(world)


def assert_verify_waits_for_no_rebuild(world: "World") -> None:
    """A view that waits for one is named with its command, and no verdict is of success."""
    verified = world.cdc("verify", "--sink", "search", "--timeout", "90", "--json", code=10)
    views = {view["table"]: view for view in json.loads(verified.stdout)["views"]}
    assert views["public.others"]["verdict"] == "equal"
    assert views["public.others"]["source_rows"] == 2
    assert views["public.items"]["verdict"] == "undecided"
    assert views["public.items"]["hint"] == "cdc -p FILE rebuild search --table public.items"
    assert "public.items in search" in verified.stderr + verified.stdout


def test_tables_come_go_and_change_their_partitions(world: "World") -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE late (id int PRIMARY KEY, v text)",
        "INSERT INTO late SELECT n, 'before' FROM generate_series(1, 50) n",
        "INSERT INTO parts SELECT n, n FROM generate_series(1, 20) n",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 20) n",
    )
    world.begin("public.items", "public.parts")
    with world.running():
        world.settle()
        world.sql(
            "CREATE TABLE parts_high (id int PRIMARY KEY, n int)",
            "INSERT INTO parts_high VALUES (150, 1)",
        )
        world.sql("ALTER TABLE parts ATTACH PARTITION parts_high FOR VALUES FROM (100) TO (200)")
        equal_soon(world)
        world.sql(
            "ALTER TABLE parts DETACH PARTITION parts_low", "INSERT INTO parts VALUES (151, 2)"
        )
        equal_soon(world)
        # A table is added to the pipeline, by a pattern: the run reads the file again when the
        # table is registered.
        world.write_file("public.items", "public.parts", "{table: public.l*, partitions: 2}")
        world.cdc("migrate")
        world.sql("INSERT INTO late VALUES (51, 'while')")
        world.cdc("register")
        world.sql("UPDATE late SET v = 'after' WHERE id > 48", "UPDATE items SET n = n + 1")
        equal_soon(world)
        world.sql("ALTER TABLE late RENAME TO later", "UPDATE items SET n = n + 1")
        wait_until(
            lambda: all("public.late" in tables for tables in aside(world).values()),
            120,
            "the rename is reported",
        )
        assert "public.later" in aside(world)["cache"]["public.late"][0]
        # Under its new name it is another table, with views of its own; the run takes it up without
        # a restart.
        world.begin("public.items", "public.parts", "public.later")
        equal_soon(world)
        assert "public.later" in {
            view["table"] for view in world.json("status")["sinks"][0]["views"]
        }


def test_without_event_triggers_definitions_are_compared(world: "World") -> None:
    """As where nobody is a superuser; rows that were changed before anybody looked are right in the end as well."""
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO items SELECT n, n FROM generate_series(1, 30) n",
    )
    world.begin("public.items")
    world.sql(
        *(
            f"DROP EVENT TRIGGER {name}"
            for name in ("cdc_ddl", "cdc_ddl_around", "cdc_drop", "cdc_rewrite")
        )
    )
    with world.running():
        world.settle()
        world.sql(
            "ALTER TABLE items ADD vip boolean NOT NULL DEFAULT false",
            "ALTER TABLE items ADD plain text",
        )
        world.sql("UPDATE items SET plain = 'new' WHERE id < 5")
        equal_soon(world)


def test_tables_that_inherit_are_captured_each_with_its_own_rows(world: "World") -> None:
    """Whatever is done to the parent, and with rows of children that nobody captures. One table is
    sent again beside the log, one with the log held up: a time stamp is its key.
    """
    world.sql(
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE DOMAIN state AS mood",
        "CREATE TABLE items (id int PRIMARY KEY, n int, s state DEFAULT 'bad')",
        "CREATE TABLE archived (PRIMARY KEY (id)) INHERITS (items)",
        "CREATE TABLE unseen () INHERITS (items)",
        "CREATE TABLE visits (at timestamptz PRIMARY KEY, n int)",
        "INSERT INTO items (id, n) SELECT n, n FROM generate_series(1, 30) n",
        "INSERT INTO archived (id, n) SELECT n, n FROM generate_series(41, 50) n",
        "INSERT INTO unseen (id, n) VALUES (900, 900)",
        "INSERT INTO visits SELECT timestamptz '2026-01-01' + n * interval '1 day', n FROM generate_series(1, 20) n",
    )
    world.begin("public.items", "public.archived", "public.visits")
    with world.running():
        equal_soon(world)
        world.sql(
            "CREATE TABLE later () INHERITS (items)",
            "INSERT INTO later (id, n) VALUES (901, 901)",
            "CREATE TABLE seldom () INHERITS (visits)",
            "INSERT INTO seldom VALUES ('2020-01-01', 902)",
        )
        world.sql(
            "ALTER TABLE items ADD COLUMN w int NOT NULL DEFAULT 7",
            "ALTER TABLE visits ADD COLUMN w int NOT NULL DEFAULT 7",
        )
        world.sql("ALTER TABLE items RENAME n TO number")
        equal_soon(world)
        world.sql(
            "SET event_triggers = off", "ALTER TABLE items ADD extra text NOT NULL DEFAULT 'd'"
        )
        world.sql("ALTER TYPE mood RENAME VALUE 'bad' TO 'worse'")
        equal_soon(world)
        rows = world.census()
        for sink in world.pipeline.sinks:
            counts = [rows[sink, f"public.{name}"] for name in ("items", "archived", "visits")]
            assert counts == [30, 10, 20]
        # Every verb takes it as it is.
        world.cdc("migrate")
        world.cdc("register")
        tables = {finding["table"] for finding in world.json("doctor")["findings"]}
        assert tables <= {None, ""}
        world.sql("ALTER TABLE items ALTER number TYPE text USING 'n' || number")
        children = {"public.items", "public.archived"}
        wait_until(lambda: set(aside(world)["search"]) == children, 120, "aside")
        for sink in ("search", "warehouse"):
            world.rebuild(sink)
        equal_soon(world)


def test_a_hidden_key_and_deletes_that_name_no_row_are_made_up_for(world: "World") -> None:
    """A key moves while policies hide the rows: without its rows a floor would empty the views for
    good. Of the deletes the log has made-up keys: there is a row with such a key, and it stays.
    """
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, tenant int NOT NULL, v text)",
        "CREATE TABLE coded (id int PRIMARY KEY, code int NOT NULL UNIQUE)",
        "CREATE TABLE others (id int PRIMARY KEY)",
        "INSERT INTO items SELECT id, 1, 'first' FROM generate_series(1, 20) id",
        "INSERT INTO coded SELECT id, -id FROM generate_series(0, 20) id",
    )
    world.begin("public.items", "public.coded", "public.others")
    with world.running():
        world.settle()
        world.sql(
            "ALTER TABLE items ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY own ON items USING (tenant = 2)",
            "ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (tenant, id)",
            "INSERT INTO items VALUES (21, 1, 'later')",
        )
        wait_until(lambda: "hide rows from" in str(aside(world)), 60, "the table to wait")
        cache = redis.Redis.from_url(world.cache, decode_responses=True)
        keys = sorted(cache.scan_iter(f"{world.name}:public.items:*"))
        with psycopg.connect(world.dsn) as connection:
            assert connection.execute("SELECT count(*) FROM cdc.truncation").fetchone() == (0,)
        assert len(keys) == 20
        role = world.pipeline.replication_user
        world.sql(hidden_rows("public.items", role, "permissive").fix)
        equal_soon(world)
        world.sql(
            "ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code_key",
            "DELETE FROM coded WHERE id = 5",
            "UPDATE coded SET id = 30 WHERE id = 6",
        )
        wait_until(lambda: "lacks the key" in str(aside(world)), 60, "the table to wait")
        assert "identity-unfit" in world.cdc("doctor", code=4).stdout
        world.sql("INSERT INTO others VALUES (1)")
        world.cdc("migrate")
        equal_soon(world)
        assert {world.census()[sink, "public.coded"] for sink in world.pipeline.sinks} == {20}
