"""Where the parts of a warehouse's view stand, and what its history says of that."""

from dataclasses import replace

import pytest

from cdc.errors import CdcError
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.delta.log import CLEARED, Commit, LastCommit, standing
from cdc.sinks.delta.positions import (
    WriterFence,
    from_transactions,
    known_offsets,
    next_position,
    oldest,
    to_transactions,
)
from tests.support.envelopes import table


def checkpoint(*offsets: int, topic: str = "one") -> ViewCheckpoint:
    return ViewCheckpoint(Position(topic, offsets))


@pytest.mark.parametrize(
    ("previous", "end", "result"),
    [
        (None, (1, 2), (1, 2)),
        (checkpoint(0, 5), (1, 2), (1, 5)),
        (checkpoint(3, 5), (1, 2), (3, 5)),
        (checkpoint(9, 9, topic="other"), (1, 2), (1, 2)),
        (checkpoint(9, 9), (1, 2, 3), (9, 9, 3)),
    ],
)
def test_a_position_never_goes_back(
    previous: ViewCheckpoint | None, end: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert next_position(previous, Position("one", end)) == Position("one", result)
    assert all(map(int.__ge__, result, known_offsets(previous, Position("one", end))))


@pytest.mark.parametrize(
    ("changes", "mirror", "start"),
    [
        (checkpoint(1, 5), checkpoint(4, 2), (1, 2)),
        (None, checkpoint(4, 2), (0, 0)),
        (checkpoint(1, 5), None, None),
        (checkpoint(9, 9, topic="other"), checkpoint(4, 2), (0, 0)),
        (checkpoint(1, 5), checkpoint(4, 2, 7), (1, 2, 0)),
    ],
)
def test_reading_starts_where_neither_misses_a_record(
    changes: ViewCheckpoint | None, mirror: ViewCheckpoint | None, start: tuple[int, ...] | None
) -> None:
    start_checkpoint = oldest({"changes": changes, "mirror": mirror})
    assert (start_checkpoint and start_checkpoint.position.offsets) == start


def commit(
    number: int, operation: str, stored: ViewCheckpoint | None = None, **parameters: object
) -> Commit:
    text = stored.to_json() if stored else "a note of somebody else"
    return {
        "version": number,
        "operation": operation,
        "userMetadata": text,
        "operationParameters": parameters,
    }


OURS = [commit(number, "WRITE", checkpoint(number)) for number in range(5)]
"""Versions 0 to 4, each with a position of its own."""


def stands(
    *newer: Commit, changed: tuple[int, ...] = (), older: list[Commit] = OURS
) -> LastCommit | None:
    """Return the standing after these commits, given in the order in which they were made."""
    return standing([*newer[::-1], *older[::-1]], changed.__contains__, lambda _: None)


def test_what_rearranges_files_leaves_the_position() -> None:
    operations = ("OPTIMIZE", "SET TBLPROPERTIES", "VACUUM END")
    commits = [commit(number, operation) for number, operation in enumerate(operations, 5)]
    assert stands(*commits) == LastCommit(checkpoint(4))


def test_a_restore_leads_back() -> None:
    restore = commit(5, "RESTORE", version="2")
    assert stands(restore) == LastCommit(checkpoint(2))
    assert stands(restore, commit(6, "RESTORE", version=4)) == LastCommit(checkpoint(4))
    back = commit(6, "RESTORE", version="1")
    forth = commit(7, "RESTORE", version="5")
    assert stands(restore, back, forth) == LastCommit(checkpoint(2))
    assert stands(restore, commit(6, "WRITE", checkpoint(3))) == LastCommit(checkpoint(3))
    nowhere = [commit(0, "CREATE TABLE", CLEARED), *OURS[1:]]
    assert stands(commit(5, "RESTORE", version="0"), older=nowhere) == LastCommit(None)


def test_a_restore_undoes_what_somebody_else_has_done() -> None:
    deleted, restore = commit(5, "DELETE"), commit(6, "RESTORE", version="4")
    standing_before = stands(deleted, changed=(5,))
    assert standing_before
    assert standing_before.checkpoint == checkpoint(4)
    assert "DELETE (version 5)" in standing_before.trouble
    assert stands(deleted, restore, changed=(5, 6)) == LastCommit(checkpoint(4))
    standing_after = stands(deleted, restore, commit(7, "RESTORE", version="5"), changed=(5, 6, 7))
    assert standing_after == standing_before


def test_what_is_not_said_is_not_made_up() -> None:
    assert stands(older=OURS[:0]) is None
    unknown = [commit(9, "WRITE"), commit(8, "WRITE")]
    assert standing(unknown, lambda _: False, lambda _: None) is None
    unnamed = stands(commit(5, "RESTORE", timestamp="2026-01-01"))
    assert unnamed
    assert unnamed.trouble


def test_a_restore_that_names_a_time_is_looked_up() -> None:
    history = [commit(5, "RESTORE", version=None, timestamp="2026-01-01"), *OURS[::-1]]
    last = standing(history, lambda _: False, lambda version: version - 3)
    assert last == LastCommit(checkpoint(2))


def test_a_checkpoint_that_the_log_has_kept_is_nobody_elses() -> None:
    """It has lost its writer and a part of its time, and is the one that this writer left."""
    stored = replace(
        checkpoint(3, 4), writer="us", changed_at=1.23456, generation="live", shape="a"
    )
    kept = from_transactions(to_transactions(stored, 7))
    assert kept == replace(stored, writer="", changed_at=1.234)
    step = Advance(table("t.public.items"), stored.position, Position("one", (5, 5)))
    folders = {"mirror": "/warehouse/mirror"}
    fence = WriterFence()
    fence.record("/warehouse/mirror", stored)
    assert fence.begin_step("us", step, folders, {"mirror": kept}) == {"mirror": kept}
    other = replace(kept, position=Position("one", (3, 9)))
    with pytest.raises(CdcError):
        fence.begin_step("us", step, folders, {"mirror": other})


def test_the_shape_of_the_last_commit_counts() -> None:
    """A rebuild gives a view another one; numbers of a former build have none."""
    stored = replace(checkpoint(3, 4), changed_at=1.0)
    numbers = to_transactions(stored, 1)
    assert from_transactions({k: n for k, n in numbers.items() if "/shape/" not in k}) == stored
    for version, shape in enumerate(("a", "b", "a", ""), start=2):
        rebuilt = replace(stored, shape=shape)
        numbers |= to_transactions(rebuilt, version)
        assert from_transactions(numbers) == rebuilt


def test_numbers_of_another_kind_are_no_position() -> None:
    assert from_transactions({}) is None
    assert from_transactions({"cdc": 5, "spark": 3}) is None
