"""`${NAME}` and `${NAME:-default}` in a pipeline file: values that are the environment's.

In:  the file's tree, an environment. Out: the tree with all of them replaced; `Reference`s that can't be.
Invariant: nothing else has a meaning after `$`, and what looks like a reference and isn't one is never passed on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
OPENED = re.compile(r"\$\{[^{}]*\}?")
STACK_VARIABLES = ("CDC_POSTGRES", "CDC_KAFKA", "CDC_CONNECT", "CDC_ELASTICSEARCH", "CDC_REDIS", "CDC_WAREHOUSE")
"""What `cdc up` sets for a pipeline file."""


@dataclass(frozen=True)
class Reference:
    """One that can't be replaced, and where it is; `name` is None where it has none that could be looked up."""

    text: str
    where: tuple[str, ...]
    name: str | None = None


class References:
    """Replaces references; what can't be replaced is collected in `unresolved`, in the order of the file."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self.unresolved: list[Reference] = []

    def replace_in(self, node: Any, where: tuple[str, ...] = ()) -> Any:
        if isinstance(node, dict):
            return {key: self.replace_in(value, (*where, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [self.replace_in(value, (*where, str(number))) for number, value in enumerate(node)]
        return self._text(node, where) if isinstance(node, str) else node

    def _text(self, text: str, where: tuple[str, ...]) -> str:
        bad = [match[0] for match in OPENED.finditer(text) if not REFERENCE.fullmatch(match[0])]
        self.unresolved += [Reference(_shown(opened), where) for opened in bad]

        def replace(match: re.Match[str]) -> str:
            name, default = match.groups()
            # As in a shell: what is empty has its default, too.
            value = self._known.get(name) or default
            if value is None and name not in self._known:
                self.unresolved.append(Reference(match[0], where, name))
            return value or ""

        return REFERENCE.sub(replace, text)


def _shown(text: str) -> str:
    """What it begins with: behind that may be anything."""
    name = re.match(r"\$\{[A-Za-z_][A-Za-z0-9_]*", text)
    return f"{name[0]}..." if name else "${...}"
