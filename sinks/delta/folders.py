"""Folders of generations, and files in them. A warehouse is a folder of this machine."""

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cdc.sinks.delta.files.failures import reading, write_failure


def generation_names(folder: str) -> list[str]:
    """List the generations that have a folder beside the live one, the oldest first.

    Raises SinkUnavailable.
    """
    parent, _, live = folder.rpartition("/")
    names: list[str] = []
    with reading(folder), suppress(FileNotFoundError):
        names = os.listdir(parent)
    return sorted(name.removeprefix(f"{live}@") for name in names if name.startswith(f"{live}@"))


def live_folder(folder: str) -> str:
    """Return the folder of the live generation."""
    parent, _, name = folder.rpartition("/")
    return f"{parent}/{name.partition('@')[0]}"


def age_s(path: str) -> float:
    """Return how many seconds ago a file was written; 0 for one that is gone. Raises
    SinkUnavailable.
    """
    with reading(path), suppress(FileNotFoundError):
        return time.time() - Path(path).stat().st_mtime
    return 0.0


def remove_paths(paths: Iterable[str]) -> None:
    """Remove files, with the checksums that Spark puts beside them, and folders with all that they
    contain; what isn't there is passed over. Raises SinkUnavailable.
    """
    for path in map(Path, paths):
        try:
            while path.is_dir():
                # Others may remove parts of it meanwhile: then the rest is removed.
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        except OSError as error:
            raise write_failure(str(path), error) from None
