"""Up to where documents are current, by the notes of their views."""

import pytest

from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Derivation, Table
from cdc.sink.factory import earliest_checkpoint, late_topics


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
        # A view that has never been current, and one of a topic that was recreated.
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
