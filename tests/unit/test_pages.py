"""Pages say what is so: commands parse, links and paths lead somewhere, generated pages are
current.
"""

import ast
import re
from pathlib import Path

import pytest

from cdc.kafka.topic_setup import topic_specs
from docs.generate import FOLDER
from docs.generate import PAGES as GENERATED
from docs.generators.settings import SECTIONS
from tests.support import pages
from tests.support.pages import PAGES, ROOT
from tests.support.pipelines import pipeline

every = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every
def test_every_command_parses(page: Path) -> None:
    text = page.read_text()
    assert [message for words in pages.commands(text) if (message := pages.refusal(words))] == []
    assert list(pages.unknown_words(text)) == []


@every
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    assert list(pages.broken_links(page, text)) == []
    assert list(pages.lost_paths(text)) == []


@every
def test_names_are_in_the_file_that_a_page_gives_for_them(page: Path) -> None:
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", page.read_text())
    assert [
        (name, path)
        for name, path in named
        if (ROOT / path).exists() and not re.search(rf"\b{name}\b", (ROOT / path).read_text())
    ] == []


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_current(name: str) -> None:
    assert (FOLDER / name).read_text() == GENERATED[name](), "python -m docs.generate"


def test_the_codec_at_a_prompt_says_what_the_page_says() -> None:
    (block,) = (
        body
        for language, body in pages.blocks(
            (FOLDER / "understand" / "how-a-change-travels.md").read_text()
        )
        if language == "python"
    )
    *statements, last = ast.parse(block).body
    assert isinstance(last, ast.Expr)
    names: dict[str, object] = {}
    exec(compile(ast.Module(statements, []), "page", "exec"), names)
    output = ast.literal_eval(block.rpartition("#")[2].strip())
    assert eval(compile(ast.Expression(last.value), "page", "eval"), names) == output


def test_every_setting_says_what_it_does() -> None:
    silent = [
        f"{title}: {name}"
        for title, model in SECTIONS
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []


def test_every_topic_that_a_removal_takes_is_named() -> None:
    internal = {
        topic.removeprefix("shop.")
        for topic in topic_specs(pipeline("shop", "", "public.orders"))
        if topic.startswith("shop.") and topic.count(".") == 1
    }
    (row,) = (
        line
        for line in (FOLDER / "operate" / "destroy.md").read_text().splitlines()
        if line.startswith("| Kafka |")
    )
    assert len(internal) == 7
    assert [topic for topic in internal if f"`{topic}`" not in row] == []
