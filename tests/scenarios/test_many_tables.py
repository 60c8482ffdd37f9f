"""Many tables through the whole path, each step's time is printed: 10, and 500 with `make
properties`.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest
import redis

from tests.support.budget import SCALE

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

TABLES = 10 if SCALE == 1 else 25 * SCALE
Timed = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def timed(capsys: pytest.CaptureFixture[str]) -> Timed:
    @contextmanager
    def measure(step: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        with capsys.disabled():
            print(
                f"\n{TABLES} tables, {step}: {time.monotonic() - began:.0f} s", end=" ", flush=True
            )

    return measure


@pytest.mark.timeout(300 + 6 * TABLES)
def test_many_tables(world: "World", timed: Timed) -> None:
    """The names are long: what names all of 500 tables doesn't fit into one request. The last table
    stays empty.
    """
    names = [f"public.customer_orders_of_the_archive_{number:03}" for number in range(TABLES)]
    filled = names[:-1]
    world.write_file(*(f"{{table: {name}, partitions: 1}}" for name in names))
    world.sql(*(f"CREATE TABLE {name} (id int PRIMARY KEY, v int, note text)" for name in names))
    world.sql(
        *(f"INSERT INTO {name} SELECT n, n, 'note' FROM generate_series(1, 3) n" for name in filled)
    )
    with timed("migrate and register"):
        world.cdc("migrate")
        world.cdc("register")
    with timed("snapshot into three views"):
        world.cdc("run", "--until-caught-up")
    world.sql(*(f"UPDATE {name} SET v = 10 WHERE id = 1" for name in filled))
    world.sql(*(f"DELETE FROM {name} WHERE id = 2" for name in filled))
    with timed("a change in each"), world.running():
        world.settle()
    with timed("status"):
        status = world.json("status")
    assert [len(sink["views"]) for sink in status["sinks"]] == [TABLES] * 3
    for sink in world.pipeline.sinks:
        with timed(f"rebuild {sink}"):
            world.rebuild(sink)
    with redis.Redis.from_url(world.cache) as server:
        assert server.delete(f"{world.name}:{names[7]}:1")
    with timed("verify with one row missing"):
        views = json.loads(world.cdc("verify", "--json", code=8).stdout)["views"]
    assert [view["source_rows"] for view in views] == [2] * 3 * len(filled) + [0] * 3
    wrong = [(view["sink"], view["table"], view["missing"]) for view in views if not view["equal"]]
    assert wrong == [("cache", names[7], 1)]
