"""What waits for views goes on waiting for a server that is away for a moment."""

from dataclasses import dataclass

import pytest

from cdc.control.floors import Floors
from cdc.errors import ConnectorError, SinkUnavailable
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.sinks.memory import Memory
from cdc.verify import barrier
from cdc.verify.barrier import Barrier, WaitOptions, await_barrier

TABLE = Table("public", "items", (), ("id",), "shop.public.items")
END = Position("id", (3,))


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
    await_barrier(Barrier({TABLE.topic: END}, Floors()), [TABLE], [sink], WaitOptions(30))
    assert not sink.refusals_left


def test_one_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "AWAY_S", 0.1)
    with pytest.raises(SinkUnavailable, match="loading"):
        await_barrier(
            Barrier({TABLE.topic: END}, Floors()), [TABLE], [Starting(1000)], WaitOptions(30)
        )


def test_a_view_that_never_gets_there_is_told() -> None:
    sink = Starting(0)
    sink.stored.clear()
    with pytest.raises(ConnectorError, match="3 offsets behind"):
        await_barrier(Barrier({TABLE.topic: END}, Floors()), [TABLE], [sink], WaitOptions(0))
