"""What waits for views goes on waiting for a server that is away for a moment."""

from dataclasses import dataclass

import pytest

from cdc.control.floors import Floors
from cdc.errors import ConnectorError, SinkError, SinkUnavailable
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.memory import Memory
from cdc.verify import barrier
from cdc.verify.barrier import Barrier, StalledViews, WaitOptions, await_barrier
from cdc.verify.comparison import View

TABLE = Table("public", "items", (), ("id",), "shop.public.items")
END = Position("id", (3,))
BARRIER = Barrier({TABLE.topic: END}, Floors())


@dataclass
class Starting(Memory):
    """A sink that can't be asked at first."""

    refusals_left: int

    def __init__(self, refusals_left: int) -> None:
        super().__init__("cache")
        self.refusals_left = refusals_left
        self.stored[TABLE.qualified] = ViewCheckpoint(END)

    def position(self, table: Table) -> ViewCheckpoint | None:
        if self.refusals_left:
            self.refusals_left -= 1
            raise SinkUnavailable("The cache is loading.", hint="it is tried again")
        return super().position(table)


def test_a_sink_that_starts_is_waited_for() -> None:
    sink = Starting(2)
    await_barrier(BARRIER, [TABLE], [sink], WaitOptions(30))
    assert not sink.refusals_left


def test_one_that_stays_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "AWAY_S", 0.1)
    with pytest.raises(SinkUnavailable, match="loading"):
        await_barrier(BARRIER, [TABLE], [Starting(1000)], WaitOptions(30))


def test_a_view_that_never_gets_there_is_reported() -> None:
    sink = Starting(0)
    sink.stored.clear()
    with pytest.raises(ConnectorError, match="3 offsets behind"):
        await_barrier(BARRIER, [TABLE], [sink], WaitOptions(0))


OTHER_TABLE = Table("public", "orders", (), ("id",), "shop.public.orders")
TABLES = [TABLE, OTHER_TABLE]
BOTH = Barrier({TABLE.topic: END, OTHER_TABLE.topic: END}, Floors())
STOPPED = SinkError("The view was made for other columns.", hint="cdc -p FILE rebuild cache")


def behind(position: Position) -> Starting:
    """A sink one of whose views is there, and the other at this position."""
    sink = Starting(0)
    sink.stored[OTHER_TABLE.qualified] = ViewCheckpoint(position)
    return sink


def test_a_view_that_a_run_has_set_aside_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(barrier, "LASTING_S", 0.2)
    monkeypatch.setattr(barrier, "ASK_S", 0.0)
    stopped = {("cache", OTHER_TABLE.qualified): STOPPED}
    options = WaitOptions(30, stalled=StalledViews(lambda: stopped))
    assert await_barrier(BOTH, TABLES, [behind(Position("id", (2,)))], options) == stopped


def test_what_a_run_says_no_more_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run looks now and then whether a view can go on: what it said before may be over."""
    monkeypatch.setattr(barrier, "ASK_S", 0.0)
    sink = behind(Position("id", (2,)))
    reports = iter([{("cache", OTHER_TABLE.qualified): STOPPED}] * 2)

    def find() -> dict[View, SinkError]:
        report = next(reports, None)
        if report is None:
            sink.stored[OTHER_TABLE.qualified] = ViewCheckpoint(END)
        return report or {}

    options = WaitOptions(30, stalled=StalledViews(find))
    assert await_barrier(BOTH, TABLES, [sink], options) == {}


def test_a_view_of_a_former_topic_does_not_hold_up_the_others() -> None:
    """Its offsets count other records, whatever a run says: it never gets there."""
    sink = behind(Position("former", (3,)))
    options = WaitOptions(30, stalled=StalledViews(dict))
    not_awaited = await_barrier(BOTH, TABLES, [sink], options)
    (error,) = not_awaited.values()
    assert not_awaited == {("cache", OTHER_TABLE.qualified): error}
    assert error.hint == "cdc -p FILE rebuild cache --table public.orders"
    # Who needs every view is refused.
    with pytest.raises(ConnectorError, match="another topic"):
        await_barrier(BOTH, TABLES, [sink], WaitOptions(30))


def test_a_view_whose_position_is_refused_does_not_hold_up_the_others() -> None:
    class Refusing(Starting):
        def position(self, table: Table) -> ViewCheckpoint | None:
            if table == OTHER_TABLE:
                raise SchemaMismatch(table, self.name)
            return super().position(table)

    options = WaitOptions(30, stalled=StalledViews(dict))
    not_awaited = await_barrier(BOTH, TABLES, [Refusing(0)], options)
    assert not_awaited.keys() == {("cache", OTHER_TABLE.qualified)}
