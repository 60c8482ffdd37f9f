"""Each example as its README says: its schema, its file, its changes; documents are what Postgres
says, and its searches find what they are for.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc.capture.vanished import remove_vanished
from tests.support import http
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "expected", "member", "value"),
    [
        ("shop", {"1", "2", "4"}, "customer", {"id": 1, "name": "Ann Berg", "city": "Oslo"}),
        ("blog", {"2"}, "author", "Ann Berg"),
    ],
)
def test_an_example(world: "World", name: str, expected: set[str], member: str, value: Any) -> None:
    begin(world, name)
    with world.running():
        follow(world, name, expected, member, value)


def begin(world: "World", name: str) -> None:
    write_file(world, EXAMPLES / name / f"{name}.yaml")
    world.sql((EXAMPLES / name / "schema.sql").read_text())
    world.cdc("migrate")
    world.cdc("register")


def follow(world: "World", name: str, expected: set[str], member: str, value: Any) -> None:
    """Make the changes of an example, and search and read as its README does."""
    world.settle()
    world.sql((EXAMPLES / name / "changes.sql").read_text())
    compare(world)
    readme = (EXAMPLES / name / "README.md").read_text()
    assert hits(world, name, readme) == expected
    assert cached(world, name, readme)[member] == value


def test_balances_outlive_their_events(world: "World") -> None:
    """The third example: events are deleted and truncated, their balances stay, and are the same once
    everything is made again from offset zero.
    """
    begin(world, "accounts")
    with world.running():
        follow(world, "accounts", {"2"}, "balance", "70.00")
        # A row that is never in a snapshot.
        world.sql("SELECT deposit(1, 5)", "DELETE FROM account_events WHERE amount = 5")
        world.sql("DELETE FROM account_events WHERE account_id = 1")
        purged = compare(world)
        assert balances(world) == kept_by_commands(world) == {"1": 75, "2": 0}
        assert purged["public.account_events"] == 3
        assert purged["view.balances"] == 1
        with pytest.raises(psycopg.errors.RestrictViolation, match="can't be changed"):
            world.sql("UPDATE account_events SET amount = 0")
        world.sql("TRUNCATE account_events", "SELECT deposit(2, 1)")
        compare(world)
        assert balances(world) == kept_by_commands(world) == {"1": 75, "2": 1}
    with redis.Redis.from_url(state_of(world)) as server:
        server.flushdb()
    with world.running():
        world.rebuild("cache")
        purged = compare(world)
        assert balances(world) == kept_by_commands(world) == {"1": 75, "2": 1}
        assert purged["public.account_events"] == 6
        world.cdc("register", "--new-snapshot", "--yes")
        remove_vanished(world.spark, world.pipeline)
        assert compare(world) == purged
        assert balances(world) == kept_by_commands(world)
        # Where Postgres couldn't refuse it.
        world.sql(
            "ALTER TABLE account_events DISABLE TRIGGER cdc_events",
            "UPDATE account_events SET amount = 1000",
        )
        findings = world.json("doctor", code=4)["findings"]
        fixes = {finding["code"]: finding["fix"] for finding in findings}
        assert fixes["trigger-missing"] == "cdc -p FILE migrate"
        wait_until(world.quarantine, 60, "the update in quarantine")
        assert {entry["reason"] for entry in world.quarantine()} == {"it changes an event"}
        assert balances(world) == kept_by_commands(world)
        # Rows have other ids now, so everything is made again of those that there are.
        world.sql(
            "ALTER TABLE account_events DROP CONSTRAINT account_events_pkey, ADD PRIMARY KEY (account_id, id)"
        )
        wait_until(lambda: balances(world) == {"2": 1000}, 90, "the rows under other ids")
        assert compare(world).items() >= {"public.account_events": 0, "view.balances": 0}.items()
    renewal = world.cdc("topics", "renew", "--table", "public.account_events", code=2)
    assert "--forget" in renewal.stderr


def balances(world: "World") -> dict[str, float]:
    """The balances in the cache, by account."""
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        keys = list(server.scan_iter(f"{world.name}:view.balances:*"))
        documents = [json.loads(str(server.get(key))) for key in keys]
    return {str(document["account_id"]): float(document["balance"]) for document in documents}


def kept_by_commands(world: "World") -> dict[str, float]:
    with psycopg.connect(world.dsn) as connection:
        rows = connection.execute("SELECT id, balance FROM accounts").fetchall()
    return {str(account): float(balance) for account, balance in rows}


def state_of(world: "World") -> str:
    return world.cache[:-1] + "4"


def write_file(world: "World", example: Path) -> None:
    """The example's file, under the name and in the databases of this test."""
    state = state_of(world)
    with redis.Redis.from_url(state) as server:
        server.flushdb()
    text = example.read_text()
    for reference, value in {
        f"pipeline: {example.stem}": f"pipeline: {world.name}",
        f"prefix: {example.stem}": f"prefix: {world.name}",
        f"${{{example.stem.upper()}_POSTGRES}}": world.dsn,
        "${CDC_REDIS}": world.cache,
        "${CDC_DOCUMENTS}": state,
    }.items():
        assert reference in text
        text = text.replace(reference, value)
    world.file.write_text(text)


def compare(world: "World") -> dict[str, int]:
    """Verify all views; returns how many rows of the cache were purged, by table."""
    return {result.table: result.purged for result in world.verified() if result.sink == "cache"}


def hits(world: "World", name: str, readme: str) -> set[str]:
    """The ids that the search of the README finds."""
    search = re.search(rf"POST {name}-(\S+)/_search[^\n]*\n(.*?)\n```", readme, re.DOTALL)
    assert search
    url = f"{world.stack.endpoints.elasticsearch}/{world.name}-{search[1]}/_search"
    answer = http.post(url, json=json.loads(search[2])).raise_for_status()
    return {hit["_id"] for hit in answer.json()["hits"]["hits"]}


def cached(world: "World", name: str, readme: str) -> dict[str, Any]:
    """The document at the key that the README reads from the cache."""
    key = re.search(rf"GET {name}:(\S+)", readme)
    assert key
    with redis.Redis.from_url(world.cache, decode_responses=True) as server:
        document: dict[str, Any] = json.loads(str(server.get(f"{world.name}:{key[1]}")))
    return document
