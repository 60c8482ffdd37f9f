"""Where the parts of a warehouse's view stand, and what its history says of that."""

import pytest

from cdc.model.position import Position, ViewCheckpoint
from sinks.delta.log.history import CLEARED, Commit, Standing, standing
from sinks.delta.log.positions import advance, known_offsets, oldest


def at(*offsets: int, topic: str = "one") -> ViewCheckpoint:
    return ViewCheckpoint(Position(topic, offsets))


@pytest.mark.parametrize(
    ("before", "until", "after"),
    [
        (None, (1, 2), (1, 2)),
        (at(0, 5), (1, 2), (1, 5)),
        (at(3, 5), (1, 2), (3, 5)),
        (at(9, 9, topic="other"), (1, 2), (1, 2)),
        (at(9, 9), (1, 2, 3), (9, 9, 3)),
    ],
)
def test_a_position_never_goes_back(
    before: ViewCheckpoint | None, until: tuple[int, ...], after: tuple[int, ...]
) -> None:
    assert advance(before, Position("one", until)) == Position("one", after)
    assert all(map(int.__ge__, after, known_offsets(before, Position("one", until))))


@pytest.mark.parametrize(
    ("changes", "mirror", "start"),
    [
        (at(1, 5), at(4, 2), (1, 2)),
        (None, at(4, 2), (0, 0)),
        (at(1, 5), None, None),
        (at(9, 9, topic="other"), at(4, 2), (0, 0)),
        (at(1, 5), at(4, 2, 7), (1, 2, 0)),
    ],
)
def test_reading_starts_where_neither_misses_a_record(
    changes: ViewCheckpoint | None, mirror: ViewCheckpoint | None, start: tuple[int, ...] | None
) -> None:
    found = oldest(changes, mirror)
    assert (found and found.position.offsets) == start


def commit(number: int, operation: str = "WRITE", said: ViewCheckpoint | None = None, **parameters: object) -> Commit:
    text = said.to_json() if said else "a note of somebody else"
    return {"version": number, "operation": operation, "userMetadata": text, "operationParameters": parameters}


OURS = [commit(number, said=at(number)) for number in range(5)]
"""Versions 0 to 4, each with a position of its own."""


def stands(*newer: Commit, changed: tuple[int, ...] = (), older: list[Commit] = OURS) -> Standing | None:
    """By commits in the order in which they were made."""
    return standing([*newer[::-1], *older[::-1]], changed.__contains__, lambda _: None)


def test_what_rearranges_files_leaves_the_position() -> None:
    assert stands(commit(5, "OPTIMIZE"), commit(6, "SET TBLPROPERTIES"), commit(7, "VACUUM END")) == Standing(at(4))


def test_a_restore_leads_back() -> None:
    back = commit(5, "RESTORE", version="2")
    assert stands(back) == Standing(at(2))
    assert stands(back, commit(6, "RESTORE", version=4)) == Standing(at(4))
    assert stands(back, commit(6, "RESTORE", version="1"), commit(7, "RESTORE", version="5")) == Standing(at(2))
    assert stands(back, commit(6, said=at(3))) == Standing(at(3))
    nowhere = [commit(0, "CREATE TABLE", CLEARED), *OURS[1:]]
    assert stands(commit(5, "RESTORE", version="0"), older=nowhere) == Standing(None)


def test_a_restore_undoes_what_somebody_else_has_done() -> None:
    deleted, back = commit(5, "DELETE"), commit(6, "RESTORE", version="4")
    found = stands(deleted, changed=(5,))
    assert found
    assert found.checkpoint == at(4)
    assert "DELETE (version 5)" in found.trouble
    assert stands(deleted, back, changed=(5, 6)) == Standing(at(4))
    again = stands(deleted, back, commit(7, "RESTORE", version="5"), changed=(5, 6, 7))
    assert again == found


def test_what_is_not_said_is_not_made_up() -> None:
    assert stands(older=OURS[:0]) is None
    assert standing([commit(9), commit(8)], lambda _: False, lambda _: None) is None
    unnamed = stands(commit(5, "RESTORE", timestamp="2026-01-01"))
    assert unnamed
    assert unnamed.trouble


def test_a_restore_that_names_a_time_is_looked_up() -> None:
    history = [commit(5, "RESTORE", version=None, timestamp="2026-01-01"), *OURS[::-1]]
    assert standing(history, lambda _: False, lambda version: version - 3) == Standing(at(2))
