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
    DivergenceError,
    KafkaUnavailable,
    SettingsError,
    SinkError,
    SinkPaused,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
    SparkError,
)

SOURCE, CAPTURE, LOG, APPLY = "Postgres", "Postgres -> Kafka", "Kafka", "Kafka -> SINK"
MACHINE = "this machine"
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
    "table-left-out": Kind("info", SOURCE, SettingsError, "There are no views of it."),
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
    "snapshot-running": Kind(
        "info", CAPTURE, ConnectorError, "Views lack rows until it has ended; changes follow then."
    ),
    "heartbeat-late": Kind(
        "degraded", CAPTURE, ConnectorError, "Every view is at least that late."
    ),
    "sink-failed": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-waiting": Kind(
        "down", APPLY, SinkError, "Its views get no changes until the server is back."
    ),
    "sink-silent": Kind("down", APPLY, SinkError, "Its views get no changes while it hangs."),
    "sink-stuck": Kind(
        "degraded", APPLY, SinkError, "Its views get no changes until the batch at hand ends."
    ),
    "sink-not-running": Kind("down", APPLY, SinkError, "Its views get no changes."),
    "sink-paused": Kind(
        "info", APPLY, SinkPaused, "Its views stay as they are until it is resumed."
    ),
    "sink-behind": Kind("degraded", APPLY, SinkError, "Readers see rows as they were."),
    "tombstones-at-risk": Kind(
        "warning",
        APPLY,
        SinkError,
        "After that it may miss deletes, and its views have to be built again.",
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
    "state-will-not-fit": Kind(
        "warning",
        APPLY,
        SinkError,
        "The stream of documents ends when the memory is full, after all the time of reading.",
    ),
    "records-quarantined": Kind(
        "degraded", APPLY, DecodeError, "These rows may be older in the view than in Postgres."
    ),
    "view-differs": Kind(
        "degraded", APPLY, DivergenceError, "Readers of the view get wrong answers."
    ),
}
"""What `cdc status` can find, and `cdc doctor` too; the last one is for `cdc verify` to find."""

