"""Two things at once that are made to meet: while the one runs, the other happens where it calls a
server or a log.

Only calls of the driver; what executors send is cut in `crashes`, and compared with where it goes
on by the server.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from cdc.errors import Fenced, SinkUnavailable
from cdc.model.generation import new_generation
from cdc.sink.contract import Sink
from cdc.sink.lane_run import run_in_process, run_on_executors
from tests.contract.laws import Harness, fill, row

Act = Callable[[], object]
REDIS = {
    run_on_executors.__name__,
    run_in_process.__name__,
    "hget",
    "hgetall",
    "eval",
    "register_script",
    "scan_iter",
}
DELTA = {"collect", "refresh", "write_new"}
CALLS = REDIS | DELTA | {"perform_request"}
"""Functions through which the code of a sink looks at what is there, or changes it."""
NEW_ROWS = 4
"""Rows that a meeting adds, in all partitions: nobody touches them again, so what gets lost stays lost."""


class Moment:
    """Does something once, just before the call of that number."""

    def __init__(self, number: int, calls: Collection[str] = CALLS) -> None:
        self._remaining, self._calls = number, calls

    @property
    def came(self) -> bool:
        return self._remaining < 0

    @contextmanager
    def during(self, act: Act) -> Iterator[None]:
        def profile(frame: FrameType, event: str, _: Any) -> None:
            caller = frame.f_back
            if (
                event == "call"
                and frame.f_code.co_name in self._calls
                and caller
                and _is_of_a_sink(caller)
            ):
                self._remaining -= 1
                if self._remaining == -1:
                    act()

        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)


def _is_of_a_sink(frame: FrameType) -> bool:
    return str(frame.f_globals["__name__"]).startswith("cdc.sinks.")


class Pair:
    """A view with a second generation beside it, and who works on them: two streams, and another process."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.table, self.live = harness, harness.table, harness.sink
        self.other_writer, self.meetings = harness.writer(), 0
        fill(harness)
        harness.apply(writer="live")
        self.names, _ = harness.begin_generation()
        self._go_on()

    def meet(self, meeting: "Meeting", moment: Moment) -> None:
        """Let two acts meet. Whichever is refused starts again from the sink's position."""
        self.meetings += 1
        for number in range(NEW_ROWS):
            self.harness.topic.add("c", row(f"new {self.meetings}", number))
        self.harness.topic.add("u", row("k1", 1, f"change {self.meetings}"))
        running, act = meeting(self)
        with moment.during(_tolerant(act)):
            _tolerant(running)()
        if not moment.came:
            _tolerant(act)()
        self._go_on()

    def assert_right(self) -> None:
        assert self.harness.view(self.live) == self.harness.topic.model()
        assert self.harness.view(self.build) == self.harness.topic.model()

    def promote(self) -> None:
        self.names = dict(self.other_writer.promote([self.table], self.names)) or self.names

    def batch(self, sink: Sink) -> Act:
        batch = self.harness.batch(
            self.harness.position(sink), self.harness.topic.ends, f"{id(sink)}"
        )
        return lambda: self.harness.send(batch, sink)

    def _go_on(self) -> None:
        self.build = self.live.for_generation(self.names)
        self.build.prepare(self.table)
        self.batch(self.live)()
        self.batch(self.build)()
        self.other_writer.drop_unreferenced([self.table], self.names)


def _tolerant(act: Act) -> Act:
    def run() -> None:
        with suppress(Fenced, SinkUnavailable):
            act()

    return run


Meeting = Callable[[Pair], tuple[Act, Act]]
"""The act that runs, and the act that happens meanwhile."""


def the_kept_one_is_written_and_switched_to(pair: Pair) -> tuple[Act, Act]:
    return pair.batch(pair.build), pair.promote


def the_live_one_is_written_and_replaced(pair: Pair) -> tuple[Act, Act]:
    pair.batch(pair.build)()
    return pair.batch(pair.live), pair.promote


def a_switch_waits_for_the_kept_one(pair: Pair) -> tuple[Act, Act]:
    pair.batch(pair.live)()
    return pair.promote, pair.batch(pair.build)


def a_switch_goes_on_beside_the_kept_one(pair: Pair) -> tuple[Act, Act]:
    return pair.promote, pair.batch(pair.build)


def a_switch_goes_on_beside_the_live_one(pair: Pair) -> tuple[Act, Act]:
    pair.batch(pair.build)()
    return pair.promote, pair.batch(pair.live)


def a_newer_one_takes_the_place_of_the_kept_one(pair: Pair) -> tuple[Act, Act]:
    def begin() -> None:
        pair.names = dict.fromkeys(pair.names, new_generation())
        pair.other_writer.for_generation(pair.names).clear(pair.table)

    return pair.batch(pair.build), begin


MEETINGS = [
    the_kept_one_is_written_and_switched_to,
    the_live_one_is_written_and_replaced,
    a_switch_waits_for_the_kept_one,
    a_switch_goes_on_beside_the_kept_one,
    a_switch_goes_on_beside_the_live_one,
    a_newer_one_takes_the_place_of_the_kept_one,
]
