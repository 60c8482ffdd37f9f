"""Findings of `cdc status`: that something on the way of a change is away, late, or wrong."""

from collections.abc import Mapping

from cdc.errors import (
    AnotherServer,
    ConnectorError,
    DecodeError,
    DivergenceError,
    KafkaUnavailable,
    SettingsError,
    SinkError,
    SinkPaused,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
)
from cdc.model.finding_codes.kind import APPLY, CAPTURE, LOG, SOURCE, Kind

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
    "table-left-out": Kind(
        "info",
        SOURCE,
        SettingsError,
        "There are no views of it.",
        "No action needed, unless its rows are wanted.",
    ),
    "table-slipped": Kind(
        "degraded", SOURCE, SourceError, "The next `register` would lose the table's changes."
    ),
    "tables-waiting": Kind(
        "degraded", CAPTURE, SettingsError, "Rows of these tables are in no view."
    ),
    "connector-missing": Kind(
        "down", CAPTURE, ConnectorError, "Nothing reads the log, and the slot keeps it for ever."
    ),
    "connector-failed": Kind(
        "down", CAPTURE, ConnectorError, "No change leaves Postgres, and the slot keeps the log."
    ),
    "table-unsendable": Kind(
        "down",
        CAPTURE,
        ConnectorError,
        "No change of any table leaves Postgres until this one is set aside.",
    ),
    "table-aside": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Its views show none of its changes until it is captured again.",
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
        "End what holds the slot back, or raise max_slot_wal_keep_size.",
    ),
    "definitions-uncompared": Kind(
        "degraded",
        SOURCE,
        SourceError,
        "A change of a table may go unseen until then.",
        "Mend what the log names, or restart the run.",
    ),
    "heartbeat-missing": Kind(
        "down", CAPTURE, ConnectorError, "Nobody can tell whether changes come through."
    ),
    "snapshot-running": Kind(
        "info",
        CAPTURE,
        ConnectorError,
        "Views lack rows until it has ended; changes follow then.",
        "It ends by itself.",
    ),
    "heartbeat-late": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Every view is at least that late.",
        "It ends by itself once the connector has caught up; a transaction that holds it back is for its owner to end.",
    ),
    "sink-failed": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-waiting": Kind(
        "down", APPLY, SinkError, "Its views get no changes until the server is back."
    ),
    "sink-silent": Kind(
        "down",
        APPLY,
        SinkError,
        "Its views get no changes while it hangs.",
        "Look at the destination and its network, or restart the run.",
    ),
    "sink-stuck": Kind(
        "degraded",
        APPLY,
        SinkError,
        "Its views get no changes until the current batch ends.",
        "Look at the destination, or restart the run.",
    ),
    "sink-not-running": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-paused": Kind(
        "info", APPLY, SinkPaused, "Its views stay as they are until it is resumed."
    ),
    "sink-behind": Kind(
        "degraded",
        APPLY,
        SinkError,
        "Readers see rows as they were.",
        "If the lag doesn't shrink, the run needs more cores (`run --master`).",
    ),
    "tombstones-at-risk": Kind(
        "warning",
        APPLY,
        SinkError,
        "After that it may miss deletes, and its views have to be built again.",
        "If the lag doesn't shrink, the run needs more cores (`run --master`).",
    ),
    "view-stopped": Kind(
        "degraded", APPLY, ConnectorError, "The log can't continue this view; others go on."
    ),
    "table-waiting": Kind(
        "degraded", APPLY, SinkError, "This table's view gets no changes; others go on."
    ),
    "documents-waiting": Kind(
        "degraded",
        APPLY,
        SettingsError,
        "This view's documents stay as they were; those of other views go on.",
    ),
    "clock-stands": Kind(
        "degraded",
        APPLY,
        SinkError,
        "No deadline of this view passes, and no window closes, until it goes on.",
        "If it doesn't go on within a minute, restart the run.",
    ),
    "state-will-not-fit": Kind(
        "warning",
        APPLY,
        SinkError,
        "The stream of documents ends when the memory is full, after all the time of reading.",
        "Raise maxmemory while the run goes on.",
    ),
    "records-quarantined": Kind(
        "degraded",
        APPLY,
        DecodeError,
        "These rows may be older in the view than in Postgres.",
        "Mend what the list names, then redrive them, or discard them.",
    ),
    "view-differs": Kind(
        "degraded", APPLY, DivergenceError, "Readers of the view get wrong answers."
    ),
}
"""What `cdc status` can find, and `cdc doctor` too; the last one is for `cdc verify` to find."""