DOCTOR: Mapping[str, Kind] = {
    "postgres-too-old": Kind(
        "down", SOURCE, SettingsError, "The connector needs a server of version 14 or later."
    ),
    "wal-level": Kind(
        "down",
        SOURCE,
        SourceError,
        "Without logical decoding no change leaves Postgres, and `register` refuses.",
    ),
    "source-read-only": Kind(
        "down",
        SOURCE,
        SourceError,
        "A standby takes no heartbeat and no request, so `register` fails.",
    ),
    "slots-exhausted": Kind(
        "down", SOURCE, SourceError, "`register` can't make the connector's slot."
    ),
    "senders-exhausted": Kind(
        "down", SOURCE, SourceError, "The connector's task fails until a sender is free."
    ),
    "slot-foreign": Kind("down", SOURCE, SourceError, "The name is taken, so `register` refuses."),
    "slot-in-use": Kind(
        "down",
        SOURCE,
        SourceError,
        "Two connectors on one slot take changes from each other, so `register` refuses.",
    ),
    "slot-unlimited": Kind(
        "info",
        SOURCE,
        SourceError,
        "While the connector is away the disk of Postgres may become full.",
    ),
    "slot-idle-limit": Kind(
        "warning", SOURCE, SourceError, "A connector that is away for longer needs a new snapshot."
    ),
    "slot-of-others-idle": Kind(
        "warning", SOURCE, SourceError, "The log that it keeps fills the disk of Postgres."
    ),
    "slot-not-failover": Kind(
        "warning",
        SOURCE,
        SourceError,
        "After a failover the slot is missing, and changes are lost to the log.",
    ),
    "sender-timeout-off": Kind(
        "warning",
        SOURCE,
        SourceError,
        "The next task can't read the slot until Postgres is restarted.",
    ),
    "transaction-long": Kind(
        "warning",
        SOURCE,
        SourceError,
        "The slot keeps all log since its begin, and a snapshot waits for it.",
    ),
    "transaction-prepared": Kind(
        "warning",
        SOURCE,
        SourceError,
        "The slot keeps all log since its begin, through every restart.",
    ),
    "source-unencrypted": Kind(
        "warning",
        SOURCE,
        SourceError,
        "Whoever is on the way reads every row, and the password's exchange.",
    ),
    "source-disk-low": Kind(
        "warning", SOURCE, SourceError, "Postgres stops when its disk is full."
    ),
    "control-missing": Kind(
        "down",
        SOURCE,
        SourceError,
        "`register` refuses: there is neither heartbeat nor truncation to come through.",
    ),
    "role-missing": Kind(
        "down", SOURCE, SourceError, "The connector can't log in, so `register` refuses."
    ),
    "role-unfit": Kind(
        "down",
        SOURCE,
        SourceError,
        "The connector can't log in or read the log, so `register` refuses.",
    ),
    "role-superuser": Kind(
        "warning", SOURCE, SourceError, "Whoever gets the connector's password owns the server."
    ),
    "role-unreadable": Kind(
        "down", SOURCE, SourceError, "The snapshot fails at these tables, so `register` refuses."
    ),
    "role-timeout": Kind("warning", SOURCE, SourceError, "A snapshot of a large table never ends."),
    "row-security": Kind(
        "degraded", SOURCE, SourceError, "A snapshot leaves rows out without a word."
    ),
    "publication-missing": Kind(
        "down", SOURCE, SourceError, "The connector's task fails, so `register` refuses."
    ),
    "publication-foreign": Kind(
        "down",
        SOURCE,
        SourceError,
        "`migrate` can't keep it as the file says, so `register` refuses.",
    ),
    "publication-incomplete": Kind(
        "down",
        SOURCE,
        SourceError,
        "Changes of these tables never leave Postgres, so `register` refuses.",
    ),
    "publication-partial": Kind(
        "down", SOURCE, SourceError, "Some changes never leave Postgres, so `register` refuses."
    ),
    "publication-extra": Kind(
        "info",
        SOURCE,
        SourceError,
        "The connector decodes changes that nobody wants, and drops them.",
    ),
    "table-refused": Kind("down", SOURCE, SourceError, "`register` refuses the whole file."),
    "view-refused": Kind(
        "down", SOURCE, SettingsError, "`migrate` and `register` refuse the whole file."
    ),
    "table-unlogged": Kind(
        "degraded", SOURCE, SourceError, "Its view holds the snapshot's rows, and never a change."
    ),
    "identity-partial": Kind(
        "degraded",
        SOURCE,
        SourceError,
        "An update that leaves a large value alone doesn't carry it; a rebuild may lack it.",
    ),
    "truncation-unwatched": Kind(
        "degraded", SOURCE, SourceError, "After a TRUNCATE the views keep every row."
    ),
    "heartbeat-row-missing": Kind(
        "down", SOURCE, SourceError, "No heartbeat can come through, so `register` refuses."
    ),
    "plugin-missing": Kind(
        "down", CAPTURE, ConnectorError, "The worker can't run the connector, so `register` fails."
    ),
    "plugin-loses-rows": Kind(
        "warning",
        CAPTURE,
        ConnectorError,
        "Rows may be missing in every view after a restart of the worker.",
    ),
    "worker-not-exactly-once": Kind(
        "down", CAPTURE, ConnectorError, "The worker refuses the connector, so `register` fails."
    ),
    "worker-refuses-overrides": Kind(
        "down", CAPTURE, ConnectorError, "The worker refuses the connector, so `register` fails."
    ),
    "connector-refused": Kind("down", CAPTURE, ConnectorError, "`register` fails at this."),
    "connector-drops-slot": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Changes that are made while it is stopped are lost to the log.",
    ),
    "connector-skips-errors": Kind(
        "degraded", CAPTURE, ConnectorError, "Changes may be missing in every view without a word."
    ),
    "connector-nulls-values": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may hold null where Postgres has a value."
    ),
    "connector-skips-tombstones": Kind(
        "degraded", CAPTURE, ConnectorError, "Topics keep deleted rows for ever."
    ),
    "connector-makes-publications": Kind(
        "warning", CAPTURE, ConnectorError, "It may publish tables that the file doesn't name."
    ),
    "connector-rounds-numbers": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may hold other numbers than Postgres."
    ),
    "connector-repeats": Kind(
        "degraded", CAPTURE, ConnectorError, "Topics may hold a change twice, out of order."
    ),
    "connector-skips-log": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "After a restored backup changes may be missing without a word.",
    ),
    "connector-snapshot-mode": Kind(
        "degraded", CAPTURE, ConnectorError, "Rows from before the registration may be in no view."
    ),
    "connector-leaves-out-columns": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may lack columns that Postgres has."
    ),
    "connector-skips-operations": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "A truncate event ends the task, or views keep deleted rows.",
    ),
    "connector-without-heartbeat": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Nobody can tell whether changes come through, and an idle database keeps its log.",
    ),
    "connector-differs": Kind(
        "warning",
        CAPTURE,
        ConnectorError,
        "It doesn't do what the pipeline file says until `register` has run.",
    ),
    "broker-creates-topics": Kind(
        "warning", LOG, ConnectorError, "A topic that is deleted comes back with other partitions."
    ),
    "broker-never-compacts": Kind(
        "warning", LOG, ConnectorError, "The disks of the brokers become full."
    ),
    "topic-missing": Kind(
        "down", LOG, ConnectorError, "`run` refuses, and the connector may fail."
    ),
    "topic-partitions": Kind(
        "down",
        LOG,
        ConnectorError,
        "A key's changes may lie in two partitions, so that they have no order.",
    ),
    "topic-policy": Kind(
        "down", LOG, ConnectorError, "Kafka deletes rows that nobody has changed for a while."
    ),
    "topic-truncated": Kind(
        "degraded", LOG, ConnectorError, "A rebuild would lack the rows that were there."
    ),
    "topic-retention": Kind(
        "degraded", LOG, ConnectorError, "A view that is away for longer may miss deletes."
    ),
    "topic-compaction-lag": Kind(
        "warning", LOG, ConnectorError, "The warehouse's `changes` may miss superseded changes."
    ),
    "topic-small-records": Kind(
        "warning", LOG, ConnectorError, "A large row ends the connector's task."
    ),
    "topic-single-copy": Kind(
        "warning", LOG, ConnectorError, "With that broker's disk the log is gone."
    ),
    "topic-needs-all-copies": Kind(
        "warning", LOG, ConnectorError, "No change comes through while one broker is restarted."
    ),
    "topic-stores-once": Kind(
        "warning",
        LOG,
        ConnectorError,
        "A broker that fails may take changes with it that the slot has confirmed.",
    ),
    "topic-under-replicated": Kind(
        "degraded",
        LOG,
        ConnectorError,
        "The next broker that fails may stop the log, or lose some of it.",
    ),
    "topic-leaderless": Kind(
        "down",
        LOG,
        ConnectorError,
        "Nothing can be written to these partitions, or read from them.",
    ),
    "topic-unclean-leader": Kind(
        "warning", LOG, ConnectorError, "Changes that the slot has confirmed may be lost."
    ),
    "view-unfit": Kind(
        "degraded", APPLY, SinkError, "The table waits in this sink until the view is made again."
    ),
    "cache-evicts": Kind(
        "down", APPLY, SinkError, "Rows vanish from the cache, and `run` refuses."
    ),
    "cache-too-old": Kind(
        "down", APPLY, SinkError, "Scripts of the cache's writer need a newer server."
    ),
    "cache-clustered": Kind(
        "down", APPLY, SinkError, "Neither a rebuild nor the writer's scripts work on a cluster."
    ),
    "cache-replica": Kind(
        "down", APPLY, SinkError, "The cache gets no changes until the primary is named."
    ),
    "cache-memory-high": Kind(
        "warning",
        APPLY,
        SinkError,
        "The cache refuses changes when its memory is full; a rebuild needs as much again.",
    ),
    "cache-save-failing": Kind(
        "degraded",
        APPLY,
        SinkError,
        "The cache refuses changes, or loses them when it is restarted.",
    ),
    "index-version": Kind("down", APPLY, SinkError, "The writer's requests are for this version."),
    "index-red": Kind("down", APPLY, SinkError, "Some views can't be read or written."),
    "index-shards-full": Kind(
        "warning", APPLY, SinkError, "A rebuild or a new table finds no room."
    ),
    "index-disk-high": Kind(
        "warning", APPLY, SinkError, "From the flood stage on indices take no writes."
    ),
    "index-blocked": Kind("down", APPLY, SinkError, "The view gets no changes."),
    "index-shadows-alias": Kind(
        "down", APPLY, SinkError, "The view can't be shown under its name."
    ),
    "warehouse-read-only": Kind("down", APPLY, SinkError, "The warehouse gets no changes."),
    "warehouse-disk-low": Kind(
        "warning", APPLY, SinkError, "The warehouse gets no changes when its disk is full."
    ),
    "machine-unreadable": Kind(
        "down", MACHINE, SettingsError, "Nobody can tell whether `run` would start here."
    ),
    "java-missing": Kind(
        "down", MACHINE, SparkError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "java-too-old": Kind(
        "down", MACHINE, SparkError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "spark-missing": Kind(
        "down", MACHINE, SettingsError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "memory-low": Kind(
        "warning",
        MACHINE,
        SparkError,
        "The system may end a worker, so that queries are restarted.",
    ),
    "state-disk-low": Kind(
        "warning", MACHINE, SparkError, "Spark has no room to sort in, and queries fail."
    ),
    "clock-off": Kind("warning", MACHINE, SparkError, "Lag in seconds is wrong by as much."),
}
"""What only `cdc doctor` can find."""

AUDIT: Mapping[str, Kind] = {
    "values-lost": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would lack these values; live views have them.",
    ),
    "rows-outdated": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would show these rows as before the definition changed.",
    ),
    "keys-moved": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "An older change of these rows may win in a view that is made from the log.",
    ),
    "records-keyless": Kind(
        "degraded", LOG, DivergenceError, "A view that is made from the log would lack these rows."
    ),
    "records-foreign": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would have rows under keys that are nobody's.",
    ),
    "records-unreadable": Kind(
        "warning", LOG, DecodeError, "A rebuild puts these records into quarantine."
    ),
    "changes-incomplete": Kind(
        "warning", APPLY, DivergenceError, "Queries of the log of changes may miss some of them."
    ),
}
"""What only `cdc topics audit` can find, besides some of the above."""

CODES: Mapping[str, Kind] = {**STATUS, **DOCTOR, **AUDIT}
