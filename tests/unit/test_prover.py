"""The continuous proof with a registry in memory: a view is only proved further if its rows are equal."""

from collections.abc import Callable
from dataclasses import asdict
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cdc.control.floors import Floors
from cdc.generations.registry import Damage, Generations, Proof, Registry
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.memory import Memory
from cdc.verify import prover
from cdc.verify.barrier import Barrier
from cdc.verify.changed_rows import ChangedAnswer
from cdc.verify.comparison import Comparison
from cdc.verify.proof import view_shapes
from cdc.verify.prover import Prover, Proving
from tests.support.envelopes import table
from tests.support.pipelines import pipeline
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
    """A prover of one view, whose row 5 differs at every look. `confirm` compares it once more."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
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
        answer = ChangedAnswer(*VIEW, {ROW: 1})
        for name, value in {
            "time": SimpleNamespace(monotonic=lambda: self.marks * 1e6, thread_time=lambda: 0.0),
            "Log": lambda _: opened,
            "read_time_ms": lambda _: self.marks * 1000.0,
            "place_barrier": lambda *_: Barrier({ITEMS.topic: self.end()}, Floors()),
            "passed_views": lambda *_: frozenset({VIEW}),
            "positions": lambda *_: {ITEMS.qualified: ViewCheckpoint(self.end())},
            "compare_changed": lambda *_: ([answer], 0.0),
            "TableVerification": lambda *_: SimpleNamespace(result=lambda _: [self.confirm()]),
        }.items():
            patch.setattr(prover, name, value)
        self.prover = Prover(spark, lambda: SHOP, lambda: Proving(SHOP, [ITEMS], [sink]), Event())

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
    return Turns(monkeypatch)


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
