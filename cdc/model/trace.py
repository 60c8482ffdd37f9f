"""Where a failure came from, without what it quotes: messages of libraries hold rows, addresses and passwords."""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
OURS = ("cdc", "sinks", "connectors", "compose", "migrations", "tests")
HARMLESS = (ImportError, AttributeError, NameError)
"""Their messages name what the code says, never a value."""
JAVA = re.compile(r"^(?:Caused by: )?([\w.$]+(?:Exception|Error))\b|^\s*(at [\w.$/<>]+\([\w.: ]*\))", re.MULTILINE)

FRAMES = 8
"""Of each of Java's exceptions; below are Spark's own loops."""


def trace(error: BaseException) -> str:
    """The frames of an error and of what caused it, Java's as well; of messages only those that quote nothing."""
    return "\n".join(line for link in reversed(list(_chain(error))) for line in _told(link))


def place(error: BaseException) -> str:
    """File, line and function where it happened: the deepest that is of this project, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    own = [frame for frame in frames if _own(frame.filename)]
    frame = (own or frames)[-1]
    return f"{_short(frame.filename)}:{frame.lineno} ({frame.name})"


def kind(error: BaseException) -> str:
    """The class by its whole name, and the message where that is harmless."""
    module = type(error).__module__
    name = type(error).__qualname__ if module == "builtins" else f"{module}.{type(error).__qualname__}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name} ({error.strerror})"
    return f"{name} ({error})" if isinstance(error, HARMLESS) else name


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _told(error: BaseException) -> Iterator[str]:
    yield f"{kind(error)}:"
    yield from (f"  {line}" for line in _frames(error.__traceback__))
    yield from _java(str(error))


def _java(text: str) -> Iterator[str]:
    """The classes of Java's exceptions, each with the first of its frames."""
    frames = 0
    for name, frame in JAVA.findall(text):
        frames = 0 if name else frames + 1
        if frames <= FRAMES:
            yield f"  {name or frame}"


def _frames(at: TracebackType | None) -> Iterator[str]:
    for frame in traceback.extract_tb(at):
        yield f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"


def _own(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS


def _short(filename: str) -> str:
    """From the package on: where the machine keeps it is nobody's business."""
    path = Path(filename)
    if _own(filename):
        return str(path.relative_to(ROOT))
    return str(Path(*path.parts[-2:]))
