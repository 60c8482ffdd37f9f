"""Checks of the source: from facts to findings. Pure."""

from collections.abc import Iterator

from cdc.config.settings import CONTROL_TABLES
from cdc.doctor.source_facts import PublicationFacts, RoleFacts, SourceFacts
from cdc.model.finding import Finding, find, find_setting
from cdc.model.row_security import show_rows
from cdc.model.source_server import server_fault
from cdc.observe.forecast import find_slot_risk

MIGRATE, REGISTER = "cdc -p FILE migrate", "cdc -p FILE register"
RELOAD = "SELECT pg_reload_conf();"
LONG_S = 300.0
"""Seconds after which an open transaction is a risk: the slot keeps the log since its begin."""
IDLE_BYTES = 1 << 30
"""Bytes of log that an unread slot of somebody else may keep unmentioned."""
FULL_DISK = 0.1
"""The free share of a disk below which it is a risk."""
FAILOVER_VERSION = 170000


def check_source(facts: SourceFacts) -> Iterator[Finding]:
    """Judge the source."""
    yield from _check_server(facts)
    yield from _check_limits(facts)
    yield from _check_slots(facts)
    yield from _check_transactions(facts)
    if not facts.control:
        message = f"Database {facts.database} has no schema cdc."
        yield find("control-missing", "cdc", message, MIGRATE)
    else:
        yield from _check_role(facts.role_name, facts.role)
        yield from _check_publication(facts, facts.publication)
        if not facts.beats:
            message = f"cdc.heartbeat has no row of {facts.pipeline}."
            yield find("control-missing", "cdc.heartbeat", message, MIGRATE)
    yield from _check_tables(facts)


def _check_server(facts: SourceFacts) -> Iterator[Finding]:
    if fault := server_fault(
        facts.version, facts.settings["wal_level"], facts.settings["server_encoding"]
    ):
        yield find(fault.code, fault.subject, fault.message, fault.hint)
    if facts.in_recovery:
        message = "source.dsn leads to a standby, which takes no heartbeat."
        yield find(
            "source-unfit/standby", "Postgres", message, "SELECT * FROM pg_stat_wal_receiver;"
        )
    if not facts.encrypted:
        message = "The connection to Postgres isn't encrypted, and leaves this machine."
        yield find_setting("sslmode", message, "SHOW ssl;", of="source.dsn")
    if facts.disk_free_share is not None and facts.disk_free_share < FULL_DISK:
        message = f"{facts.disk_free_share:.0%} of the disk with Postgres' data is free."
        yield find("disk-low/source", "Postgres", message, "SELECT * FROM pg_replication_slots;")


def _check_limits(facts: SourceFacts) -> Iterator[Finding]:
    slots, senders = (
        int(facts.settings.get(name, 1)) for name in ("max_replication_slots", "max_wal_senders")
    )
    if facts.slot is None and len(facts.slots) >= slots:
        message = f"All of the {slots} slots are taken, so that none can be made for the connector."
        message += " More of them take a restart of the server after this statement."
        fix = f"ALTER SYSTEM SET max_replication_slots = {slots + 4};"
        yield find("slots-exhausted", "max_replication_slots", message, fix)
    if not (facts.slot and facts.slot.active) and facts.senders >= senders:
        message = f"All of the {senders} senders are at work, so that the connector gets none."
        message += " More of them take a restart of the server after this statement."
        fix = f"ALTER SYSTEM SET max_wal_senders = {senders + 4};"
        yield find("slots-exhausted/senders", "max_wal_senders", message, fix)
    if facts.settings.get("idle_replication_slot_timeout", "0") != "0":
        minutes = int(facts.settings["idle_replication_slot_timeout"]) // 60
        message = f"A slot that nobody reads for {minutes} minutes is given up."
        fix = f"ALTER SYSTEM SET idle_replication_slot_timeout = 0; {RELOAD}"
        yield find_setting("idle_replication_slot_timeout", message, fix)
    if facts.settings.get("max_slot_wal_keep_size") == "-1":
        message = "max_slot_wal_keep_size = -1: a slot that nobody reads keeps log without a limit."
        fix = f"ALTER SYSTEM SET max_slot_wal_keep_size = '100GB'; {RELOAD}"
        yield find_setting("max_slot_wal_keep_size", message, fix)


def _check_slots(facts: SourceFacts) -> Iterator[Finding]:
    slot, name = facts.slot, facts.pipeline
    for candidate in facts.slots:
        if candidate is slot or candidate.active or (candidate.retained_bytes or 0) < IDLE_BYTES:
            continue
        message = f"Nobody reads slot {candidate.name}, which keeps {(candidate.retained_bytes or 0) >> 20} MiB of log."
        fix = f"SELECT * FROM pg_replication_slots WHERE slot_name = '{candidate.name}';"
        yield find("log-held/slot", candidate.name, message, fix)
    if slot is None:
        return
    if slot.plugin != "pgoutput" or slot.database != facts.database:
        message = (
            f"Slot {name} is something else's: plugin {slot.plugin}, database {slot.database}."
        )
        yield find("slot-foreign", name, message, "SELECT * FROM pg_replication_slots;")
        return
    if slot.active and not facts.connected:
        message = f"Slot {name} is read, yet this Connect has no connector {name}."
        yield find("slot-foreign/in-use", name, message, "SELECT * FROM pg_stat_replication;")
    if slot.wal_status == "lost":
        message = f"Slot {name} has lost log that wasn't read."
        yield find("slot-lost", name, message, f"{REGISTER} --new-snapshot")
    yield from find_slot_risk(name, slot.safe_bytes, slot.retained_bytes)
    if facts.version >= FAILOVER_VERSION and facts.standbys and not slot.failover:
        message = f"Slot {name} isn't copied to standbys: a failover would lose it."
        yield find_setting("failover", message, "SHOW sync_replication_slots;", of=name)


