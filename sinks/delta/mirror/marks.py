"""The actions of a batch's commit to a mirror: new files are added, superseded rows are marked in theirs.

Where readers don't support deletion vectors, files that have superseded rows are written again instead,
without these rows (`rewrite`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc.sinks.delta.files import parquet
from cdc.sinks.delta.files.failures import reading
from cdc.sinks.delta.files.parquet import DataFile, FileNames
from cdc.sinks.delta.log import vectors
from cdc.sinks.delta.log.actions import addition
from cdc.sinks.delta.log.table_log import Action, File, TableState, removal
from cdc.sinks.delta.place import Place, locate

if TYPE_CHECKING:
    from pyroaring import BitMap64


def marked_rows(place: Place, file: File, superseded: bytes | None) -> "BitMap64":
    """Add up a file's rows that are marked already, and those that a batch supersedes.

    superseded: a bitmap of their numbers; None for none. Raises SinkUnavailable.
    """
    rows = vectors.bitmap(superseded)
    if descriptor := file.get("deletionVector"):
        rows |= vectors.deleted_rows(descriptor, place.read_range)
    return rows


def row_count(place: Place, file: File) -> int:
    """Return the number of rows that a file has, marked ones among them. Raises SinkUnavailable."""
    stats = json.loads(file.get("stats", "{}"))
    if "numRecords" in stats:
        count: int = stats["numRecords"]
        return count
    # Others may write files, or a checkpoint, without statistics.
    with reading(place.location):
        return parquet.row_count(locate(place.location, file["path"]))


def mark(
    place: Place,
    state: TableState,
    rows: Sequence[DataFile],
    superseded: Mapping[str, bytes],
    names: FileNames,
) -> list[Action]:
    """Make the actions that bring a batch's rows. Writes their deletion vectors, which are in no commit
    yet.

    rows: files that are written, in no commit yet. superseded: by path of a file, these among them, the
    bitmap of its superseded rows.

    Raises SinkUnavailable: the place can't be read or written.
    """
    vector_file = vectors.VectorFile(names.generate_id())
    actions: list[Action] = []
    for path, file in state.files.items():
        if path not in superseded:
            continue
        marked = marked_rows(place, file, superseded[path])
        # Rows that were marked before are found again.
        if len(marked) > file.get("deletionVector", {}).get("cardinality", 0):
            actions.append(removal(file))
            actions += _with_marks(place, file, marked, vector_file)
    for staged in rows:
        action = addition(staged)
        if staged.name in superseded:
            file = action["add"]
            marked = vectors.bitmap(superseded[staged.name])
            actions += _with_marks(place, file, marked, vector_file)
        else:
            actions.append(action)
    if vector_file.data:
        place.write(vector_file.name, vector_file.data)
    return actions


def _with_marks(
    place: Place, file: File, marked: "BitMap64", vector_file: vectors.VectorFile
) -> list[dict[str, Any]]:
    """Make the action that adds a file with marks; none where all of its rows are marked."""
    count = row_count(place, file)
    if len(marked) >= count:
        return []
    # Bounds may be those of marked rows.
    stats = json.loads(file.get("stats", "{}")) | {"numRecords": count, "tightBounds": False}
    changed = {
        "dataChange": True,
        "stats": json.dumps(stats),
        "deletionVector": vector_file.add(marked),
    }
    return [{"add": {**file, **changed}}]
