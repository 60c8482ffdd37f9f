"""What the documentation says of settings is what the code has."""

from docs.generate import PAGE, SECTIONS, page


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m docs.generate"


def test_every_setting_says_what_it_does() -> None:
    silent = [
        f"{title}: {name}"
        for title, model in SECTIONS
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []
