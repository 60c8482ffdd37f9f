"""500 tables of 20 rows through the whole path, each step's time is printed: with `make properties`."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import redis

from tests.support.budget import SCALE

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

TABLES, ROWS = 25 * SCALE, 20
LIMIT_S, SLOWNESS = 60, 2
"""What a step may take on two cores that do nothing else; how much slower a machine may be."""
PATIENCE_S = 900
"""What a step is given to end, so that its time is known."""
Timed = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def timed(capsys: pytest.CaptureFixture[str]) -> Iterator[Timed]:
    """Times steps; at the end none may have taken longer than its limit on a slow machine."""
    late: dict[str, float] = {}

    @contextmanager
    def measure(step: str, limit_s: float = float("inf")) -> Iterator[None]:
        began = time.monotonic()
        yield
        taken_s = time.monotonic() - began
        with capsys.disabled():
            print(f"\n{TABLES} tables, {step}: {taken_s:.0f} s", end=" ", flush=True)
        if taken_s > limit_s * SLOWNESS:
            late[step] = taken_s

    yield measure
    assert late == {}


def verify(world: "World", code: int) -> list[Any]:
    """Verify all tables; returns what is reported of each view."""
    process = subprocess.run(
        world.command("verify", "--json"), check=False, capture_output=True, text=True
    )
    assert process.returncode == code, process.stderr
    return list(json.loads(process.stdout)["views"])


@pytest.mark.skipif(SCALE == 1, reason="a few tables prove nothing that other scenarios don't")
@pytest.mark.timeout(900 + 6 * TABLES)
def test_many_tables(world: "World", timed: Timed) -> None:
    """The names are long: what names all of 500 tables doesn't fit into one request. The last table stays empty."""
    names = [f"public.customer_orders_of_the_archive_{number:03}" for number in range(TABLES)]
    filled = names[:-1]
    world.write_file(*(f"{{table: {name}, partitions: 1}}" for name in names))
    world.sql(*(f"CREATE TABLE {name} (id int PRIMARY KEY, v int, note text)" for name in names))
    world.sql(
        *(
            f"INSERT INTO {name} SELECT n, n, 'note' FROM generate_series(1, {ROWS}) n"
            for name in filled
        )
    )
    with timed("migrate and register"):
        world.cdc("migrate")
        world.cdc("register")
    with world.process():
        with timed("a start, until three views have all", LIMIT_S):
            world.settle(PATIENCE_S)
        world.sql(*(f"UPDATE {name} SET v = 100 WHERE id = 1" for name in filled))
        world.sql(*(f"DELETE FROM {name} WHERE id = 2" for name in filled))
        with timed("a change in each", LIMIT_S):
            world.settle(PATIENCE_S)
    with timed("verify", LIMIT_S):
        views = verify(world, 0)
    assert [view["source_rows"] for view in views] == [ROWS - 1] * 3 * len(filled) + [0] * 3
    with timed("status"):
        status = world.json("status")
    assert [len(sink["views"]) for sink in status["sinks"]] == [TABLES] * 3
    for sink in world.pipeline.sinks:
        with timed(f"rebuild {sink}"):
            world.rebuild(sink)
    with redis.Redis.from_url(world.cache) as server:
        assert server.delete(f"{world.name}:{names[3]}:1")
    with timed("verify with one row missing"):
        views = verify(world, 8)
    wrong = [(view["sink"], view["table"], view["missing"]) for view in views if not view["equal"]]
    assert wrong == [("cache", names[3], 1)]
