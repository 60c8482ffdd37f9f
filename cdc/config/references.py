"""Replace references in a pipeline file: `${NAME}` and `${NAME:-default}` by values of the environment,
`${file:/path}` and `${file:/path:key}` by what files hold.

In:  the file's tree, an environment. Out: the tree with references replaced; `Reference`s that
can't be.
Invariant: `$` has no other meaning, and a text that looks like a reference without being one is
never passed on. What clients log in with keeps its references to files: see `cdc.model.secrets`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdc.errors import SecretUnreadable
from cdc.model import secrets

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
OPENED = re.compile(r"\$\{[^{}]*\}?")
SECURED_VARIABLES = ("CDC_READER", "CDC_SECRETS")
"""Those of the variables below that only `cdc up --secured` sets."""
STACK_VARIABLES = (
    "CDC_POSTGRES",
    "CDC_KAFKA",
    "CDC_CONNECT",
    "CDC_ELASTICSEARCH",
    "CDC_REDIS",
    "CDC_WAREHOUSE",
    "CDC_DOCUMENTS",
    *SECURED_VARIABLES,
)
"""The variables that `cdc up` sets for a pipeline file."""
LOGINS = (
    "dsn",
    "reader",
    "password",
    "replication_password",
    "sentinel_password",
    "key_password",
    "client_secret",
    "token",
    "api_key",
)
"""Settings whose files are read at each new connection."""
OF_OWNER = (("source", "dsn"), ("source", "replication_password"))
"""Settings whose files aren't read where the file has `source.reader`: who connects as the owner reads
them.
"""
URLS = ("url", "connect", "nodes")
"""Settings of which user and password are read at each new connection."""


@dataclass(frozen=True)
class Reference:
    """A reference that can't be replaced, and the keys that lead to it.

    name: of the variable that isn't set. unreadable: why a file can't be used. Both are None if it
    isn't well-formed.
    """

    text: str
    keys: tuple[str, ...]
    name: str | None = None
    unreadable: SecretUnreadable | None = None


def replaced(tree: Any, environment: Mapping[str, str]) -> tuple[Any, list[Reference]]:
    """Return a copy of a tree with its references replaced, and those that can't be, in the order of the file."""
    unresolved: list[Reference] = []
    source = tree.get("source")
    has_reader = isinstance(source, dict) and bool(source.get("reader"))

    def copy(node: Any, keys: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            return {key: copy(value, (*keys, str(key))) for key, value in node.items()}
        if isinstance(node, list):
            return [copy(value, (*keys, str(number))) for number, value in enumerate(node)]
        return filled(node, keys) if isinstance(node, str) else node

    def filled(text: str, keys: tuple[str, ...]) -> str:
        # The path of a file may have references to the environment.
        for opening in OPENED.findall(REFERENCE.sub("-", text)):
            if not secrets.REFERENCE.fullmatch(opening):
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

        return with_files(REFERENCE.sub(value_of, text), keys)

    def with_files(text: str, keys: tuple[str, ...]) -> str:
        if has_reader and keys in OF_OWNER:
            return text
        setting = next((key for key in reversed(keys) if not key.isdecimal()), "")
        try:
            content = secrets.read(text)
            # The salt of a mask: `source_settings` refuses the reference, which it has to see.
            if setting in (*LOGINS, "hash"):
                return text
            return secrets.read_before_login(text) if setting in URLS else content
        except SecretUnreadable as error:
            unresolved.append(Reference(error.details["reference"], keys, unreadable=error))
            return text

    return copy(tree, ()), unresolved
