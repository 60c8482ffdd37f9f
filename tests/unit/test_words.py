"""Names say what a thing is: vague words make up less than a small share of all names that the code
binds.

A participle, a pronoun or a preposition (`found`, `one`, `at`) tells nothing about its value. Other
code bases of this kind have about 0.1 % of such names. The aim here is 1 %.
"""

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from tests.support import pages
from tests.support.pages import ROOT

PACKAGES = (
    "cdc",
    "sinks",
    "connectors",
    "compose",
    "migrations",
    "bench",
    "docs",
    "sample",
    "tests",
)
WORDS = """
found one known before held made what wanted where there since told beside named whole written own kept other done of
left due sent asked others until new gone seen way after rest each begun old said look ended mine taken answered
further by here met again once both about upto given back at it its them they these those
"""
VAGUE = frozenset(WORDS.split())
FILE_TYPES = {"sql"}
"""Ends of files' names that are names of functions as well."""
LIMIT = 0.01
"""The largest share of vague names."""


def bindings(tree: ast.AST) -> Iterator[str]:
    """The names that code binds: parameters, variables, attributes, functions, classes; without
    underscores around.
    """
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name):
                yield name.strip("_")
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name.strip("_")
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name.strip("_")


def vague(trees: Iterator[ast.AST]) -> tuple[Counter[str], int]:
    """Count how often each vague word is a name, and count all names."""
    names = Counter(name.lower() for tree in trees for name in bindings(tree) if name)
    return Counter({name: count for name, count in names.items() if name in VAGUE}), names.total()


def test_names_say_what_a_thing_is() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    words, total = vague(ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    share = words.total() / total
    assert share < LIMIT, f"{share:.2%} of {total} names are vague: {words.most_common(15)}"


def test_planted_vague_names_are_found() -> None:
    code = """
class Held:
    def found(self, at, *, rows, **others):
        self._kept = [one for one in rows]
        for before, record in at:
            pass
        with open(rows) as (told, report):
            pass
"""
    words, total = vague(iter([ast.parse(code)]))
    assert words == Counter(
        {"held": 1, "found": 1, "at": 1, "others": 1, "kept": 1, "one": 1, "before": 1, "told": 1}
    )
    assert total == 12


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings that stand alone: of modules, classes, functions, and below names."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text


def words_of_code(tree: ast.AST) -> Iterator[str]:
    """Every word of the code but for its docstrings: names, and words in other strings."""
    prose = {id(text) for text in docstrings(tree)}
    yield from bindings(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in prose:
                yield from re.findall(r"\w+", text)


def owners(tree: ast.AST) -> Iterator[str]:
    """Every name before the dot that a module's docstrings may mean: its own, and what it uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.ClassDef(name=name):
                yield name


def is_known(name: str, known: Set[str]) -> bool:
    """Whether a name is one of these, or a package that is installed."""
    return name in known or importlib.util.find_spec(name) is not None


def lost_names(trees: Mapping[Path, ast.AST]) -> list[str]:
    """Return the names in backticks within docstrings that there aren't: constants, and functions
    of something that isn't there.
    """
    words = {word for tree in trees.values() for word in words_of_code(tree)}
    functions = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")
    } - FILE_TYPES
    parts = {part for path in trees for part in path.with_suffix("").parts}
    classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    lost = []
    for path, tree in trees.items():
        known = parts | classes | set(owners(tree))
        for span in re.findall(r"`([\w.]+)`", "\n".join(text.value for text in docstrings(tree))):  # type: ignore[misc]
            first, _, last = span.rpartition(".")
            is_lost = (
                last in functions and not is_known(first.split(".")[0], known)
                if first
                else re.fullmatch("[A-Z][A-Z_]{3,}", span) and span not in words
            )
            if is_lost:
                lost.append(f"{path}: {span}")
    return lost


def trees_of_code() -> dict[Path, ast.AST]:
    packages = ("cdc", "sinks", "connectors", "compose", "migrations", "sample", "bench")
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_names_in_docstrings_exist() -> None:
    assert lost_names(trees_of_code()) == []


def test_planted_names_that_there_are_not() -> None:
    code = '"""See `UNHEARD` and `change.load`, `table.load`, `Row.load`."""\ndef load(table): ...'
    trees: dict[Path, ast.AST] = {Path("cdc/row.py"): ast.parse(code)}
    assert lost_names(trees) == [
        "cdc/row.py: UNHEARD",
        "cdc/row.py: change.load",
        "cdc/row.py: Row.load",
    ]


def test_docstrings_have_the_words_of_the_glossary() -> None:
    texts = {
        path: "\n".join(str(text.value) for text in docstrings(tree))
        for path, tree in trees_of_code().items()
    }
    banned = [f"{path}: {word}" for path, text in texts.items() for word in pages.banned(text)]
    # Elasticsearch's own name for a limit of a disk.
    assert banned == ["sinks/elasticsearch/health.py: watermark: position, or checkpoint"]


def test_no_hint_says_what_the_style_forbids() -> None:
    """Of a sentence in quotes on the left of the table of style.md, its beginning is looked for."""
    page = (ROOT / "docs/contribute/style.md").read_text()
    forbidden = [
        text.partition(":")[0] + ":" for text in re.findall(r'^\| "([^"]+)" \|', page, re.M)
    ]
    assert "nothing to do:" in forbidden
    texts = {
        path: [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for path, tree in trees_of_code().items()
    }
    assert [
        f"{path}: {text}"
        for path, strings in texts.items()
        for text in strings
        if text.startswith(tuple(forbidden))
    ] == []
