"""The catalogue of findings: for each stable code its severity, its hop, the class of errors that it
belongs to, and what becomes of it if nobody acts.

A code that has been published is never given another meaning. docs/operate/runbooks has a page for
each, and a test holds that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.errors import (
    AnotherServer,
    CdcError,
    ConnectorError,
    DecodeError,
    KafkaUnavailable,
    SettingsError,
    SinkError,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
)

SOURCE, CAPTURE, LOG, APPLY = "Postgres", "Postgres -> Kafka", "Kafka", "Kafka -> SINK"
"""Hops. In the last one SINK is the name of the finding's sink."""


@dataclass(frozen=True)
class Kind:
    """What all findings of one code have in common. `severity` is a word of `Severity`."""

    severity: str
    hop: str
    failure: type[CdcError]
    why: str


STATUS: Mapping[str, Kind] = {
    "source-unreachable": Kind(
        "down", SOURCE, SourceUnavailable, "Nobody can tell whether changes leave Postgres."
    ),
    "connect-unreachable": Kind(
        "down", CAPTURE, ConnectorError, "Nobody can tell whether the connector runs."
    ),
    "kafka-unreachable": Kind(
        "down", LOG, KafkaUnavailable, "No change can be sent or applied while Kafka is away."
    ),
    "sink-unreachable": Kind(
        "down", APPLY, SinkUnavailable, "Its views may be away, and how old they are is unknown."
    ),
    "registration-unreadable": Kind(
        "down", CAPTURE, ConnectorError, "Nobody can tell what the topics hold."
    ),
    "another-server": Kind(
        "down",
        SOURCE,
        AnotherServer,
        "The topics hold another server's changes: the two must not be mixed.",
    ),
    "settings-changed": Kind(
        "down",
        CAPTURE,
        SettingsError,
        "The connector sends other columns or keys than the file says, so `run` refuses.",
    ),
    "pattern-meaningless": Kind(
        "down", SOURCE, SettingsError, "A check of no table always passes: nothing was looked at."
    ),
    "server-promoted": Kind(
        "degraded",
        SOURCE,
        SourceError,
        "Views may hold changes that the promoted server never had.",
    ),
    "tables-undecided": Kind(
        "degraded", SOURCE, SettingsError, "Which tables a pattern means can't be said."
    ),
    "table-slipped": Kind(
        "degraded", SOURCE, SourceError, "The next `register` would lose the table's changes."
    ),
    "tables-waiting": Kind(
        "degraded", CAPTURE, SettingsError, "Rows of these tables are in no view."
    ),
    "settings-lowered": Kind(
        "degraded",
        LOG,
        ConnectorError,
        "Tombstones may be removed before every view has applied them.",
    ),
    "connector-missing": Kind(
        "down", CAPTURE, ConnectorError, "Nothing reads the log, and the slot keeps it for ever."
    ),
    "connector-failed": Kind(
        "down", CAPTURE, ConnectorError, "No change leaves Postgres, and the slot keeps the log."
    ),
    "connector-stopped": Kind(
        "down", CAPTURE, ConnectorError, "No change leaves Postgres, and the slot keeps the log."
    ),
    "slot-missing": Kind(
        "down", SOURCE, SourceError, "Changes from before the next slot are lost to the log."
    ),
    "slot-lost": Kind(
        "down", SOURCE, SourceError, "Changes that the connector hadn't read are gone from the log."
    ),
    "slot-at-risk": Kind(
        "warning",
        SOURCE,
        SourceError,
        "Beyond max_slot_wal_keep_size Postgres gives the slot up: a new snapshot is needed.",
    ),
    "definitions-unwatched": Kind(
        "degraded",
        SOURCE,
        SourceError,
        "A changed type may make views wrong without a word.",
    ),
    "definitions-uncompared": Kind(
        "degraded", SOURCE, SourceError, "A change of a table may go unseen until then."
    ),
    "heartbeat-missing": Kind(
        "down", CAPTURE, ConnectorError, "Nobody can tell whether changes come through."
    ),
    "heartbeat-late": Kind(
        "degraded", CAPTURE, ConnectorError, "Every view is at least that late."
    ),
    "sink-failed": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-waiting": Kind(
        "down", APPLY, SinkError, "Its views get no changes until the server is back."
    ),
    "sink-silent": Kind("down", APPLY, SinkError, "Its views get no changes while it hangs."),
    "sink-not-running": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-behind": Kind("degraded", APPLY, SinkError, "Readers see rows as they were."),
    "view-stopped": Kind(
        "degraded", APPLY, ConnectorError, "The log can't continue this view; others go on."
    ),
    "table-waiting": Kind(
        "degraded", APPLY, SinkError, "This table's view gets no changes; others go on."
    ),
    "records-quarantined": Kind(
        "degraded", APPLY, DecodeError, "These rows may be older in the view than in Postgres."
    ),
}
"""What `cdc status` can find, and `cdc doctor` too."""

CODES: Mapping[str, Kind] = STATUS
