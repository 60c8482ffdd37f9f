"""Health of the warehouse: whether its folder can be written, and has room."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cdc.model.finding import Finding, find

LEAST_FREE = 0.1


@dataclass(frozen=True)
class WarehouseFacts:
    """What was read of the warehouse's folder, or of the first folder above it that exists."""

    folder: str
    writable: bool
    free_share: float


def read_folder(path: str) -> WarehouseFacts:
    """Read the facts."""
    location = Path(path).absolute()
    folder = next(parent for parent in (location, *location.parents) if parent.exists())
    usage = shutil.disk_usage(folder)
    writable = os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
    return WarehouseFacts(str(folder), writable, usage.free / usage.total)


def check_folder(sink: str, facts: WarehouseFacts) -> Iterator[Finding]:
    """Judge the folder. Pure."""
    if not facts.writable:
        message = f"{sink}: {facts.folder} can't be written by this user."
        fix = f"ls -ld {facts.folder}"
        yield find("sink-unfit/folder", facts.folder, message, fix, sink=sink)
    if facts.free_share < LEAST_FREE:
        message = f"{sink}: {facts.free_share:.0%} of the disk of {facts.folder} is free."
        fix = f"df -h {facts.folder}"
        yield find("disk-low/warehouse", facts.folder, message, fix, sink=sink)
