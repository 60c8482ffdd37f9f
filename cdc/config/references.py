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


class References:
    """Replaces references; collects in `unresolved` what it can't replace, in the order of the file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.unresolved: list[Reference] = []

    def replace_in(self, node: Any, keys: tuple[str, ...] = ()) -> Any:
        if isinstance(node, dict):
            return {key: self.replace_in(value, (*keys, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [
                self.replace_in(value, (*keys, str(number))) for number, value in enumerate(node)
            ]
        return self._text(node, keys) if isinstance(node, str) else node

    def _text(self, text: str, keys: tuple[str, ...]) -> str:
        malformed = [
            match[0] for match in OPENED.finditer(text) if not REFERENCE.fullmatch(match[0])
        ]
        self.unresolved += [Reference(_shown(opening), keys) for opening in malformed]

        def replace(match: re.Match[str]) -> str:
            name, default = match.groups()
            # As in a shell, the default also replaces an empty value.
            value = self._environment.get(name) or default
            if value is None and name not in self._environment:
                self.unresolved.append(Reference(match[0], keys, name))
            return value or ""

        return REFERENCE.sub(replace, text)


def _shown(text: str) -> str:
    """The beginning of a reference: a secret may stand behind it."""
    name = re.match(r"\$\{[A-Za-z_][A-Za-z0-9_]*", text)
    return f"{name[0]}..." if name else "${...}"
