"""Show where a failure came from without its message: libraries quote rows and passwords
in theirs.
"""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
PACKAGES = ("cdc", "tests")
HARMLESS = (ImportError, AttributeError, NameError)
"""Errors whose messages quote names of the code, never a value."""
JAVA = re.compile(
    r"^(?:Caused by: )?([\w.$]+(?:Exception|Error))\b|^\s*(at [\w.$/<>]+\([\w.: ]*\))", re.MULTILINE
)

FRAMES = 8
"""Frames shown of each Java exception; those below are Spark's own loops."""


def trace(error: BaseException) -> str:
    """The frames of an error and of its causes, Java's included. Messages only if they quote no
    value.
    """
    return "\n".join(line for link in reversed(list(_chain(error))) for line in _describe(link))


def place(error: BaseException) -> str:
    """File, line and function of a failure: the deepest frame of this project if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    project_frames = [frame for frame in frames if _is_project_file(frame.filename)]
    frame = (project_frames or frames)[-1]
    return f"{_short(frame.filename)}:{frame.lineno} ({frame.name})"


def kind(error: BaseException) -> str:
    """The qualified class of an error, and its message if that quotes no value."""
    module = type(error).__module__
    name = (
        type(error).__qualname__ if module == "builtins" else f"{module}.{type(error).__qualname__}"
    )
    if isinstance(error, OSError) and error.strerror:
        return f"{name} ({error.strerror})"
    return f"{name} ({error})" if isinstance(error, HARMLESS) else name


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _describe(error: BaseException) -> Iterator[str]:
    yield f"{kind(error)}:"
    yield from (f"  {line}" for line in _frames(error.__traceback__))
    yield from _java(str(error))


def _java(text: str) -> Iterator[str]:
    """The classes of Java's exceptions in a text, each with its first frames."""
    frames = 0
    for name, frame in JAVA.findall(text):
        frames = 0 if name else frames + 1
        if frames <= FRAMES:
            yield f"  {name or frame}"


def _frames(chain: TracebackType | None) -> Iterator[str]:
    for frame in traceback.extract_tb(chain):
        yield f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"


def _is_project_file(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


def _short(filename: str) -> str:
    """The path from the package on, which says nothing about the machine."""
    path = Path(filename)
    if _is_project_file(filename):
        return str(path.relative_to(ROOT))
    return str(Path(*path.parts[-2:]))
