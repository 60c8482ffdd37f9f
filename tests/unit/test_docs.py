"""What the documentation says of settings, verbs and topics is what the code has."""

import re
from graphlib import CycleError

import pytest

from cdc.kafka.topic_specs import topic_specs
from cdc.model.finding import Severity
from cdc.observe.sampler import IDLE_PAUSE_S
from docs import draw_rooms, draw_states
from docs.generators.settings import SECTIONS
from tests.support.pages import ROOT
from tests.support.pipelines import pipeline

OPERATE = ROOT / "docs" / "operate"


@pytest.fixture(scope="module")
def arrows() -> draw_rooms.Arrows:
    return draw_rooms.arrows()


def test_every_setting_says_what_it_does() -> None:
    silent = [
        f"{title}: {name}"
        for title, model in SECTIONS
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_the_picture_of_rooms_is_current(arrows: draw_rooms.Arrows) -> None:
    text = draw_rooms.PAGE.read_text()
    assert text == draw_rooms.page(text, arrows), "python -m docs.draw_rooms"
    drawn = draw_rooms.picture(arrows)
    assert draw_rooms.PICTURE.read_text() == drawn, "python -m docs.draw_rooms"


def test_the_picture_of_rooms_has_every_room_and_needs_no_script(
    arrows: draw_rooms.Arrows,
) -> None:
    """A mermaid block would have the site fetch a script from another host."""
    drawn = draw_rooms.PICTURE.read_text()
    assert all(f">{room}</text>" in drawn for room in arrows)
    assert "<script" not in drawn
    pages = draw_rooms.PAGE.parents[1].rglob("*.md")
    assert [page.name for page in pages if "```mermaid" in page.read_text()] == []


def test_the_picture_of_states_is_current_and_has_every_next_state() -> None:
    drawn = draw_states.PICTURE.read_text()
    assert drawn == draw_states.picture(), "python -m docs.draw_states"
    table = draw_states.rows()
    assert len(draw_states.reasons(table)) >= 12
    for name in draw_states.reasons(table):
        assert re.search(rf"\b{name}\b", drawn)
    ends = {
        word
        for *_, text in table
        for word in ("failed", "stopped", "caught up", "waiting")
        if word in text
    }
    assert ends == {"failed", "stopped", "caught up", "waiting"}
    assert all(f">{name}</text>" in drawn for name in ends)
    assert "<script" not in drawn


def test_every_room_says_what_it_is_for(arrows: draw_rooms.Arrows) -> None:
    text = draw_rooms.PAGE.read_text().partition(draw_rooms.BEGIN)[0]
    assert [room for room in arrows if f"`{room}`" not in text] == []


def test_the_rooms_that_a_destination_knows_are_named(arrows: draw_rooms.Arrows) -> None:
    text = draw_rooms.PAGE.read_text()
    _, _, sentence = text.partition("A destination knows ")
    named = re.findall(r"`(cdc\.\w+)`", sentence.partition("no other destination")[0])
    assert set(named) == arrows["cdc.sinks"]


def test_an_arrow_that_runs_back_is_found(arrows: draw_rooms.Arrows) -> None:
    planted = {**arrows, "cdc.model": {*arrows["cdc.model"], "cdc.apply"}}
    with pytest.raises(CycleError):
        draw_rooms.block(planted)


def test_every_verdict_is_named_where_verdicts_are_explained() -> None:
    (line,) = (
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if "comes the verdict" in line
    )
    verdicts = {"ok", *Severity} - {Severity.INFO}
    assert [verdict for verdict in verdicts if f"`{verdict}`" not in line] == []


def test_every_topic_that_a_removal_takes_is_named() -> None:
    internal = {
        topic.removeprefix("shop.")
        for topic in topic_specs(pipeline("shop", "", "public.orders"))
        if topic.startswith("shop.") and topic.count(".") == 1
    }
    (row,) = (
        line
        for line in (OPERATE / "destroy.md").read_text().splitlines()
        if line.startswith("| Kafka |")
    )
    assert len(internal) == 7
    assert [topic for topic in internal if f"`{topic}`" not in row] == []


def test_the_pace_of_looks_is_the_same_on_two_pages() -> None:
    # A look takes some of the time, and the pause after it the rest.
    assert 3 < IDLE_PAUSE_S < 5
    assert "Looks begin every 5 s" in (OPERATE / "metrics.md").read_text()
    assert "otherwise about every five seconds" in (OPERATE / "page.md").read_text()
