"""Actions of commits: a table is made, gets columns or features, loses its rows; files are added."""

import json
import time
from collections.abc import Collection, Iterable
from typing import Any
from uuid import uuid4

from cdc.errors import SinkRejected
from cdc.sinks.delta.files.columns import merged, reader_features
from cdc.sinks.delta.files.parquet import DataFile
from cdc.sinks.delta.log.table_log import Action, TableState, removal

DELETION_VECTORS = "deletionVectors"
"""The feature that readers must support of a table whose rows may be marked as deleted."""
PROPERTY = "delta.enableDeletionVectors"
LEGACY = ("appendOnly", "invariants")
"""Features that a table has without naming them, until it names any."""


def addition(file: DataFile, *, data_change: bool = True) -> Action:
    """Make the action that adds a file."""
    return {
        "add": {
            "path": file.name,
            "partitionValues": {},
            "size": file.size,
            "modificationTime": int(time.time() * 1000),
            "dataChange": data_change,
            "stats": file.stats,
        }
    }


def additions(files: Iterable[DataFile]) -> list[Action]:
    """Make the actions that add files."""
    return [addition(file) for file in files]


def creation(columns: Any, features: Collection[str] = ()) -> list[Action]:
    """Make the actions that create a table.

    columns: as Delta's JSON has a struct. features: that its readers must support, with what the
    columns need.
    """
    metadata = {
        "id": str(uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "partitionColumns": [],
        "createdTime": int(time.time() * 1000),
        **_schema(columns),
        "configuration": _configuration({}, features),
    }
    readers = reader_features(columns) | set(features)
    return [{"protocol": _protocol(readers, set(LEGACY) | readers)}, {"metaData": metadata}]


def extension(
    state: TableState,
    columns: Any,
    features: Collection[str] = (),
    *,
    replaced: bool = False,
    dropped: Collection[str] = (),
) -> list[Action]:
    """Make the actions that give a table columns that it lacks, fields that its structs lack, and
    features; none where it lacks nothing.

    replaced: whether the table has exactly these columns afterwards. dropped: features that its
    readers needn't support any more.

    Raises SinkRejected: the table is partitioned, and isn't replaced.
    """
    partitioned = bool(state.metadata["partitionColumns"])
    if partitioned and not replaced:
        raise SinkRejected(
            "The Delta table is partitioned, which the pipeline's tables aren't.",
            hint="somebody else has written it: make the view again with `rebuild`",
        )
    target = columns if replaced else merged(state.columns, columns)
    added = reader_features(target) | set(features)
    readers = (state.reader_features | added) - set(dropped)
    configuration = _configuration(state.properties, features)
    if DELETION_VECTORS in dropped:
        configuration.pop(PROPERTY, None)
    actions: list[Action] = []
    if readers != state.reader_features:
        former = state.protocol.get("writerFeatures") or LEGACY
        writers = (set(former) | added) - set(dropped)
        actions.append({"protocol": _protocol(readers, writers)})
    if target != state.columns or configuration != state.properties or partitioned:
        changed = {
            **_schema(target),
            "configuration": configuration,
            "partitionColumns": [],
        }
        actions.append({"metaData": {**state.metadata, **changed}})
    return actions


def removal_of_all(state: TableState) -> list[Action]:
    """Make the actions that remove all files of a table."""
    return [removal(file) for file in state.files.values()]


def _schema(columns: Any) -> dict[str, str]:
    return {"schemaString": json.dumps(columns, ensure_ascii=False)}


def _configuration(properties: Any, features: Collection[str]) -> dict[str, str]:
    enabled = {PROPERTY: "true"} if DELETION_VECTORS in features else {}
    return {**properties, **enabled}


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
