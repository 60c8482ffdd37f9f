"""Links: two Delta tables share a file without a copy of its data.

A generation takes over files of another one by a hard link. Where the file system has no links the
file is copied. Each table names the file within its own folder. All readers understand that, the
folder may be moved, and each table loses the file by itself.
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
from cdc.sinks.delta.files.failures import write_failure

URI = re.compile(r"[a-z0-9]+:/")


class FileMissing(SinkRejected):
    """A file that a table's log names doesn't exist."""


def is_absolute(path: str) -> bool:
    """Tell whether a path is absolute or a URI, and so not within the table's folder."""
    return path.startswith("/") or URI.match(path) is not None


def share(source: str, path: str, target: str) -> str:
    """Put a file of the table in `source` into the folder `target` too, and return its name there.

    path: as the log of `source` names it, relative or not. The name is a new one, because one
    commit can't remove and add the same name. Raises FileMissing, SinkUnavailable.
    """
    name = new_file_name()
    share_as(local_path(source, path), f"{target}/{name}", target)
    return name


def share_as(source: str, destination: str, target: str) -> None:
    """Link a file under a given path; nothing happens when that path exists.

    Raises FileMissing, SinkUnavailable.
    """
    try:
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        # A VACUUM of somebody else removes files that are old and in no commit. This one is in no
        # commit of `target` yet: a new time stamp protects it.
        with suppress(PermissionError):
            os.utime(source)
        _link(source, destination)
    except FileNotFoundError:
        raise FileMissing(
            f"The Delta table {target} can't be given the file {source}: it isn't there any more.",
            hint=f"make the view again: cdc -p FILE rebuild SINK --table {Path(target).parent.name}",
        ) from None
    except OSError as error:
        raise write_failure(target, error) from None


def new_file_name() -> str:
    """Make a name for a Parquet file that no other file has."""
    return f"part-{uuid4()}.parquet"


def can_link(folder: str) -> bool:
    """Tell whether the file system of a folder has hard links; a link is tried out for that."""
    with TemporaryDirectory(dir=folder) as trial:
        source = Path(trial, "one")
        source.touch()
        try:
            os.link(source, Path(trial, "other"))
        except OSError:
            return False
    return True


def local_path(folder: str, path: str) -> str:
    """Translate a path of a table's log into one for the operating system."""
    if is_absolute(path):
        return unquote(re.sub("^file:/+", "/", path))
    return f"{folder}/{unquote(path)}"


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except FileExistsError:
        with suppress(PermissionError):
            os.utime(destination)
    except FileNotFoundError:
        raise
    except OSError:
        # The copy gets a name that the clean-up removes, so that a partial file never passes for
        # the complete one.
        partial_copy = Path(destination).parent / new_file_name()
        shutil.copyfile(source, partial_copy)
        partial_copy.replace(destination)
