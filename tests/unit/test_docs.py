"""What the documentation says of settings is what the code has."""

from graphlib import CycleError

import pytest

from docs import draw_rooms
from docs.generators.settings import SECTIONS


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


def test_every_room_says_what_it_is_for(arrows: draw_rooms.Arrows) -> None:
    text = draw_rooms.PAGE.read_text().partition(draw_rooms.BEGIN)[0]
    assert [room for room in arrows if f"`{room}`" not in text] == []


def test_an_arrow_that_runs_back_is_found(arrows: draw_rooms.Arrows) -> None:
    planted = {**arrows, "cdc.model": {*arrows["cdc.model"], "cdc.apply"}}
    with pytest.raises(CycleError):
        draw_rooms.block(planted)
