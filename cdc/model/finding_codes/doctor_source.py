"""Findings of `cdc doctor` about Postgres: see `cdc.doctor.source_checks`."""

from collections.abc import Mapping

from cdc.errors import SettingsError, SourceError
from cdc.model.finding_codes.kind import SOURCE, Kind

POSTGRES: Mapping[str, Kind] = {
    "postgres-too-old": Kind(
        "down", SOURCE, SettingsError, "The connector needs a server of version 14 or later."
    ),
    "source-encoding": Kind(
        "down",
        SOURCE,
        SourceError,
        "The connector can't read a value that isn't valid text, and restarts there forever.",
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
        "Name the primary in source.dsn, or promote this server.",
    ),
    "slots-exhausted": Kind(
        "down", SOURCE, SourceError, "`register` can't make the connector's slot."
    ),
    "senders-exhausted": Kind(
        "down", SOURCE, SourceError, "The connector's task fails until a sender is free."
    ),
    "slot-foreign": Kind(
        "down",
        SOURCE,
        SourceError,
        "The name is taken, so `register` refuses.",
        "Give the pipeline another name: it names slot, publication and topics.",
    ),
    "slot-in-use": Kind(
        "down",
        SOURCE,
        SourceError,
        "Two connectors on one slot take changes from each other, so `register` refuses.",
        "Stop the other reader, or give this pipeline another name.",
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
        "warning",
        SOURCE,
        SourceError,
        "The log that it keeps fills the disk of Postgres.",
        "Ask its owner: once nobody needs it, pg_drop_replication_slot drops it.",
    ),
    "slot-not-failover": Kind(
        "warning",
        SOURCE,
        SourceError,
        "After a failover the slot is missing, and changes are lost to the log.",
        "Decide whether to make the slot again with failover, or to run `register` and `verify` after each failover.",
    ),
    "transaction-long": Kind(
        "warning",
        SOURCE,
        SourceError,
        "The slot keeps all log since its begin, and a snapshot waits for it.",
        "Ask its owner to end it, or end it by pg_terminate_backend.",
    ),
    "transaction-prepared": Kind(
        "warning",
        SOURCE,
        SourceError,
        "The slot keeps all log since its begin, through every restart.",
        "Ask its owner whether it is to be committed or rolled back.",
    ),
    "source-unencrypted": Kind(
        "warning",
        SOURCE,
        SourceError,
        "Whoever is on the way reads every row, and the password's exchange.",
        "Turn TLS on in the server, and write sslmode=verify-full into source.dsn.",
    ),
    "source-disk-low": Kind(
        "warning",
        SOURCE,
        SourceError,
        "Postgres stops when its disk is full.",
        "Make room, or drop a slot whose reader is gone for good.",
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
    "identity-without-key": Kind(
        "down",
        SOURCE,
        SourceError,
        "A delete doesn't name its row, so `register` refuses and views of the table wait.",
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
    "events-unguarded": Kind(
        "degraded", SOURCE, SourceError, "An event whose key is changed counts twice."
    ),
    "heartbeat-row-missing": Kind(
        "down", SOURCE, SourceError, "No heartbeat can come through, so `register` refuses."
    ),
}
