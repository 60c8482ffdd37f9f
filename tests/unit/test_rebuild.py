"""The wait of a rebuild for the stream that applies what came after its replay."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.errors import SinkError
from cdc.model.clock import Clock
from cdc.model.position import Position, ViewCheckpoint
from cdc.rebuild.build import catch_up
from cdc.sinks.memory import Memory
from tests.support.envelopes import table

if TYPE_CHECKING:
    from cdc.kafka.topics import Topics

ITEMS, ORDERS = table("t.public.items"), table("t.public.orders", "orders")
END = Position("id", (3,))
ASIDE = {ORDERS.qualified: ["It is refused.", "do this"]}


class EndingTopics:
    """A broker each of whose topics ends at `END`."""

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        return dict.fromkeys(topics, END)


KAFKA = cast("Topics", EndingTopics())


@pytest.fixture
def sink() -> Memory:
    """A sink that has everything of one topic of two."""
    sink = Memory("search")
    sink.stored[ITEMS.qualified] = ViewCheckpoint(END)
    return sink


@pytest.mark.parametrize(
    ("progress", "reason", "hint"),
    [
        (Progress("search", RunState.APPLYING, aside=ASIDE), "is refused.", "do this"),
        (
            Progress("search", RunState.FAILED, error="It is full.", hint="do that"),
            "is full.",
            "do that",
        ),
    ],
    ids=["a table waits", "all have failed"],
)
def test_a_stream_that_leaves_a_table_behind_is_not_waited_for(
    sink: Memory, progress: Progress, reason: str, hint: str
) -> None:
    """A position that nobody moves is never reached: without the reason a person would wait too."""
    with pytest.raises(SinkError, match=f"can't go on: It {reason}") as caught:
        catch_up(KAFKA, sink, [ITEMS, ORDERS], lambda: progress, Clock())
    assert caught.value.hint == hint


def test_a_stream_at_work_is_waited_for(sink: Memory) -> None:
    def progress() -> Progress:
        sink.stored[ORDERS.qualified] = ViewCheckpoint(END)
        return Progress("search", RunState.APPLYING)

    catch_up(KAFKA, sink, [ITEMS, ORDERS], progress, Clock())
