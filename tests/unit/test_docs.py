"""What the documentation says of settings is what the code has."""

from docs.generators.settings import SECTIONS


def test_every_setting_says_what_it_does() -> None:
    silent = [
        f"{title}: {name}"
        for title, model in SECTIONS
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []
