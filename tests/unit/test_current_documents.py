"""Up to where documents are current, by the notes of their views."""

from typing import Any

import pytest

from cdc.audit.documents.vectors import moments
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Derivation, Table
from cdc.sink.factory import earliest_checkpoint, late_topics
from cdc.views.plan import Node, StatePlan, View


def at(*offsets: int, topic_id: str = "1", floor: int = 0) -> ViewCheckpoint:
    return ViewCheckpoint(Position(topic_id, offsets), floor=floor)


ORDER_DOCS = Table(
    "view",
    "order_docs",
    (Column("id", "integer"),),
    ("id",),
    "shop.view.order_docs",
    derivation=Derivation("", (("shop.orders", "orders"), ("shop.items", "items")), ()),
)
ENDS = {"orders": Position("1", (5, 7)), "items": Position("2", (0,))}
OWN = {"shop.view.order_docs": at(9)}


@pytest.mark.parametrize(
    ("note", "floor", "expected"),
    [
        ({"orders": at(5, 7), **OWN}, 0, []),
        ({"orders": at(6, 7), "items": at(3, topic_id="2"), **OWN}, 0, ["items"]),
        ({"orders": at(5, 6), **OWN}, 0, ["orders"]),
        ({"orders": at(5, 7, topic_id="another"), **OWN}, 0, ["orders"]),
        ({**OWN}, 0, ["orders"]),
        ({"orders": at(5, 7)}, 0, ["shop.view.order_docs"]),
        # A TRUNCATE leaves no record in the topic: the documents may still hold what it removed.
        ({"orders": at(5, 7), **OWN}, 3, ["orders"]),
        ({"orders": at(5, 7, floor=3), **OWN}, 3, []),
    ],
)
def test_topics_in_which_documents_are_late(
    note: dict[str, ViewCheckpoint], floor: int, expected: list[str]
) -> None:
    """`floor`: of orders. Nothing was ever in the topic of items, which was truncated, too."""
    notes = {"order_docs": note, "customer_docs": {"orders": at(5, 7, floor=9)}}
    floors = {"shop.orders": floor, "shop.items": 9}
    assert late_topics(notes, ORDER_DOCS, ENDS, floors.__getitem__) == expected


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ([at(5, 7)], at(5, 7)),
        ([at(5, 7), at(6, 2)], at(5, 2)),
        # A view that has never been current, and one of a topic that was made anew.
        ([at(5, 7), None], None),
        ([at(5, 7), at(5, 7, topic_id="2")], None),
        ([at(5, 7), at(5)], None),
        ([], None),
    ],
)
def test_a_table_is_as_current_as_its_latest_view(
    noted: list[ViewCheckpoint | None], expected: ViewCheckpoint | None
) -> None:
    assert earliest_checkpoint(noted) == expected


def view(name: str, *tables: str) -> View:
    """A view of tables, in one line."""
    node: Any = None
    for table in reversed(tables):
        columns = (Column("id", "integer"),)
        described = Table("shop", table, columns, ("id",), table)
        node = Node(table, described, ("id",), children=(node,) if node else ())
    return View(name, node, ())


def test_views_of_one_moment_are_compared_together() -> None:
    """A view whose note lacks a table isn't taken for as new as another one in it: after a TRUNCATE
    its documents may not be sent yet.
    """
    plan = StatePlan((view("a", "x", "y"), view("b", "y"), view("c", "y"), view("d", "x", "y")))
    notes = {
        "a": {"x": at(1), "y": at(2), "a": at(9)},
        "b": {"y": at(2), "b": at(9)},
        "c": {"y": at(3), "c": at(9)},
        "d": {"x": at(1), "d": at(9)},
    }
    assert [
        ([part.name for part in moment.views], sorted(positions))
        for moment, positions in moments(plan, notes)
    ] == [(["d"], ["d", "x"]), (["a", "b"], ["a", "b", "x", "y"]), (["c"], ["c", "y"])]