def _check_transactions(facts: SourceFacts) -> Iterator[Finding]:
    if (facts.transaction_s or 0.0) > LONG_S:
        message = f"A transaction that has written is open for {facts.transaction_s:.0f} s."
        fix = (
            "SELECT pid, usename, xact_start, left(query, 60) FROM pg_stat_activity"
            " WHERE backend_xid IS NOT NULL ORDER BY xact_start;"
        )
        yield find("log-held/transaction", "pg_stat_activity", message, fix)
    if (facts.prepared_s or 0.0) > LONG_S:
        message = f"A prepared transaction waits for {facts.prepared_s:.0f} s."
        fix = "SELECT gid, prepared, owner FROM pg_prepared_xacts ORDER BY prepared;"
        yield find("log-held/prepared", "pg_prepared_xacts", message, fix)


def _check_role(name: str, role: RoleFacts | None) -> Iterator[Finding]:
    if role is None:
        yield find(
            "role-unfit/missing", name, f"There is no role {name} for the connector.", MIGRATE
        )
        return
    if not role.can_replicate:
        yield find("role-unfit", name, f"Role {name} lacks LOGIN or REPLICATION.", MIGRATE)
    if role.superuser:
        yield find("role-unfit/superuser", name, f"Role {name} is a superuser.", MIGRATE)
    if role.unreadable:
        message = f"Role {name} may not read (or beat) {', '.join(role.unreadable)}."
        yield find("role-unfit/unreadable", name, message, MIGRATE)


def _check_publication(
    facts: SourceFacts, publication: PublicationFacts | None
) -> Iterator[Finding]:
    name = facts.pipeline
    if publication is None:
        message = f"There is no publication {name} in {facts.database}."
        yield find("publication-differs/missing", name, message, MIGRATE)
        return
    if not publication.owned:
        message = (
            f"Publication {name} belongs to {publication.owner}, not to the user of source.dsn."
        )
        fix = f"use {publication.owner} in source.dsn, or give the pipeline another name"
        yield find("publication-foreign", name, message, fix)
    captured = [table for table in facts.tables if table not in facts.refused]
    missing = [table for table in (*captured, *CONTROL_TABLES) if table not in publication.tables]
    if missing:
        message = f"Publication {name} lacks {', '.join(missing)}."
        yield find("publication-differs", name, message, MIGRATE)
    if publication.partial or not publication.complete:
        lacks = f"rows or columns of {', '.join(publication.partial)}"
        lacks = lacks if publication.partial else "operations, roots or generated columns"
        yield find(
            "publication-differs/partial", name, f"Publication {name} leaves out {lacks}.", MIGRATE
        )
    if extra := sorted(set(publication.tables) - {*facts.tables, *CONTROL_TABLES}):
        message = f"Publication {name} offers {', '.join(extra)}, which the file doesn't name."
        yield find("publication-differs/extra", name, message, MIGRATE)


def _check_tables(facts: SourceFacts) -> Iterator[Finding]:
    for table, (message, hint) in facts.refused.items():
        yield find("table-refused", table, message, hint, table=table)
    for table, marks in facts.tables.items():
        if table in facts.refused:
            continue
        if marks.unlogged:
            message = f"{table} isn't logged: its changes never reach the log."
            fix = f"ALTER TABLE {marks.unlogged} SET LOGGED;"
            yield find("table-unlogged", table, message, fix, table=table)
        if marks.virtual:
            columns = ", ".join(marks.virtual)
            message = (
                f"{table} has virtual generated columns ({columns}): under REPLICA IDENTITY FULL Postgres refuses every"
                " UPDATE and DELETE of it."
            )
            yield find(
                "table-refused", table, message, "make them STORED, or drop them", table=table
            )
        if not facts.control:
            continue
        if table in facts.unidentified:
            message, hint = facts.unidentified[table]
            yield find("identity-unfit", table, message, hint, table=table)
        elif marks.partial:
            message = f"{table} has columns that may be TOASTed, and no REPLICA IDENTITY FULL."
            yield find("identity-unfit/partial", table, message, MIGRATE, table=table)
        if marks.hidden_by:
            message = (
                f"Policies of {table} hide rows from {facts.role_name}: a snapshot would lack them."
            )
            fix = show_rows(table, facts.role_name, marks.hidden_by)
            yield find("row-security", table, message, fix, table=table)
        if marks.unwatched:
            message = f"No trigger notes a TRUNCATE of {table}."
            yield find("trigger-missing/truncation", table, message, MIGRATE, table=table)
        if marks.unguarded:
            message = f"No trigger refuses an UPDATE of {table}, whose rows are events."
            yield find("trigger-missing/events", table, message, MIGRATE, table=table)
