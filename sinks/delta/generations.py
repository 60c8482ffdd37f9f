"""Generations of a mirror: the live one is the table itself, others lie in <folder>@<generation>.

A switch is one commit of the live table: its files out, the other generation's in. These are
linked into the live table's folder before; a bucket has no links, so there they are copied. Of two
processes that commit at the same time one fails. The previous generation is retained as a table of
the files of the version before, linked likewise. So each generation can be read, moved and removed
by itself.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cdc.model.generation import new_generation
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.promotion import wait_until_caught_up, would_go_back
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    Action,
    FileNames,
    LastCommit,
    TableLog,
    TableState,
    creation,
    extension,
    removal_of_all,
)
from cdc.sinks.delta.place import CommitConflict, FileMissing, locate, place
from cdc.sinks.delta.vectors import moved, vector_path

if TYPE_CHECKING:
    from cdc.sinks.delta.sink import Delta

SWITCH = {"cdc": "SWITCH"}
"""How a table's history shows a switch."""


def promote(views: "Delta", tables: Sequence[Table], names: Mapping[str, str]) -> dict[str, str]:
    """Make generations live in one commit a view; returns the names of the previous ones by table.

    None is switched before each can be: half of them would show another generation than the rest.
    The previous ones are retained after all of the commits.
    """
    retained = {}
    logs = {
        table: (views.logs[live], views.logs[f"{live}@{names[table.qualified]}"])
        for table in tables
        for live in [views.folder(table, "mirror")]
    }
    pending = [table for table in tables if not is_live(*logs[table])]
    lagging = list(pending)

    def is_caught_up() -> bool:
        lagging[:] = [table for table in lagging if not can_switch(*logs[table])]
        return not lagging

    wait_until_caught_up(is_caught_up, views.name, lagging)
    for table in tables:
        views.repair_changes(table)
        if table in pending:
            marks = views.may_have_marks(table)
            attempt = partial(switch, *logs[table], {}, may_have_marks=marks)
            wait_until_caught_up(attempt, views.name, [table])
    for table in tables:
        name = new_generation()
        if retain_previous(logs[table][0], name):
            retained[table.qualified] = name
    return retained


def is_live(live: TableLog, generation: TableLog) -> bool:
    """Whether readers see this generation."""
    checkpoint = live.last_commit().checkpoint
    return checkpoint is not None and checkpoint.generation == _name(generation)


def can_switch(live: TableLog, generation: TableLog) -> bool:
    """Whether there is such a generation, and readers who are shown it don't go back."""
    commit = generation.last_commit()
    exists = generation.state is not None
    return exists and not commit.trouble and not lags(commit, live.last_commit())


def switch(
    live: TableLog, generation: TableLog, shared: dict[str, str], *, may_have_marks: bool
) -> bool:
    """Commit the files of `generation` as the live table's; return whether it was done.

    It isn't done while the live table is ahead, or when somebody else commits to it meanwhile.

    shared: what earlier attempts have shared, see `share_files`.
    may_have_marks: whether readers of the live table support deletion vectors. If not, they needn't any
    more, unless the generation has some.
    """
    source_commit = generation.last_commit()
    source = generation.state
    if source is None or source_commit.trouble:
        return False
    # A source without records has no position, and a view of it can't be behind. The name is the
    # folder's: a retained generation has its former one until a batch reaches it.
    checkpoint = replace(source_commit.checkpoint or CLEARED, generation=_name(generation))
    if live.refresh() is None:
        clone(source, generation.place.location, live.place.location, checkpoint)
        return True
    # Before the live table is read: to copy files takes longer than the live stream waits between commits.
    added = share_files(source, generation.place.location, live.place.location, shared)
    live_commit = live.last_commit()
    state = live.state
    if state is None or lags(source_commit, live_commit):
        return False
    dropped = [] if may_have_marks or source.has_marks else [DELETION_VECTORS]
    shape = extension(state, source.columns, _features(source), replaced=True, dropped=dropped)
    changes = [*shape, *removal_of_all(state), *added]
    try:
        live.commit(state.identity, changes, "WRITE", checkpoint, SWITCH)
    except CommitConflict:
        return False
    return True


def lags(generation: LastCommit, live: LastCommit) -> bool:
    """Whether readers who are shown `generation` instead of `live` would go back in time."""
    if live.checkpoint is None or live.trouble:
        return False
    return would_go_back(generation.checkpoint, live.checkpoint)


def retain_previous(live: TableLog, name: str) -> bool:
    """Create a generation of this name of what the live table was before its last switch.

    Returns false when there was nothing before, or its files have been removed.
    """
    live.refresh()
    history = live.history()
    switches = (commit["version"] for commit in history if commit.get("cdc") == SWITCH["cdc"])
    version = next(switches, 0) - 1
    source = live.state_at(version) if version >= 0 else None
    # The iterator goes on below the switch.
    last_commit = live.standing(history)
    if source is None or last_commit is None or not last_commit.checkpoint or last_commit.trouble:
        return False
    folder = live.place.location
    try:
        clone(source, folder, f"{folder}@{name}", last_commit.checkpoint)
    except FileMissing:
        # A process that was killed after the switch goes on whenever somebody starts it again. That
        # may be later than the clean-up of the files that the switch has replaced.
        place(f"{folder}@{name}").remove_all()
        return False
    return True


def clone(source: TableState, folder: str, target: str, checkpoint: ViewCheckpoint) -> None:
    """Create a table of the files that the table in `folder` has in a version.

    Raises FileMissing, SinkUnavailable.
    """
    place(target).remove_all()
    created = creation(source.columns, _features(source))
    changes = [*created, *share_files(source, folder, target, {})]
    TableLog(target).commit(NO_TABLE, changes, "CREATE TABLE", checkpoint)


def share_files(
    source: TableState, folder: str, target: str, names: dict[str, str]
) -> list[Action]:
    """Share the files of the table in `folder`, and their deletion vectors, with the place `target`.
    Returns the actions that add them there.

    names: of the files that `target` has of earlier calls, by their paths; the others are added.

    Raises FileMissing, SinkUnavailable: see `Place.share`.
    """
    now = int(time.time() * 1000)
    shared = []
    for path, file in source.files.items():
        if path not in names:
            # A new name, because one commit can't remove and add the same.
            name = FileNames().generate()
            place(target).share(locate(folder, path), name)
            names[path] = name
        action = {**file, "path": names[path], "modificationTime": now, "dataChange": True}
        if descriptor := file.get("deletionVector"):
            vector = vector_path(descriptor)
            if vector and vector not in names:
                names[vector] = vector.rpartition("/")[2]
                place(target).share(locate(folder, vector), names[vector])
            action["deletionVector"] = moved(descriptor)
        shared.append({"add": action})
    return shared


def generation_names(live: str) -> list[str]:
    """List the generations that have a folder beside the live one, the oldest first.

    Raises SinkUnavailable.
    """
    parent, _, name = live.rpartition("/")
    folders = place(parent).folders()
    return sorted(
        folder.removeprefix(f"{name}@") for folder in folders if folder.startswith(f"{name}@")
    )


def _name(generation: TableLog) -> str:
    return generation.place.location.rpartition("@")[2]


def _features(state: TableState) -> set[str]:
    """Name the feature of deletion vectors where a table may have some."""
    return {DELETION_VECTORS} & state.reader_features
