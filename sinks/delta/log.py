"""The log of a Delta table: what the table is by its newest version, commits on top of it, and which
position of ours is true of its rows.

In:  the place of a table's folder. Out: `TableState`; commits, each by a file that didn't exist before.
Invariant: of two commits on top of one version one succeeds, whoever makes the other. A table with a
feature that isn't known here is refused by name, before anything is read or written by its rules.

Delta's protocol (PROTOCOL.md) says what actions mean. A state is kept in memory, and brought up to date
by looking for the next version: none is the rule.

Above our last commit others may have committed. They may rearrange files and set properties. RESTORE
leads back to what the version that it names says. Whoever else changes rows makes our checkpoint untrue:
that is reported, and nothing is built on it.
"""

import io
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

from cdc.errors import SinkRejected
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.delta import positions
from cdc.sinks.delta.columns import merged, reader_features
from cdc.sinks.delta.place import CommitConflict, place
from cdc.sinks.delta.vectors import vector_id

FOLDER = "_delta_log"
COMMIT = re.compile(rf"^{FOLDER}/(\d{{20}})\.json$")
CHECKPOINT = re.compile(
    rf"^{FOLDER}/(\d{{20}})\.checkpoint(\.\d{{10}}\.(?P<parts>\d{{10}})|\.[^.]+)?\.(parquet|json)$"
)
READER_FEATURES = frozenset(
    # deltalake adds the one of variants with whatever property it sets; we have no such columns.
    {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType"}
)
WRITER_FEATURES = READER_FEATURES | {
    "appendOnly",
    "checkpointProtection",
    "domainMetadata",
    "inCommitTimestamp",
    "invariants",
}
READER_VERSIONS = (1, 3)
WRITER_VERSIONS = (1, 2, 7)
"""Of the protocol. Others mean features without naming them: column mapping, constraints."""
ADD_FIELDS = (
    "path",
    "partitionValues",
    "size",
    "modificationTime",
    "dataChange",
    "stats",
    "tags",
    "deletionVector",
)
"""What an `add` of a commit has; one of a checkpoint has more, such as parsed statistics."""
Action = dict[str, Any]
"""A line of a commit: one of add, remove, txn, metaData, protocol, commitInfo, with what it has."""
Identity = tuple[int, str]
"""A version of a table, and the table's id."""
NO_TABLE: Identity = (-1, "")
File = Mapping[str, Any]
"""A file of a table, or one that is in no commit yet: what its `add` action has."""
DELETION_VECTORS = "deletionVectors"
"""The feature that readers must support of a table whose rows may be marked as deleted."""
PROPERTY = "delta.enableDeletionVectors"
LEGACY = ("appendOnly", "invariants")
"""Features that a table has without naming them, until it names any."""
RESTORE = "RESTORE"
CLEARED = ViewCheckpoint(Position("", ()))
"""The checkpoint of a commit that has emptied a table: the view has no position."""
Commit = Mapping[str, Any]
"""A commit of a table: version, operation, operationParameters, userMetadata."""
SEARCHED_VERSIONS = 50
"""Each takes some milliseconds, in which the stream waits."""


class FileNames:
    """Names for the files of one batch: each is new, and all have a part in common.

    By it the files of a batch that failed are found.
    """

    def __init__(self) -> None:
        self.common = str(uuid4())[:-12]

    def generate(self) -> str:
        return f"part-{self.generate_id()}.parquet"

    def generate_id(self) -> UUID:
        """Make the next id, of a file of deletion vectors. Our clean-up knows names with a UUID."""
        return UUID(self.common + secrets.token_hex(6))


@dataclass(frozen=True)
class LastCommit:
    """Our last commit in a table.

    trouble: why its checkpoint isn't true of the table's rows; empty when it is.
    """

    checkpoint: ViewCheckpoint | None
    trouble: str = ""


@dataclass
class TableState:
    """A table in one of its versions.

    files         by path
    transactions  by application, the number of its last `txn`
    info          the `commitInfo` of the last commit; empty where only a checkpoint was read
    """

    version: int = -1
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    timestamp: int = 0
    """Of the last commit, in milliseconds, where the table has in-commit time stamps."""

    @property
    def identity(self) -> Identity:
        """By it a version differs from all others, also of a table that was made again. Where there is no
        table yet: NO_TABLE.
        """
        return self.version, self.metadata.get("id", "")

    @property
    def columns(self) -> Any:
        """The table's columns, as Delta's JSON has a struct."""
        return json.loads(self.metadata["schemaString"])

    @property
    def reader_features(self) -> frozenset[str]:
        """The features that the table demands of its readers."""
        return frozenset(self.protocol.get("readerFeatures") or ())

    @property
    def properties(self) -> Mapping[str, str]:
        """The table's properties: delta.enableDeletionVectors and the like."""
        properties: Mapping[str, str] = self.metadata.get("configuration") or {}
        return properties

    @property
    def size_bytes(self) -> int:
        return sum(file["size"] for file in self.files.values())

    @property
    def has_marks(self) -> bool:
        """Whether some rows in the table's files are marked as deleted (deletion vectors)."""
        return any(self.content.values())

    @property
    def content(self) -> Mapping[str, object]:
        """The table's files by path, with their deletion vectors."""
        return {path: file.get("deletionVector") for path, file in self.files.items()}

    def after(self, actions: Sequence[Action]) -> "TableState":
        """Make the state of the next version. This one stays what it is, for whoever works with it."""
        state = replace(self, files=dict(self.files), transactions=dict(self.transactions))
        state.apply(self.version + 1, actions)
        return state

    def apply(self, version: int, actions: Sequence[Action]) -> None:
        self.info = {}
        for remove in (action["remove"] for action in actions if "remove" in action):
            present = self.files.get(remove["path"])
            # A file that gets other marks is removed with the former ones and added with these.
            if present and vector_id(present) == vector_id(remove):
                del self.files[remove["path"]]
        for action in actions:
            if add := action.get("add"):
                self.files[add["path"]] = add
            elif transaction := action.get("txn"):
                self.transactions[transaction["appId"]] = transaction["version"]
            elif metadata := action.get("metaData"):
                self.metadata = metadata
            elif protocol := action.get("protocol"):
                self.protocol = protocol
            elif info := action.get("commitInfo"):
                self.info = info
                self.timestamp = info.get("inCommitTimestamp", self.timestamp)
        self.version = version


class TableLog:
    """The log of the table in a folder. One thread at a time uses it."""

    def __init__(self, folder: str) -> None:
        self.place = place(folder)
        self.state: TableState | None = None
        """As of the last `refresh` or `commit`; None while there is no table."""
        self.checkpoint_version = -1
        """The version of the newest checkpoint."""
        self._newest = b""

    def refresh(self) -> TableState | None:
        """Read what was committed since. Returns None where there is no table.

        Raises:
            SinkUnavailable: the place can't be read. SinkRejected: the log lacks a version, or has a
                feature that isn't known.
        """
        # A log that was removed, or removed and made again, has another commit there, or none.
        if self.state and self.place.read(commit_path(self.state.version)) != self._newest:
            self.state = None
        if self.state is None:
            self.state = self._load()
        while self.state and (data := self.place.read(commit_path(self.state.version + 1))):
            self.state = self.state.after(_parse(data))
            self._newest = data
        if self.state:
            _require_known(self.state.protocol)
        return self.state

    def state_at(self, version: int) -> TableState | None:
        """Read the table as it was in a version; None where the log doesn't reach back so far.

        Raises as `refresh` does.
        """
        state = TableLog(self.place.location)._load(version)
        if state:
            _require_known(state.protocol)
        return state

    def history(self) -> Iterator[Mapping[str, Any]]:
        """Iterate over the commits, the newest first, as far as their files exist: each one's
        `commitInfo` with its `version`. Of our last one a checkpoint keeps the position.
        """
        state = self.state
        if state is None:
            return
        if state.info:
            yield {**state.info, "version": state.version}
        for version in range(state.version - bool(state.info), -1, -1):
            actions = self.read(version)
            if actions is None:
                kept = positions.from_transactions(state.transactions)
                if kept and state.transactions[positions.APPLICATION] == version:
                    yield {"version": version, "userMetadata": kept.to_json()}
                return
            infos = (action["commitInfo"] for action in actions if "commitInfo" in action)
            yield {**next(infos, {}), "version": version}

    def read(self, version: int) -> list[Action] | None:
        """Read the actions of a commit; None where its file doesn't exist, yet or any more."""
        data = self.place.read(commit_path(version))
        return None if data is None else _parse(data)

    def changed_rows(self, version: int) -> bool:
        """Whether a commit added or removed rows, and didn't only arrange them in other files. One
        whose file doesn't exist any more may have.
        """
        actions = self.read(version)
        if actions is None:
            return True
        files = (action[kind] for action in actions for kind in ("add", "remove") if kind in action)
        return any(file.get("dataChange", True) for file in files)

    def last_commit(self) -> LastCommit:
        """Find our last commit; commits of others may be above it. Raises as `refresh` does."""
        if self.refresh() is None:
            return LastCommit(None)
        lost = LastCommit(None, "its log has lost the commit that held its position")
        found = self.standing(self.history()) or lost
        if not found.trouble:
            return found
        folder = self.place.location
        return replace(
            found, trouble=f"The Delta table {folder} can't be gone on with: {found.trouble}."
        )

    def standing(self, commits: Iterable[Commit]) -> LastCommit | None:
        """Find our last commit among some commits; see `standing`."""
        return standing(commits, self.changed_rows, self._restored_version)

    def _restored_version(self, version: int) -> int | None:
        """Find the newest version below one that has the same files with the same marks; None where it is
        further back than SEARCHED_VERSIONS, or than the log.
        """
        restored = self.state_at(version)
        for earlier in range(version - 1, max(version - SEARCHED_VERSIONS, 0) - 1, -1):
            candidate = self.state_at(earlier)
            if candidate is None or restored is None:
                return None
            if candidate.content == restored.content:
                return earlier
        return None

    def commit(
        self,
        identity: Identity,
        actions: Sequence[Action],
        operation: str,
        checkpoint: ViewCheckpoint | None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Commit on top of a version.

        identity: of the table when the actions were made; NO_TABLE where there was none.
        checkpoint: that the commit leads to; None for a commit that says nothing of our position.
        properties: others of the commit's information, by name.

        Raises:
            CommitConflict: there is a newer version. SinkUnavailable: the place can't be written.
        """
        state = self.refresh() or TableState()
        if state.identity != identity:
            raise CommitConflict
        version = state.version + 1
        now = int(time.time() * 1000)
        info: Action = {
            "timestamp": now,
            "operation": operation,
            "operationParameters": {},
            "engineInfo": "cdc",
            # By it a commit is recognised whose answer was lost.
            "txnId": str(uuid4()),
            **(properties or {}),
        }
        if state.properties.get("delta.enableInCommitTimestamps") == "true":
            info = {"inCommitTimestamp": max(now, state.timestamp + 1), **info}
        listed = [{"commitInfo": info}, *actions]
        if checkpoint is not None:
            info["userMetadata"] = checkpoint.to_json()
            numbers = positions.to_transactions(checkpoint, version)
            listed += [
                {"txn": {"appId": name, "version": number, "lastUpdated": now}}
                for name, number in numbers.items()
            ]
        data = b"".join(
            json.dumps(action, separators=(",", ":")).encode() + b"\n" for action in listed
        )
        is_written = self.place.write_new(commit_path(version), data)
        if not is_written and self.place.read(commit_path(version)) != data:
            raise CommitConflict
        self.state = state.after(listed)
        self._newest = data

    def _load(self, wanted: int | None = None) -> TableState | None:
        """Read the table in its newest version, or in another one; None where there is none."""
        newest = -1
        checkpoints: dict[int, list[str]] = {}
        for file in self.place.files(FOLDER):
            if match := COMMIT.match(file.path):
                newest = max(newest, int(match[1]))
            elif (match := CHECKPOINT.match(file.path)) and file.size:
                checkpoints.setdefault(int(match[1]), []).append(file.path)
        complete = [
            version
            for version, paths in checkpoints.items()
            if _is_complete(paths) and (wanted is None or version <= wanted)
        ]
        self.checkpoint_version = max(complete, default=-1)
        if newest < 0 and not complete:
            return None
        state = TableState()
        for actions in self._read_checkpoint(checkpoints.get(self.checkpoint_version, ())):
            state.apply(self.checkpoint_version, actions)
        self._newest = self.place.read(commit_path(state.version)) or b""
        # A checkpoint doesn't have its commit's information.
        state.apply(state.version, [a for a in _parse(self._newest) if "commitInfo" in a])
        while state.version < (newest if wanted is None else wanted):
            data = self.place.read(commit_path(state.version + 1))
            if data is None and wanted is not None:
                return None
            if data is None:
                raise SinkRejected(
                    f"The log of the Delta table {self.place.location} lacks version {state.version + 1}.",
                    hint="restore the file from a backup, or make the view again with `rebuild`",
                )
            state.apply(state.version + 1, _parse(data))
            self._newest = data
        return state

    def _read_checkpoint(self, paths: Sequence[str]) -> Iterator[list[Action]]:
        """Read the files of a checkpoint, and those that they name."""
        for path in paths:
            data = self.place.read(path) or b""
            actions = _parse(data) if path.endswith(".json") else _rows(data)
            yield actions
            sidecars = [action["sidecar"]["path"] for action in actions if "sidecar" in action]
            yield from self._read_checkpoint([f"{FOLDER}/_sidecars/{name}" for name in sidecars])


def commit_path(version: int) -> str:
    return f"{FOLDER}/{version:020}.json"


def removal(file: File, *, data_change: bool = True) -> Action:
    vector = file.get("deletionVector")
    return {
        "remove": {
            "path": file["path"],
            "deletionTimestamp": int(time.time() * 1000),
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": file.get("partitionValues") or {},
            "size": file["size"],
            **({"deletionVector": vector} if vector else {}),
        }
    }


def _is_complete(paths: Sequence[str]) -> bool:
    """Whether these files of one version make a checkpoint: all parts of one, or one whole."""
    counts = Counter(match["parts"] for path in paths if (match := CHECKPOINT.match(path)))
    return any(parts is None or int(parts) == count for parts, count in counts.items())


def _parse(data: bytes) -> list[Action]:
    """Read the actions of a commit, without fields that are null. Raises SinkRejected."""
    try:
        return [_present(json.loads(line)) for line in data.splitlines() if line.strip()]
    except ValueError:
        raise SinkRejected(
            "A commit of a Delta table isn't JSON: its file is damaged.",
            hint="restore it from a backup, or make the view again with `rebuild`",
        ) from None


def _rows(data: bytes) -> list[Action]:
    """Read the actions of a checkpoint in Parquet, without fields that are null."""
    import pyarrow.parquet as pq

    actions: list[Action] = _present(
        pq.read_table(io.BytesIO(data)).to_pylist(maps_as_pydicts="lossy")
    )
    for action in actions:
        if add := action.get("add"):
            action["add"] = {name: add[name] for name in ADD_FIELDS if name in add}
        action.pop("remove", None)
    return actions


def _present(value: Any) -> Any:
    if isinstance(value, list):
        return [_present(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return value


def _require_known(protocol: Mapping[str, Any]) -> None:
    """Raise SinkRejected for a feature that isn't known here."""
    unknown = set(protocol.get("readerFeatures") or ()) - READER_FEATURES
    unknown |= set(protocol.get("writerFeatures") or ()) - WRITER_FEATURES
    readers = protocol["minReaderVersion"]
    writers = protocol["minWriterVersion"]
    if unknown or readers not in READER_VERSIONS or writers not in WRITER_VERSIONS:
        name = sorted(unknown)[0] if unknown else f"the protocol's versions {readers} and {writers}"
        raise SinkRejected(
            f"The Delta table has {name}, which isn't supported here.",
            hint="drop the feature (ALTER TABLE ... DROP FEATURE), or let the sink write to another path",
        )


def new_file(name: str, size: int, stats: str) -> File:
    """Describe a new file of a table's folder.

    size: in bytes; stats: the JSON text that Delta's log has for a file.
    """
    return {
        "path": name,
        "partitionValues": {},
        "size": size,
        "modificationTime": int(time.time() * 1000),
        "dataChange": True,
        "stats": stats,
    }


def additions(files: Iterable[File]) -> list[Action]:
    return [{"add": file} for file in files]


def creation(columns: Any, features: Collection[str] = ()) -> list[Action]:
    """Make the actions that create a table; see `extension`."""
    return extension(TableState(), columns, features)


def extension(
    state: TableState,
    columns: Any,
    features: Collection[str] = (),
    *,
    replaced: bool = False,
    dropped: Collection[str] = (),
) -> list[Action]:
    """Make the actions that give a table columns that it lacks, fields that its structs lack, and
    features; none where it lacks nothing. The first ones create it.

    columns: as Delta's JSON has a struct. features: that its readers must support, with what the
    columns need. replaced: whether the table has exactly these columns afterwards. dropped: features
    that its readers needn't support any more.

    Raises SinkRejected: the table is partitioned, and isn't replaced.
    """
    partitioned = bool(state.metadata.get("partitionColumns"))
    if partitioned and not replaced:
        raise SinkRejected(
            "The Delta table is partitioned, which the pipeline's tables aren't.",
            hint="somebody else has written it: make the view again with `rebuild`",
        )
    target = merged(state.columns, columns) if state.metadata and not replaced else columns
    added = reader_features(target) | set(features)
    readers = (state.reader_features | added) - set(dropped)
    configuration = dict(state.properties)
    if DELETION_VECTORS in features:
        configuration[PROPERTY] = "true"
    if DELETION_VECTORS in dropped:
        configuration.pop(PROPERTY, None)
    actions: list[Action] = []
    if not state.protocol or readers != state.reader_features:
        former = state.protocol.get("writerFeatures") or LEGACY
        writers = (set(former) | added) - set(dropped)
        actions.append({"protocol": _protocol(readers, writers)})
    made = {
        "id": str(uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "createdTime": int(time.time() * 1000),
    }
    changed = {
        "schemaString": json.dumps(target, ensure_ascii=False),
        "configuration": configuration,
        "partitionColumns": [],
    }
    if not state.metadata:
        actions.append({"metaData": {**made, **changed}})
    elif target != state.columns or configuration != state.properties or partitioned:
        actions.append({"metaData": {**state.metadata, **changed}})
    return actions


def removal_of_all(state: TableState) -> list[Action]:
    return [removal(file) for file in state.files.values()]


def _protocol(readers: Collection[str], writers: Collection[str]) -> dict[str, Any]:
    """readers, writers: the features that readers and writers must support."""
    if not readers and set(writers) <= set(LEGACY):
        return {"minReaderVersion": 1, "minWriterVersion": 2}
    protocol: dict[str, Any] = {
        "minReaderVersion": 3 if readers else 1,
        "minWriterVersion": 7,
        "writerFeatures": sorted(writers),
    }
    if readers:
        protocol["readerFeatures"] = sorted(readers)
    return protocol


def standing(
    history: Iterable[Commit], changed: Callable[[int], bool], restored: Callable[[int], int | None]
) -> LastCommit | None:
    """Find our last commit among the commits of a table, the newest first; None when it is an older one
    than these.

    changed: whether the commit of a version added or removed rows.
    restored: returns the version that a RESTORE has brought back, where it doesn't name it.
    """
    trouble = ""
    ceiling: int | None = None
    version = -1
    for commit in history:
        version = commit["version"]
        if ceiling is not None and version > ceiling:
            continue
        text = commit.get("userMetadata") or ""
        if text.startswith(ViewCheckpoint.JSON_START):
            checkpoint = ViewCheckpoint.from_json(text)
            return LastCommit(
                None if checkpoint.position == CLEARED.position else checkpoint, trouble
            )
        if commit.get("operation") == RESTORE:
            named = (commit.get("operationParameters") or {}).get("version")
            ceiling = restored(version) if named in (None, "", "null") else int(named)
            if ceiling is None:
                return LastCommit(
                    None, f"{RESTORE} (version {version}) doesn't say to which version"
                )
        elif not trouble and changed(version):
            trouble = f"{commit.get('operation')} (version {version}) of somebody else has changed its rows"
    return LastCommit(None, trouble) if version == 0 else None


class Logs(dict[str, TableLog]):
    """The logs of the Delta tables of one sink by their folders, read once and kept up to date. A table
    may not exist.
    """

    def __missing__(self, folder: str) -> TableLog:
        return self.setdefault(folder, TableLog(folder))
