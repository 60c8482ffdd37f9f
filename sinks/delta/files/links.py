"""Files of one Delta table that another has as well: linked, which takes no data; copied where links can't be.

Each of the two names them within its own folder, which is what all readers understand, and what may be moved; each
loses them by itself.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote
from uuid import uuid4

from cdc.errors import SinkRejected
from sinks.delta.files.failures import unwritable

URI = re.compile(r"[a-z0-9]+:/")


class Lost(SinkRejected):
    """A file that a table names isn't there."""


def absolute(path: str) -> bool:
    return path.startswith("/") or URI.match(path) is not None


def share(source: str, path: str, target: str) -> str:
    """Put a file that the log of `source` names, in whatever way, into `target` as well: under a name of its own.

    A new one, because a commit can't take a file out and put it in. Raises Lost, SinkUnavailable.
    """
    name = new_name()
    share_as(place(source, path), f"{target}/{name}", target)
    return name


def share_as(source: str, there: str, target: str) -> None:
    """The same, under this name; nothing when that is there. Raises Lost, SinkUnavailable."""
    try:
        Path(there).parent.mkdir(parents=True, exist_ok=True)
        # A VACUUM of somebody else removes what is old and in no commit, as it is until the next one.
        with suppress(PermissionError):
            os.utime(source)
        _put(source, there)
    except FileNotFoundError:
        raise Lost(
            f"The Delta table {target} can't be given the file {source}: it isn't there any more.",
            hint=f"make the view again: cdc -p FILE rebuild SINK --table {Path(target).parent.name}",
        ) from None
    except OSError as error:
        raise unwritable(target, error) from None


def new_name() -> str:
    return f"part-{uuid4()}.parquet"


def can_link(folder: str) -> bool:
    """Whether the folder's file system has links."""
    with TemporaryDirectory(dir=folder) as tried:
        one = Path(tried, "one")
        one.touch()
        try:
            os.link(one, Path(tried, "other"))
        except OSError:
            return False
    return True


def place(folder: str, path: str) -> str:
    """Where a file lies, as the operating system has it."""
    return unquote(re.sub("^file:/+", "/", path)) if absolute(path) else f"{folder}/{unquote(path)}"


def _put(source: str, there: str) -> None:
    try:
        os.link(source, there)
    except FileExistsError:
        with suppress(PermissionError):
            os.utime(there)
    except FileNotFoundError:
        raise
    except OSError:
        # Under a name that is tidied, so that half a file is never taken for the whole.
        half = Path(there).parent / new_name()
        shutil.copyfile(source, half)
        half.replace(there)
