"""reference/python-api.md: what an application calls, as `cdc.client` has it."""

import inspect
import re
from collections.abc import Iterator

from cdc import client

HEAD = """\
# The Python interface

An application calls these functions to [read its own writes](../use/read-your-writes.md), and to find the rows of a
[cache on a cluster](../start/own-kafka-and-connect.md#a-cache-on-a-cluster): `from cdc import client`.
Errors are classes of `cdc.errors` ([exit codes](../operate/exit-codes.md) lists them). `python -m docs.generate` makes
this page from the code, and a test compares the two.
"""
PUBLIC = (
    client.view,
    client.token,
    client.wait_for,
    client.proved_through,
    client.key_prefix,
    client.View.close,
)


def page() -> str:
    """Return the whole text."""
    return HEAD + "".join(f"\n{part}\n" for part in _parts())


def _parts() -> Iterator[str]:
    for function in PUBLIC:
        name = function.__qualname__
        yield f"## {name}"
        yield f"```python\n{name}{_signature(function)}\n```"
        if text := inspect.getdoc(function):
            yield text.replace("Raises:\n    ", "Raises: ").replace("\n    ", "\n")


def _signature(function: object) -> str:
    assert callable(function)
    signature = str(inspect.signature(function)).replace(
        "psycopg.Connection[Any]", "psycopg.Connection"
    )
    return re.sub(r"\b(pathlib|cdc\.[a-z_.]+)\.(?=[A-Z])", "", signature.replace("'", ""))
