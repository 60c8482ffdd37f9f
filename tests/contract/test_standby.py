"""What is kept beside the live views is never behind them, and nothing that readers see depends on it."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import pytest

from cdc.errors import ConnectorError, KafkaUnavailable, SinkRejected, SinkUnavailable
from cdc.generations.standby import StandbySink
from cdc.kafka.log_refusals import Discontinued
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import row_id
from cdc.sink.contract import Batch, RowsRejected
from cdc.sink.lane import Entries
from cdc.sink.rejection import Rejection, Skip, Stop
from cdc.sinks.memory import Memory
from tests.contract.laws import TOPIC_ID, Harness, fill, row
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "20260101t000000000000"


class Pair:
    """A live view and one kept beside it."""

    def __init__(self, spark: "SparkSession", unique: str) -> None:
        self.live = Memory("memory")
        self.harness = Harness(spark, lambda: self.live, table(f"{unique}.public.items"))
        self.table = self.harness.table
        self.names = {self.table.qualified: NAME}
        self.build = self.live.for_generation(self.names)
        self.build.prepare(self.table)
        self.pair = StandbySink(self.live)
        fill(self.harness)

    def find(self, names: Mapping[str, str] | None = None) -> None:
        views = {self.table: self.live.position(self.table)}
        self.pair.resume(
            self.names if names is None else names, views, lambda _: 0, lambda *_: None
        )

    def apply(self, rejection: Rejection | None = None, entries: Entries | None = None) -> None:
        start = self.pair.oldest_positions()[self.table.topic]
        batch = self.harness.batch(start, self.harness.topic.ends, "one")
        self.pair.apply(replace(batch, rejection=rejection or Stop(), entries=entries or {}))

    def assert_both(self) -> None:
        assert self.harness.view() == self.harness.view(self.build) == self.harness.topic.model()
        assert self.pair.is_caught_up


@pytest.fixture
def pair(spark: "SparkSession", unique: str) -> Pair:
    return Pair(spark, unique)


def test_every_batch_is_in_both(pair: Pair) -> None:
    pair.find()
    pair.apply()
    pair.harness.topic.add("u", row("k0", 0, "later"))
    pair.apply()
    pair.assert_both()


def test_each_goes_from_its_own_position(pair: Pair) -> None:
    """The live view is ahead: the batch begins where the standby stands, and takes nothing of either back."""
    pair.harness.apply(end=(1, 1))
    ahead, standby = pair.harness.position(), ViewCheckpoint(Position(TOPIC_ID, (0, 0)))
    pair.build.stored[pair.table.qualified] = standby
    pair.find()
    assert pair.pair.oldest_positions() == {pair.table.topic: standby.position}
    assert pair.pair.live_at == {pair.table.topic: ahead}
    assert not pair.pair.is_caught_up
    pair.apply()
    pair.assert_both()


def test_it_is_written_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a switch at any moment shows readers nothing older than what they saw."""

    def broken(_: Batch) -> NoReturn:
        raise SinkUnavailable("no live view", hint="none")

    pair.find()
    monkeypatch.setattr(pair.live, "apply", broken)
    with pytest.raises(SinkUnavailable):
        pair.apply()
    assert pair.harness.view(pair.build) == pair.harness.topic.model()


@pytest.mark.parametrize(
    "error",
    [
        SinkUnavailable("away", hint="none"),
        SinkRejected("no", hint="none"),
        OSError("its folder is gone"),
    ],
)
def test_its_failure_holds_up_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(_: Batch) -> NoReturn:
        raise error

    pair.find()
    with monkeypatch.context() as patch:
        patch.setattr("cdc.generations.standby.RETRY_S", 0.0)
        patch.setattr(pair.build, "apply", broken)
        pair.apply()
    assert pair.harness.view() == pair.harness.topic.model()
    assert not pair.pair.is_caught_up
    assert pair.pair.may_retry == isinstance(error, SinkUnavailable)


def test_what_only_it_refuses(pair: Pair) -> None:
    """The live view knows a value that the kept one has lost."""
    pair.find()
    pair.apply()
    pair.build.views[pair.table.qualified].clear()
    pair.harness.topic.add("u", row("k0", 0, None), lacking=["v"])
    pair.apply()
    assert pair.harness.view() == pair.harness.topic.model()
    assert pair.pair.standby_at == {}


def test_what_only_it_refuses_is_known_however_often_the_live_view_is_away(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The try in which the standby met it tells nobody of it."""

    def broken(_: Batch) -> NoReturn:
        raise SinkUnavailable("no live view", hint="none")

    pair.find()
    pair.apply(Skip())
    pair.build.views[pair.table.qualified].clear()
    pair.harness.topic.add("u", row("k0", 0, None), lacking=["v"])
    with monkeypatch.context() as patch:
        patch.setattr(pair.live, "apply", broken)
        with pytest.raises(SinkUnavailable):
            pair.apply(Skip())
    pair.apply(Skip())
    assert pair.harness.view() == pair.harness.topic.model()
    assert pair.pair.standby_at == {}


def test_what_both_reject_is_left_out_of_both(pair: Pair) -> None:
    """Also where one of them, which begins further back, meets what the other has rejected earlier."""
    pair.find()
    pair.apply(Skip())
    stored = dict(pair.build.stored)
    view = dict(pair.build.views[pair.table.qualified])
    pair.harness.topic.add("u", row("never seen", 1, None), lacking=["v"])
    bad = next(r for r in pair.harness.topic.records if r.key == {"a": "never seen", "b": 1})
    pair.apply(Skip())
    assert pair.pair.standby_at
    pair.build.stored, pair.build.views[pair.table.qualified] = stored, view
    pair.find()
    pair.harness.topic.add("u", row("k0", 0, "later"))
    place = {(pair.table.topic, bad.partition): {bad.offset: row_id(["never seen", 1])}}
    pair.apply(Skip(), place)
    assert pair.pair.standby_at
    assert pair.harness.view() == pair.harness.view(pair.build)


def test_what_both_refuse(pair: Pair) -> None:
    """It is the record's fault: the batch comes again without it."""
    pair.find()
    pair.apply()
    pair.harness.topic.add("u", row("never seen", 1, None), lacking=["v"])
    with pytest.raises(RowsRejected):
        pair.apply()
    assert pair.pair.standby_at


def test_nothing_is_to_be_kept(pair: Pair) -> None:
    pair.find({})
    assert pair.pair.standby_at == {}
    assert not pair.pair.may_retry


def test_what_readers_see_by_now_is_not_kept_beside_itself(pair: Pair) -> None:
    """A rollback has switched and not said yet what is kept from now on."""
    pair.live.generation = NAME
    pair.find({})
    pair.apply()
    pair.find()
    assert pair.pair.standby_at == {}


@pytest.mark.parametrize(
    "error",
    [Discontinued("it may have missed deletes", hint="none"), KafkaUnavailable("a", hint="")],
)
def test_what_cannot_go_on_is_left_alone(pair: Pair, error: ConnectorError) -> None:
    """What the log can't continue is lost for good; what can't be asked for isn't."""

    def refuse(*_: object) -> NoReturn:
        raise error

    is_lost = isinstance(error, Discontinued)
    with pytest.raises(Discontinued) if is_lost else nullcontext():
        pair.pair.resume(pair.names, {pair.table: None}, lambda _: 0, refuse)
    assert pair.pair.standby_at == {}
    pair.apply()
    # It has no position, the live view has: what it held is gone.
    pair.find()
    assert pair.pair.standby_at == {}
