"""What a registration says of the one before it: columns that the log still holds, other
servers.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cdc.control.registrations import (
    Captured,
    Registration,
    read,
    refuse_another,
    refuse_changed,
    refuse_promoted,
)
from cdc.errors import ConnectorError, SettingsError, SourceError
from cdc.kafka.records import Record
from cdc.model.obstacle import Obstacle
from cdc.model.position import Position, Server
from tests.support.pipelines import pipeline

SHOP = pipeline("shop", "", "public.items")
FIRST, PROMOTED, OTHER_SERVER = Server("7", 1), Server("7", 2), Server("8", 1)


def test_what_is_kept_comes_back() -> None:
    captured = Captured(("a",), ("b",), ("c",), ("a",), events=True)
    since = {"t": Position("x", (1,))}
    full = Registration(
        FIRST, 2, {"public.items": captured}, since, {"t": "x"}, former_events=("public.log",)
    )
    for registration in (full, Registration()):
        encoded = msgspec.json.encode(registration)
        assert msgspec.json.decode(encoded, type=Registration) == registration


@pytest.mark.parametrize("value", [b"{}", b"[]", b'{"op":"c"}', b'{"server"'])
def test_what_is_no_registration_is_not_taken_for_an_empty_one(value: bytes) -> None:
    """Records of a former server would count again."""
    broker: Any = SimpleNamespace(
        existing=set, last_record=lambda _: Record(7, 0, b"registration", value)
    )
    with pytest.raises(ConnectorError, match=r"offset 7 of shop\.registered isn't a registration"):
        read(broker, SHOP)


@pytest.mark.parametrize(
    ("previous", "now", "withdrawn"),
    [
        (Captured(("a",)), Captured(("a",)), ()),
        (Captured(), Captured(("a", "b")), ("a", "b")),
        (Captured(("a",), withdrawn=("a",)), Captured(("a", "b")), ("a", "b")),
        # Captured again, and left out once more.
        (Captured(("a",), withdrawn=("a",)), Captured(), ()),
        # The log never had it.
        (Captured((), unpublished=("g",)), Captured(("g",), unpublished=("g",)), ()),
    ],
)
def test_the_log_holds_what_was_sent_once(
    previous: Captured, now: Captured, withdrawn: tuple[str, ...]
) -> None:
    assert now.with_withdrawn(previous).withdrawn == withdrawn


def test_offsets_of_another_topic_mean_nothing() -> None:
    registration = Registration(since={"t": Position("x", (3, 4))})
    assert registration.start("t", "x") == (3, 4)
    assert registration.start("t", "y") == registration.start("u", "x") == ()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"exclude": ["b", "a"]}, ""),
        ({}, "`exclude`"),
        ({"exclude": ["a", "b"], "key": ["c"]}, "`key`"),
        ({"exclude": ["a", "b"], "events": True}, "`events`"),
        ({"exclude": ["a", "b"], "mask": {"c": "redact"}}, "`mask`"),
    ],
)
def test_a_file_that_was_not_registered_is_reported(entry: dict[str, Any], message: str) -> None:
    registration = Registration(tables={"public.items": Captured(("a", "b"))})
    changed = pipeline("shop", "", {"table": "public.items", **entry}, "public.new")
    if not message:
        refuse_changed(registration, changed)
        return
    with pytest.raises(SettingsError, match=f"{message} of public.items") as caught:
        refuse_changed(registration, changed)
    assert "cdc -p FILE register" in caught.value.hint


@pytest.mark.parametrize("server", [FIRST, PROMOTED, None])
def test_the_same_server_is_no_other(server: Server | None) -> None:
    refuse_another(Registration(FIRST), server, SHOP)
    refuse_another(Registration(), server, SHOP)
    refuse_another(None, server, SHOP)


def test_another_server_is_refused_by_its_identifier() -> None:
    with pytest.raises(SourceError, match="identifier is 8, that one's was 7"):
        refuse_another(Registration(FIRST), OTHER_SERVER, SHOP)


def test_a_promoted_standby_is_reported() -> None:
    """It may lack the end of the log that was sent, and nothing in the log says so."""
    with pytest.raises(SourceError, match="timeline is 2, it was 1") as caught:
        refuse_promoted(Registration(FIRST), PROMOTED, SHOP)
    assert "cdc -p FILE verify" in caught.value.hint
    for server in (FIRST, OTHER_SERVER, None):
        refuse_promoted(Registration(FIRST), server, SHOP)


def test_a_topic_of_events_is_known_while_its_table_is_away() -> None:
    """So that it is continued where the table comes back, unless its rows are events no longer."""
    log = Registration(tables={"public.log": Captured(events=True), "public.items": Captured()})
    aside = log.set_aside("public.log", Obstacle.KEYLESS)
    left = log.renew(Registration(), log.tables, {}, moved=False)
    for registration in (log, aside, left):
        assert registration.events == {"public.log"}
        for captured in (Captured(events=True), Captured()):
            again = Registration(tables={"public.log": captured})
            back = registration.renew(again, {}, {}, moved=False)
            assert back.events == ({"public.log"} if captured.events else set())
