"""Tokens of several servers: a place in one log says nothing about another's."""

import pytest

from cdc.client.read_your_writes import Token, TokenEnds
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
    ends = TokenEnds()
    assert ends.ends(Token(1, OLD_SERVER)) is None
    ends.add(Token(1000, OLD_SERVER), FIRST)
    assert ends.ends(Token(1000, OLD_SERVER)) == FIRST
    assert ends.ends(Token(1001, OLD_SERVER)) is None
    assert ends.ends(Token(500, NEW_SERVER)) is None
    ends.add(Token(600, NEW_SERVER), SECOND)
    assert ends.ends(Token(500, NEW_SERVER)) == SECOND
    assert ends.ends(Token(601, NEW_SERVER)) is None
    # What the old one's tokens stand for stays true.
    assert ends.ends(Token(999, OLD_SERVER)) == FIRST
