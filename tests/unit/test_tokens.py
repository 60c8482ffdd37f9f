"""Tokens of several servers: a place in one log says nothing about another's."""

import pytest

from cdc.client.read_your_writes import Ends, Token, ends_after
from cdc.model.position import Position

FIRST, SECOND = {"t": Position("id", (10,))}, {"t": Position("id", (20,))}
OLD_SERVER, NEW_SERVER = "77.1", "77.2"


def test_what_a_token_says() -> None:
    assert Token.parse("1/A@77.2") == Token((1 << 32) + 10, NEW_SERVER)
    # A place without a server could be one of any log.
    with pytest.raises(ValueError, match="not enough values"):
        Token.parse("0/A")


def test_a_place_in_another_log_proves_nothing() -> None:
    """After a failover that lost the end of the log places come a second time, and other changes
    with them.
    """
    known: dict[str, tuple[int, Ends]] = {}
    assert ends_after(Token(1, OLD_SERVER), known) is None
    known[OLD_SERVER] = 1000, FIRST
    assert ends_after(Token(1000, OLD_SERVER), known) == FIRST
    assert ends_after(Token(1001, OLD_SERVER), known) is None
    assert ends_after(Token(500, NEW_SERVER), known) is None
    known[NEW_SERVER] = 600, SECOND
    assert ends_after(Token(500, NEW_SERVER), known) == SECOND
    assert ends_after(Token(601, NEW_SERVER), known) is None
    # What the old one's tokens stand for stays true.
    assert ends_after(Token(999, OLD_SERVER), known) == FIRST
