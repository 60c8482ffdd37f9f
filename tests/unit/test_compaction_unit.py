"""Which views a record has to be in before it may go."""

import time
from dataclasses import replace

import pytest

from cdc.audit.compaction import required_views
from cdc.generations.registry import GenerationBuild, Generations, RetainedView
from cdc.kafka.ledger import Hole
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.sinks.memory import Memory

TABLE = Table("public", "items", (), ("id",), "shop.public.items")
OTHER_TABLE = Table("public", "others", (), ("id",), "shop.public.others")
NAMES = {TABLE.qualified: "20260101t000000000000"}


class Warehouse(Memory):
    row_format = "events"


def names(cache: Generations, *, tombstones: bool) -> list[str]:
    sinks = [Memory("cache"), Warehouse("warehouse")]
    registry = {"cache": cache, "warehouse": Generations()}
    views = required_views([TABLE, OTHER_TABLE], sinks, registry.__getitem__, tombstones=tombstones)
    assert all(position(table) is None for _, table, position in views)
    return [f"{table.name} {name}" for name, table, _ in views]


LIVE = ["items cache", "others cache", "items warehouse", "others warehouse"]


def test_a_superseded_record_goes_once_the_logs_of_changes_have_it() -> None:
    assert names(Generations(), tombstones=False) == ["items warehouse", "others warehouse"]


def retained_views(end: float) -> Generations:
    return Generations(
        retained={name: RetainedView(generation, end, 0.0) for name, generation in NAMES.items()}
    )


def building(alive_at: float) -> Generations:
    work = GenerationBuild("cache", "catch up", NAMES, 0.0)
    return Generations(work, claims={"command": 0}, alive_at={"command": alive_at})


@pytest.mark.parametrize(
    ("generations", "more"),
    [
        (retained_views(time.time() + 600), "is kept"),
        (building(time.time() + 600), "is being built"),
        (retained_views(time.time() - 1), None),
        (building(time.time() - 600), None),
    ],
    ids=["kept", "being built", "kept no more", "dead"],
)
def test_a_tombstone_goes_once_every_view_has_seen_it(
    generations: Generations, more: str | None
) -> None:
    additions = [f"items the generation of cache that {more}"] if more else []
    assert names(generations, tombstones=True) == LIVE + additions


def test_holes_that_touch_are_told_as_one() -> None:
    def hole(start: tuple[int, int], end: tuple[int, int], time: float, id_: str = "id") -> Hole:
        return Hole(Position(id_, start), Position(id_, end), time, time + 1)

    first, later = hole((0, 0), (5, 5), 1), hole((7, 5), (9, 9), 5)
    assert later.merged([first]) == [first, later]
    assert hole((5, 3), (9, 9), 3).merged([first]) == [replace(hole((0, 0), (9, 9), 1), until=4)]
    assert later.merged([hole((0, 0), (5, 5), 1, "another")])[0].end.topic_id == "another"
    assert hole((0, 0), (6, 6), 1).merged([first]) == [hole((0, 0), (6, 6), 1)]
