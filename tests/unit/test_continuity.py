"""G5: a view goes on only from a log that still continues it."""

import pytest

from cdc.change import Column, Position, Table
from cdc.continuity import refuse_gap
from cdc.errors import ConnectorError

TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "shop.public.items")


def judge(at: Position | None, starts: tuple[int, ...] = (0, 0), ends: tuple[int, ...] = (9, 9)) -> None:
    refuse_gap("search", TABLE, Position("id", starts), Position("id", ends), at)


def test_what_the_log_continues_is_accepted() -> None:
    judge(None)
    judge(Position("id", (0, 0)))
    judge(Position("id", (3, 9)), starts=(3, 9))
    judge(Position("id", (9, 9)))


@pytest.mark.parametrize(
    ("at", "starts", "ends", "message"),
    [
        (Position("other", (1, 1)), (0, 0), (9, 9), "created anew"),
        (Position("id", (1, 1, 1)), (0, 0), (9, 9), "has 2 partitions, the view was made from 3"),
        (Position("id", (1, 4)), (0, 5), (9, 9), "has lost records that the view still needs"),
        (Position("id", (1, 9)), (0, 0), (9, 8), "its log was cut"),
        (None, (0, 1), (9, 9), "no longer holds its first records"),
    ],
)
def test_what_it_does_not_is_refused(
    at: Position | None, starts: tuple[int, ...], ends: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConnectorError, match=message) as caught:
        judge(at, starts, ends)
    assert caught.value.hint
    assert caught.value.exit_code == 5
