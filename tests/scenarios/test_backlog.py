"""Sinks that are far behind: how large their batches are."""

import threading
from typing import TYPE_CHECKING

import pytest

from cdc.apply.batch import size
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.verify.verification import compare
from tests.scenarios.test_pipeline import items
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("first", "first_bytes", "bounds", "target_s", "batches"),
    [
        (50, 1 << 30, (50, 500), 60.0, range(4, 12)),
        (1000, 1 << 30, (100, 1000), 0.001, range(8, 20)),
        (1000, 1, (50, 500), 60.0, range(4, 12)),
    ],
    ids=["quick", "slow", "wide"],
)
def test_a_backlog_is_taken_at_the_pace_of_the_sink(
    world: "World",
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    first_bytes: int,
    bounds: tuple[int, int],
    target_s: float,
    batches: range,
) -> None:
    """2,000 rows are 40 batches of 50, which grow, and two of 1,000, which shrink or, being wide,
    never were.
    """
    items(world)
    world.sql("INSERT INTO items SELECT n::text, n, 'v', n FROM generate_series(1, 2000) n")
    wait_until(
        lambda: (world.json("status")["sinks"][0]["views"][0]["lag_records"] or 0) >= 2000,
        60,
        "the rows in the topic",
    )
    names = ("FIRST", "FIRST_BYTES", "LEAST", "MOST", "TARGET_S")
    for name, value in zip(names, (first, first_bytes, *bounds, target_s), strict=True):
        monkeypatch.setattr(size, name, value)
    context = Context(world.file, world.folder)
    (cache,) = context.sinks(["cache"])
    (stream,) = Streams(context).of_sinks(world.spark, [cache])
    stream.run(until_caught_up=True)
    assert stream.progress.batches in batches
    assert [
        comparison.equal
        for comparison in compare(world.spark, world.described[:1], world.dsn, [cache])
    ] == [True]


def test_a_backlog_does_not_wait_for_the_next_trigger(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what waits at once, all is applied but fewer than a large batch's least."""
    items(world)
    monkeypatch.setattr("cdc.apply.stream.LEAST", 100)
    text = world.file.read_text()
    world.file.write_text(text.replace("{type: redis,", "{type: redis, trigger_s: 3600,"))
    context = Context(world.file, world.folder)
    (cache,) = context.sinks(["cache"])
    (stream,) = Streams(context).of_sinks(world.spark, [cache])
    thread = threading.Thread(target=stream.run)
    thread.start()
    try:
        # The connector may send either in several transactions, and each may end a batch.
        for first, last, applied in ((1, 10, 1), (11, 510, 510 - 99)):
            world.sql(
                f"INSERT INTO items SELECT n::text, n, 'v', n FROM generate_series({first}, {last}) n"
            )
            wait_until(
                lambda expected=applied: stream.progress.applied.rows >= expected,  # type: ignore[misc]
                120,
                f"{applied} rows to be applied",
            )
    finally:
        stream.stop()
        thread.join()
