"""`cdc destroy` leaves nothing of a pipeline in any server, and all of another one."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc.cli.destroy import prepare
from cdc.connectors.client import Connect
from cdc.kafka.topics import Topics
from cdc.runtime.context import Context
from tests.support import http
from tests.support.budget import SCALE

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

PARTS = ("definition public.items", "floor public.items", "of items")
"""What Postgres has of a table that no other pipeline captures."""
IN_POSTGRES = """
SELECT 'slot ' || slot_name FROM pg_replication_slots
UNION ALL SELECT 'publication ' || pubname FROM pg_publication
UNION ALL SELECT 'role ' || rolname FROM pg_roles
UNION ALL SELECT 'policy ' || polname FROM pg_policy
UNION ALL SELECT 'trigger ' || tgname || ' of ' || tgrelid::regclass FROM pg_trigger WHERE tgname LIKE 'cdc%'
UNION ALL SELECT 'event trigger ' || evtname FROM pg_event_trigger WHERE evtname LIKE 'cdc%'
UNION ALL SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname = 'cdc'
"""
IN_CONTROL = """
SELECT 'heartbeat ' || pipeline FROM cdc.heartbeat
UNION ALL SELECT DISTINCT 'floor ' || table_name FROM cdc.truncation
UNION ALL SELECT DISTINCT 'definition ' || table_name FROM cdc.ddl
UNION ALL SELECT DISTINCT 'published by ' || publication FROM cdc.published
"""


def in_postgres(world: "World") -> Iterator[str]:
    with psycopg.connect(world.dsn) as connection:
        things = [text for (text,) in connection.execute(IN_POSTGRES).fetchall()]
        yield from things
        if "schema cdc" in things:
            yield from (text for (text,) in connection.execute(IN_CONTROL).fetchall())


def in_kafka(world: "World") -> Iterator[str]:
    """Topics, and the offsets of connectors that the worker would go on from."""
    with Topics(world.pipeline.kafka) as kafka:
        names = kafka.names()
        yield from names
        (stored,) = (name for name in names if name.endswith("connect-offsets"))
        offsets = {record.key: record.value for record in kafka.read_all(stored)}
    yield from (f"offsets {key!r}" for key, value in offsets.items() if value is not None)


def in_elasticsearch(world: "World") -> Iterator[str]:
    url = world.stack.endpoints.elasticsearch
    every = {"expand_wildcards": "all"}
    for index, facts in http.get(f"{url}/_alias", params=every).json().items():
        yield f"index {index}"
        yield from (f"alias {alias}" for alias in facts["aliases"])
    # Without it a search shows for a second what has been deleted.
    http.post(f"{url}/cdc-position/_refresh")
    hits = http.get(f"{url}/cdc-position/_search", params={"size": 10_000}).json()
    yield from (f"position {hit['_id']}" for hit in hits.get("hits", {}).get("hits", ()))


def in_redis(world: "World") -> Iterator[str]:
    for address in (world.cache, world.cache[:-1] + "3"):
        with redis.Redis.from_url(address, decode_responses=True) as server:
            yield from (f"{address[-1]}: {key}" for key in server.scan_iter())


def traces(world: "World", *words: str) -> list[str]:
    """All that any server has whose name holds a word that begins with one of these.

    Not in the midst of a word: the roles of other tests' pipelines stay, and a random name may end
    with "cdc".
    """
    with Connect(world.stack.endpoints.connect) as connect:
        things = [f"connector {connect.state(world.name).connector} {world.name}"]
    things = [] if "MISSING" in things[0] else things
    for scan in (in_postgres, in_kafka, in_elasticsearch, in_redis):
        things += scan(world)
    things += [str(world.warehouse)] if world.warehouse.exists() else []
    beginning = re.compile("|".join(rf"(?<![a-z0-9]){re.escape(word)}" for word in words))
    return sorted(thing for thing in things if beginning.search(thing))


@pytest.fixture
def neighbour(world: "World", tmp_path_factory: pytest.TempPathFactory) -> "Iterator[World]":
    """Another pipeline, on the same database and the same servers."""
    neighbour = replace(
        world, name=f"n{world.name[1:]}", folder=tmp_path_factory.mktemp("other"), tables=[]
    )
    yield neighbour
    with Connect(world.stack.endpoints.connect) as connect:
        connect.delete(neighbour.name)


class CutOffError(Exception):
    """The removal is interrupted here."""


class DoneError(Exception):
    """The removal has done all that it is to do: it would only go on looking."""


def test_nothing_of_it_is_left_and_all_of_another_pipeline(
    world: "World", neighbour: "World"
) -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, note text)",
        "CREATE TABLE shared (id int PRIMARY KEY, note text)",
        "INSERT INTO items SELECT n, 'x' FROM generate_series(1, 50) n",
        "INSERT INTO shared SELECT n, 'x' FROM generate_series(1, 50) n",
    )
    world.begin("public.items", "public.shared")
    neighbour.begin("public.shared")
    world.sql("TRUNCATE items", "INSERT INTO items VALUES (1, 'x')")
    with neighbour.running(), world.running():
        for pipeline in (neighbour, world):
            pipeline.settle()
        world.rebuild("search")
        refused = world.cdc("destroy", "--yes", code=2)
        assert "is at work on" in refused.stderr
        theirs = traces(world, neighbour.name)
    assert len(theirs) > 20
    theirs_on_disk = sorted(path.name for path in neighbour.warehouse.iterdir())
    before = traces(world, world.name, *PARTS)
    assert len(before) > 40

    # Without a terminal nobody is asked, so nothing goes; nor in a dry run.
    assert "no terminal to ask at" in world.cdc("destroy", code=2).stderr
    listed = world.json("destroy", "--dry-run")
    assert listed["done"] == []
    assert listed["parts"].keys() >= {"Kafka Connect", "Postgres", "Kafka", "search", "cache"}
    assert traces(world, world.name, *PARTS) == before

    # Interrupted after each step, it is finished by the next one.
    steps = _remove_in_steps(world)
    assert steps > 3
    assert traces(world, world.name, *PARTS) == []
    assert not world.warehouse.exists()
    assert world.json("destroy", "--dry-run") == {"pipeline": world.name, "parts": {}, "done": []}

    now = [thing for thing in traces(world, neighbour.name) if thing in theirs]
    assert now == theirs
    assert theirs_on_disk == sorted(path.name for path in neighbour.warehouse.iterdir())
    with neighbour.running():
        world.sql("INSERT INTO shared VALUES (1000, 'new')", "TRUNCATE shared")
        world.sql("INSERT INTO shared VALUES (1001, 'newer')")
        neighbour.settle()
        neighbour.assert_equal()

    # Its name is free again: nothing of its former life is gone on with.
    world.sql("INSERT INTO items VALUES (2, 'y')")
    world.begin("public.items", "public.shared")
    with world.running():
        world.settle()
        world.assert_equal()
    for pipeline in (world, neighbour):
        removal = prepare(Context(pipeline.file, pipeline.folder))
        removal.run(lambda _: None, watch_s=0.0)
    assert traces(world, world.name, neighbour.name, "cdc_", "schema cdc") == []


def _remove_in_steps(world: "World") -> int:
    """Remove the pipeline, interrupted after the first thing of each place, or after each thing in
    `make properties`; returns how often.
    """
    reported, cut, steps = set[str](), set[str](), 0

    def step_of(line: str) -> str:
        return line if SCALE > 1 else line.partition(":")[0]

    def report(line: str) -> None:
        if line.startswith("looking for"):
            # A worker that was busy makes the slot again.
            world.sql(f"SELECT pg_create_logical_replication_slot('{world.name}', 'pgoutput')")
            return
        reported.add(line)
        if "made again" in line:
            raise DoneError
        if step_of(line) not in cut and "removed slot" not in line:
            cut.add(step_of(line))
            raise CutOffError

    while True:
        removal = prepare(Context(world.file, world.folder))
        steps += 1
        try:
            removal.run(report, watch_s=60.0)
        except CutOffError:
            continue
        except DoneError:
            return steps
        pytest.fail(f"what was made again was not removed again: {reported}")


def test_a_pipeline_that_was_never_registered_is_removed(world: "World") -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY)")
    world.write_file("public.items")
    assert world.json("destroy", "--dry-run")["parts"] == {}
    world.cdc("migrate")
    parts: dict[str, Any] = world.json("destroy", "--dry-run")["parts"]
    # The operation log is there since `migrate`.
    assert list(parts) == ["Postgres", "Kafka"]
    prepare(Context(world.file, world.folder)).run(lambda _: None, watch_s=0.0)
    assert traces(world, world.name, "cdc_", "schema cdc") == []
