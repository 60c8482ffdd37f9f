"""The continuous proof with a registry in memory: a view is only proved further if its rows are equal."""

from collections.abc import Callable
from dataclasses import asdict, replace
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdc.config.settings import ProofSettings
from cdc.control.floors import Floors
from cdc.errors import SourceError
from cdc.generations.registry import Damage, Generations, Proof, Registry, Sweep
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.memory import Memory
from cdc.verify import prover
from cdc.verify.barrier import Barrier
from cdc.verify.changed_rows import ChangedAnswer, ChangedView, Slice
from cdc.verify.comparison import Comparison, Difference
from cdc.verify.proof import view_shapes
from cdc.verify.prover import Prover, Proving
from tests.support.envelopes import table
from tests.support.pipelines import changed, pipeline
from tests.support.simulated import MemoryLog, SimulatedClock

ITEMS = table("shop.public.items")
SHOP = pipeline("shop", "postgresql://127.0.0.1:1/x", ITEMS.qualified)
VIEW = ("cache", ITEMS.qualified)
ROW = "5"


class Cache(Memory):
    def row_reader(self, _: object) -> Any:
        return None

    def id_lister(self, _: object) -> Any:
        return None


class Turns:
    """A prover of one view, whose row 5 differs at every look. `confirm` compares it once more, `repair` repairs
    it. `slices` has where each slice begins; `listed` lists it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, repairs: bool) -> None:
        file = changed(SHOP, proof=ProofSettings(repair=repairs, sweep_hours=0.25))
        self.log = MemoryLog(SimulatedClock())
        self.log.create(SHOP.generations_topic)
        self.registry = Registry(SHOP, self.log)
        self.control: Any = SimpleNamespace(
            read=lambda: None, definitions=(), registration=None, floors=Floors()
        )
        self.confirm: Callable[[], Comparison] = lambda: Comparison(*VIEW)
        self.marks = 1
        sink = Cache("cache")
        self.shape = view_shapes([ITEMS], [sink], cast("Any", self.control))[VIEW]
        opened = SimpleNamespace(kafka=self.log, registry=self.registry, control=self.control)
        context = SimpleNamespace(setLocalProperty=lambda *_: None, addJobTag=lambda _: None)
        spark: Any = SimpleNamespace(sparkContext=context)
        self.repair: Callable[[Comparison], Comparison] = lambda wrong: replace(
            wrong, different=0, repaired=1
        )
        self.slices: list[Sweep] = []
        self.listed: Callable[[Sweep], Slice] = lambda begin: Slice(
            after=replace(begin, side="end")
        )
        self.differs = True
        for name, value in {
            "time": SimpleNamespace(monotonic=lambda: self.marks * 1e6, thread_time=lambda: 0.0),
            "Log": lambda _: opened,
            "read_time_ms": lambda _: self.marks * 1000.0,
            "place_barrier": lambda *_: Barrier({ITEMS.topic: self.end()}, Floors()),
            "passed_views": lambda *_: frozenset({VIEW}),
            "positions": lambda *_: {ITEMS.qualified: ViewCheckpoint(self.end())},
            "compare_changed": lambda _, __, tables: ([self.compare(tables[0].views[0])], 0.0),
            "repair": lambda *values: [self.repair(values[-1][0])],
            "TableVerification": lambda *_: SimpleNamespace(result=lambda _: [self.confirm()]),
        }.items():
            patch.setattr(prover, name, value)
        self.prover = Prover(spark, lambda: file, lambda: Proving(file, [ITEMS], [sink]), Event())

    def compare(self, view: ChangedView) -> ChangedAnswer:
        part = Slice()
        if view.slicing:
            self.slices.append(view.slicing.begin)
            part = self.listed(view.slicing.begin)
        return ChangedAnswer(*VIEW, {ROW: 1} if self.differs else {}, slice=part)

    def end(self) -> Position:
        return Position("id", (self.marks * 10,))

    def prove(self, shape: str) -> None:
        proof = Proof("", 1.0, 1.0, "id", (10,), shape)
        self.registry.write((("proof", *VIEW), asdict(proof)))

    def take(self, turns: int) -> Generations:
        for _ in range(turns):
            self.marks += 1
            self.prover.turn()
        return Registry(SHOP, self.log).read().for_sink("cache")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch, repairs=False)


@pytest.fixture
def repairing(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch, repairs=True)


def wrong_row() -> Comparison:
    differences = [Difference(ROW, "different")]
    return Comparison(*VIEW, different=1, sample=differences, differences=differences)


def test_a_row_that_is_not_decided_proves_nothing(turns: Turns) -> None:
    turns.prove(turns.shape)
    turns.confirm = lambda: Comparison(*VIEW, undecided=1)
    assert turns.take(5).proofs[ITEMS.qualified].through == 1.0
    # One that has expired is no damage.
    turns.confirm = lambda: Comparison(*VIEW, expired=1)
    assert turns.take(1).proofs[ITEMS.qualified].through == 7.0


def test_damage_that_another_comparison_finds_meanwhile_stays(turns: Turns) -> None:
    turns.prove(turns.shape)

    def differing_elsewhere() -> Comparison:
        damage = Damage("", 9.0, 1, ["8"])
        Registry(SHOP, turns.log).write((("proof", *VIEW), asdict(damage)))
        return Comparison(*VIEW)

    turns.confirm = differing_elsewhere
    known = turns.take(3)
    assert (known.proofs, list(known.damages)) == ({}, [ITEMS.qualified])


def test_the_proof_of_another_shape_ends_with_the_first_turn(turns: Turns) -> None:
    turns.prove("another")
    assert turns.take(1).proofs == {}


def test_all_rows_are_compared_since_a_sweep_has_come_round(turns: Turns) -> None:
    turns.differs = False
    turns.prove(turns.shape)
    turns.listed = lambda begin: Slice(after=replace(begin, cursor="k"))
    known = turns.take(1).proofs[ITEMS.qualified]
    assert (known.complete_at, known.sweep) == (1.0, None)
    # The time is Postgres', in which a turn takes a second here.
    turns.marks = 1_000
    begun = turns.take(1).proofs[ITEMS.qualified]
    assert (begun.complete_at, begun.sweep) == (1.0, Sweep(1_001.0, cursor="k"))
    # No row could be listed: it isn't tried again in the next turns, and nothing is proved by it.
    turns.listed = lambda _: Slice(error="QueryCanceled")
    failed = turns.take(1).proofs[ITEMS.qualified]
    assert (failed.complete_at, failed.sweep) == (1.0, begun.sweep)
    assert failed.through > begun.through
    turns.listed = lambda begin: Slice(after=replace(begin, side="end"))
    ended = turns.take(1).proofs[ITEMS.qualified]
    assert (ended.complete_at, ended.sweep) == (1_001.0, None)
    assert turns.slices[1:] == [begun.sweep, begun.sweep]


def test_a_row_is_repaired_and_counted(repairing: Turns) -> None:
    repairing.prove(repairing.shape)
    repairing.confirm = wrong_row
    known = repairing.take(3)
    assert known.damages == {}
    assert known.proofs[ITEMS.qualified].repaired == 1
    # Something changes it again and again: it is reported.
    damage = repairing.take(2).damages[ITEMS.qualified]
    assert "repaired before" in damage.unrepaired
    assert damage.ids == [ROW]


@pytest.mark.parametrize(
    ("repair", "reason"),
    [
        (lambda wrong: wrong, "didn't help"),
        (lambda _: raise_(SourceError("no right to cdc.signal", hint="h")), "no right"),
        (lambda _: raise_(ValueError("a secret")), "ValueError"),
    ],
)
def test_a_row_that_is_not_repaired_is_reported(
    repairing: Turns, repair: Callable[[Comparison], Comparison], reason: str
) -> None:
    repairing.prove(repairing.shape)
    repairing.confirm = wrong_row
    repairing.repair = repair
    known = repairing.take(3)
    assert reason in known.damages[ITEMS.qualified].unrepaired
    assert "secret" not in known.damages[ITEMS.qualified].unrepaired
    assert known.proofs == {}


def test_many_wrong_rows_are_not_repaired_at_once(repairing: Turns) -> None:
    repairing.prove(repairing.shape)
    repairing.confirm = lambda: replace(wrong_row(), different=prover.REPAIR_ROWS + 1)
    assert "100 rows at once" in repairing.take(3).damages[ITEMS.qualified].unrepaired


def raise_(error: Exception) -> Any:
    raise error
