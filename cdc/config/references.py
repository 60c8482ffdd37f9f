"""Replace `${NAME}` and `${NAME:-default}` in a pipeline file by values of the environment.

In:  the file's tree, an environment. Out: the tree with references replaced; `Reference`s that
can't be.
Invariant: `$` has no other meaning, and a text that looks like a reference without being one is
never passed on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
OPENED = re.compile(r"\$\{[^{}]*\}?")
STACK_VARIABLES = (
    "CDC_POSTGRES",
    "CDC_KAFKA",
    "CDC_CONNECT",
    "CDC_ELASTICSEARCH",
    "CDC_REDIS",
    "CDC_WAREHOUSE",
    "CDC_DOCUMENTS",
)
"""The variables that `cdc up` sets for a pipeline file."""


@dataclass(frozen=True)
class Reference:
    """A reference that can't be replaced, and the keys that lead to it. name: None if it isn't well-formed."""

    text: str
    keys: tuple[str, ...]
    name: str | None = None


def replaced(tree: Any, environment: Mapping[str, str]) -> tuple[Any, list[Reference]]:
    """Return a copy of a tree with its references replaced, and those that can't be, in the order of the file."""
    unresolved: list[Reference] = []

    def copy(node: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            return {key: copy(value, (*keys, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [copy(value, (*keys, str(number))) for number, value in enumerate(node)]
        return filled(node, keys) if isinstance(node, str) else node

    def filled(text: str, keys: tuple[str, ...]) -> str:
        for opening in OPENED.findall(text):
            if not REFERENCE.fullmatch(opening):
                # Its beginning alone: a secret may stand behind it.
                name = re.match(r"\$\{[A-Za-z_][A-Za-z0-9_]*", opening)
                unresolved.append(Reference(f"{name[0]}..." if name else "${...}", keys))

        def value_of(match: re.Match[str]) -> str:
            name, default = match.groups()
            # As in a shell, the default also replaces an empty value.
            value = environment.get(name) or default
            if value is None and name not in environment:
                unresolved.append(Reference(match[0], keys, name))
            return value or ""

        return REFERENCE.sub(value_of, text)

    return copy(tree, ()), unresolved
