"""Joins in time: which part of a list a parent shows, and which parents a row belongs to.

Both ends of such a join have lists that are ordered by their times. So each question is a part of a
list.
"""

from collections.abc import Collection, Iterator

from cdc.documents.plan import Listing, Node, StatePlan, TimeJoin
from cdc.documents.rows import Entries
from cdc.documents.scalar.instants import FIRST, LAST, instant_of, order_of
from cdc.documents.state import Place, Span, State, scan_spans

ListPlace = tuple[str, str]
"""The text of a list, and what a row is ordered by there."""


def list_place(
    plan: StatePlan, node: Node, listing: Listing | None, entries: Entries
) -> ListPlace | None:
    """Return a row's place in a list; None where it has none, or its time is beyond the years 1 to 9999."""
    number = plan.listings[node.table.qualified].index(listing)
    place = entries.places.get(number)
    return place if place is not None and instant_of(place[1]) is not None else None


def children_span(parent: Node, child: Node, place: ListPlace, parent_id: str) -> Span:
    """Return the part of the child's list that has the rows of a parent: of `as_of` and `previous`
    the last of these, of `next` the first, of `during` all.

    place: the parent's, in its own list
    """
    time = _time(child)
    text, order = place
    own_place = Place(order, parent_id).member
    low, high = _bounds(child, order, time.before, time.after)
    if time.kind in ("as_of", "during"):
        return Span(text, low, high)
    if time.kind == "previous":
        return Span(text, low, own_place if child.is_same_time(parent) else f"{order} ")
    return Span(text, f"{own_place}\0" if child.is_same_time(parent) else f"{order}!", high)


def is_last(child: Node) -> bool:
    """Whether the row of a parent is the last one of `children_span`."""
    return _time(child).kind in ("as_of", "previous")


def parents(
    plan: StatePlan, state: State, parent: Node, child: Node, places: Collection[ListPlace]
) -> Iterator[Collection[str]]:
    """Find the parents that a row at one of these places of the child's lists may belong to, page by
    page, in the state as it is now. The row itself need not be there any more.

    A parent belongs to the nearest row. So those from the row to the next one in the lists are
    enough: if a parent beyond it has another row than before, that one or the next has changed
    itself.
    """
    time = _time(child)
    number = plan.listings[child.table.qualified].index(child.listing)
    changed = list(places)
    if time.kind == "during":
        neighbours: list[list[Place]] = [[] for _ in changed]
    elif time.kind == "next":
        earlier = [
            Span(text, _bounds(child, order, None, 0)[0], f"{order} ") for text, order in changed
        ]
        neighbours = state.ranged(child.table.qualified, number, earlier, 1, last_first=True)
    else:
        later = [
            Span(text, f"{order}!", _bounds(child, order, 0, None)[1]) for text, order in changed
        ]
        neighbours = state.ranged(child.table.qualified, number, later, 1)
    spans = {
        Span(text, *_parent_bounds(child, order, near[0].order if near else None))
        for (text, order), near in zip(changed, neighbours, strict=True)
    }
    parent_number = plan.listings[parent.table.qualified].index(child.parent_listing)
    for _, page in scan_spans(state, parent.table.qualified, parent_number, list(spans)):
        yield {place.id for place in page}


def _parent_bounds(child: Node, order: str, neighbour: str | None) -> tuple[str, str]:
    """Return where the parents of a row at a time begin and end, which has a neighbour there."""
    time = _time(child)
    if time.kind == "during":
        return _bounds(child, order, time.after, time.before)
    if time.kind == "next":
        low, high = _bounds(child, order, time.after, 0)
        return (low if neighbour is None else max(low, f"{neighbour} ")), high
    low, high = _bounds(child, order, 0, time.before)
    return low, (high if neighbour is None else min(high, f"{neighbour}!"))


def _bounds(child: Node, order: str, before: int | None, after: int | None) -> tuple[str, str]:
    """Return the part of a list around a time, both ends included, by microseconds; None: without an end."""
    instant = instant_of(order)
    assert instant is not None
    low = FIRST if before is None else instant - before
    high = LAST if after is None else instant + after
    return (
        f"{order_of(low, has_zone=child.has_zone)} ",
        f"{order_of(high, has_zone=child.has_zone)}!",
    )


def _time(child: Node) -> TimeJoin:
    assert child.time is not None
    return child.time
