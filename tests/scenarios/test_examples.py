"""Each example as its README says: its schema, its file, its changes; documents are what Postgres
says, and its searches find what they are for.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from cdc.runtime.context import Context
from cdc.verify.comparison import Options
from cdc.verify.verification import verify
from tests.support import http

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "expected", "member", "value"),
    [
        ("shop", {"1", "2", "4"}, "customer", {"id": 1, "name": "Ann Berg", "city": "Oslo"}),
        ("blog", {"2"}, "author", "Ann Berg"),
    ],
)
def test_an_example(world: "World", name: str, expected: set[str], member: str, value: Any) -> None:
    folder = EXAMPLES / name
    write_file(world, folder / f"{name}.yaml")
    world.sql((folder / "schema.sql").read_text())
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        compare(world)
        world.sql((folder / "changes.sql").read_text())
        compare(world)
    readme = (folder / "README.md").read_text()
    assert hits(world, name, readme) == expected
    assert cached(world, name, readme)[member] == value


def write_file(world: "World", example: Path) -> None:
    """The example's file, under the name and in the databases of this test."""
    state = world.cache[:-1] + "4"
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


def compare(world: "World") -> None:
    """`cdc verify`, in this process, whose Spark is warm."""
    context = Context(world.file, world.folder)
    sinks, tables = context.sinks(None), context.select_views(None)
    results = verify(world.spark, context.pipeline, tables, sinks, Options(timeout_s=180))
    assert [result.to_dict() for result in results if not result.equal] == []


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
