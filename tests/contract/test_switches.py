"""Whenever readers are shown another generation, no change is missing: neither in what they see nor in what is kept."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from cdc.errors import SinkUnavailable
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import PositionLost
from cdc.sinks.delta.log import NO_TABLE, TableLog
from cdc.sinks.redis import scripts as redis_scripts
from cdc.sinks.redis.sink import Redis
from tests.contract import laws, switches
from tests.contract.switches import MEETINGS, Meeting, Moment, Pair
from tests.contract.test_contract import maker
from tests.support.budget import SCALE
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOMENTS = {
    "redis": range(0, 6, 2),
    "redis, shared": range(0, 12, 4),
    "elasticsearch": range(0, 16, 6),
    "delta": range(0, 12, 4),
}
"""The moments of each meeting that are tried: not all, because a round takes seconds; `make
properties` tries every one.
"""


@pytest.fixture
def pair(
    kind: str, request: pytest.FixtureRequest, spark: "SparkSession", unique: str, tmp_path: Path
) -> Iterator[Pair]:
    pair = Pair(
        laws.Harness(spark, maker(request, kind, unique, tmp_path), table(f"{unique}.public.items"))
    )
    yield pair
    pair.live.close()


@pytest.mark.parametrize("meeting", MEETINGS, ids=lambda meeting: meeting.__name__)
@pytest.mark.parametrize("kind", MOMENTS)
def test_nothing_is_lost(pair: Pair, meeting: Meeting, kind: str) -> None:
    for number in MOMENTS[kind] if SCALE == 1 else range(20):
        moment = Moment(number)
        pair.meet(meeting, moment)
        if not moment.came:
            break
    assert pair.meetings > 1
    pair.assert_right()


def emptied_while_switched(pair: Pair) -> None:
    """The two change places when the keys of the live view are about to be listed."""
    moment = Moment(2)
    with suppress(SinkUnavailable), moment.during(pair.promote):
        pair.live.clear(pair.table)
    assert moment.came


@pytest.mark.parametrize("kind", ["redis"])
def test_a_view_that_is_emptied_empties_no_other(pair: Pair) -> None:
    emptied_while_switched(pair)
    pair.assert_right()


@pytest.mark.parametrize("kind", ["redis"])
def test_planted_emptying(pair: Pair) -> None:
    """The keys are removed, whose they are by now or not."""
    guard = "if generation ~= ARGV[1] then return 0 end"
    assert guard in redis_scripts.REMOVE
    with mock.patch("cdc.sinks.redis.tables.REMOVE", redis_scripts.REMOVE.replace(guard, "")):
        emptied_while_switched(pair)
    with pytest.raises(AssertionError):
        pair.assert_right()


@pytest.mark.parametrize("kind", ["redis"])
def test_what_a_server_has_lost_is_made_again(pair: Pair) -> None:
    """It comes back empty, after a batch has been begun."""
    pair.harness.topic.add("c", laws.row("late", 1))
    batch, moment = pair.batch(pair.live), Moment(1)
    with pytest.raises(PositionLost), moment.during(lambda: pair.live.clear(pair.table)):
        batch()
    assert pair.harness.position() is None
    pair.live.prepare(pair.table)
    pair.batch(pair.live)()
    assert pair.harness.view() == pair.harness.topic.model()


@contextmanager
def unguarded() -> Iterator[None]:
    """Nobody asks whose positions are, nor whether executors have left them there."""
    guard = " and at[2] == ARGV[2] and (at[3] or '') == ARGV[3]"
    bound = "below(now, ARGV[i + 1]) or "
    assert guard in redis_scripts.FINISH
    assert bound in redis_scripts.FINISH
    original = Redis.position

    def position(self: Redis, table: Table) -> ViewCheckpoint | None:
        return original(Redis(self.name, self.url, self.prefix), table)

    loose = redis_scripts.FINISH.replace(guard, "").replace(bound, "")
    with (
        mock.patch("cdc.sinks.redis.positions.FINISH", loose),
        mock.patch.object(Redis, "position", position),
    ):
        yield


def unversioned() -> AbstractContextManager[object]:
    """A commit goes on top of whatever version there is by now."""
    commit = TableLog.commit

    def on_top(log: TableLog, _: int, *arguments: Any) -> None:
        state = log.refresh()
        commit(log, state.identity if state else NO_TABLE, *arguments)

    return mock.patch.object(TableLog, "commit", on_top)


@pytest.mark.parametrize(
    ("kind", "bug", "meeting", "number"),
    [
        ("redis", unguarded, switches.the_kept_one_is_written_and_switched_to, 2),
        ("delta", unversioned, switches.the_live_one_is_written_and_replaced, 4),
    ],
)
def test_planted(
    pair: Pair, bug: Callable[[], AbstractContextManager[object]], meeting: Meeting, number: int
) -> None:
    with bug():
        pair.meet(meeting, Moment(number))
    with pytest.raises(AssertionError):
        pair.assert_right()
