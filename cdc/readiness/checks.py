"""Checks of a source: from facts to faults. Pure: the one set of rules of `migrate`, `register`, `run`,
`doctor` and `status`.

`doctor` lists the findings of all faults. `register` refuses at the first one that `stops` it, `migrate`
at those that it can't mend itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cdc.errors import SourceError
from cdc.model.finding import Finding, Severity, find, only_looks
from cdc.model.finding_codes import KINDS
from cdc.model.table import CONTROL_TABLES
from cdc.model.wording import duration, quoted_name
from cdc.readiness.facts import (
    RESTRICTIVE,
    PublicationFacts,
    RoleFacts,
    Slot,
    SourceFacts,
    TableFacts,
)

MIGRATE = "cdc -p FILE migrate"
NEW_SNAPSHOT = "cdc -p FILE register --new-snapshot"
LOOK_AT_TRANSACTIONS = (
    "SELECT pid, usename, state, xact_start, left(query, 60) FROM pg_stat_activity"
    " WHERE backend_xid IS NOT NULL ORDER BY xact_start;"
)
RELOAD = "SELECT pg_reload_conf();"
RESTART = "More of them take a restart of the server after this statement."
LONG_S = 300.0
"""Seconds after which an open transaction is a risk: the slot keeps the log since its begin."""
IDLE_BYTES = 1 << 30
"""Bytes of log that an unread slot of somebody else may keep unmentioned."""
SAFE_SHARE = 0.25
"""The share of max_slot_wal_keep_size below which what the slot may still keep is a risk."""
SOON_S = 2 * 3600.0
"""Seconds until a slot is given up within which that is a risk: time to wake somebody up."""
FULL_DISK = 0.1
"""The free share of a disk below which it is a risk."""
FAILOVER_VERSION = 170000
OLDEST_VERSION = 140000
"""As `server_version_num`."""
ON_DEMAND_VERSION = 190000
"""Since this version `wal_level = replica` is enough: the server logs what logical decoding needs as
soon as it has a logical slot (`effective_wal_level`).
"""
CONSEQUENCE_OF_READER = "a comparison would take them for rows that Postgres doesn't have"
REFUSED = ("row-security",)
"""Keys at which `register` refuses although a pipeline that runs goes on: it may take a snapshot."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a source, by a key of the catalogue of findings, and what mends it."""

    key: str
    subject: str
    message: str
    fix: str
    table: str | None = None

    @property
    def finding(self) -> Finding:
        """The finding that `doctor` and `status` list."""
        return find(self.key, self.subject, self.message, self.fix, table=self.table)

    @property
    def error(self) -> SourceError:
        """The error with which a command refuses."""
        hint = KINDS[self.key].decision if only_looks(self.fix) else ""
        return SourceError(
            self.message,
            hint=hint or self.fix,
            finding_key=self.key,
            table=self.table,
            subject=self.subject,
        )

    @property
    def stops(self) -> bool:
        """Whether `register` refuses."""
        return KINDS[self.key].severity == Severity.DOWN or self.key in REFUSED


def refuse(faults: Iterable[Fault]) -> None:
    """Raise the SourceError of the first fault, if there is one."""
    for fault in faults:
        raise fault.error


def check_source(facts: SourceFacts) -> Iterator[Fault]:
    yield from check_server(facts.version, facts.wal_level, facts.encoding)
    yield from _check_place(facts)
    yield from _check_limits(facts)
    yield from _check_slots(facts)
    yield from _check_transactions(facts)
    yield from _check_publication(facts)
    if not facts.control:
        message = f"Database {facts.database} has no schema cdc."
        yield Fault("control-missing", "cdc", message, MIGRATE)
    else:
        yield from _check_role(facts)
        yield from _check_reader(facts)
        if not facts.beats:
            message = f"cdc.heartbeat has no row of {facts.pipeline}."
            yield Fault("control-missing", "cdc.heartbeat", message, MIGRATE)
    for table, error in facts.refused.items():
        yield Fault("table-refused", table, error.message, error.hint, table)
    for table, part in facts.tables.items():
        if table not in facts.refused:
            yield from check_table(part, facts.role_name, facts.role)
            yield from _check_preparation(facts, table, part)


def check_server(version: int, wal_level: str, encoding: str) -> Iterator[Fault]:
    """Judge whether changes can be captured from a server, by its `server_version_num`, `wal_level`
    and `server_encoding`.
    """
    if version < OLDEST_VERSION:
        yield Fault(
            "source-unfit/version",
            "Postgres",
            f"Postgres {version // 10000} is too old: 14 is the oldest that is supported.",
            "upgrade the server to 14 or later",
        )
        return
    sufficient = ("logical", "replica") if version >= ON_DEMAND_VERSION else ("logical",)
    if wal_level not in sufficient:
        yield Fault(
            "setting-differs/wal_level",
            "wal_level",
            f"The server has wal_level = {wal_level}; capturing changes takes {sufficient[-1]}.",
            f"ALTER SYSTEM SET wal_level = '{sufficient[-1]}', then restart the server",
        )
    if encoding == "SQL_ASCII":
        # The server stores any bytes and converts none, so a value may be invalid in every encoding.
        # At such a value the connector restarts forever.
        yield Fault(
            "source-unfit/encoding",
            "server_encoding",
            "The database has the encoding SQL_ASCII, so its values may be invalid text, which the connector"
            " can't read.",
            "move it into a database with another encoding: createdb --encoding UTF8 --template template0 NEW,"
            " then pg_dump --encoding with the encoding of the values, and restore",
        )


def _check_place(facts: SourceFacts) -> Iterator[Fault]:
    if facts.in_recovery:
        message = "This Postgres is a standby, which takes no heartbeat."
        fix = "SELECT * FROM pg_stat_wal_receiver;"
        yield Fault("source-unfit/standby", "Postgres", message, fix)
    if not facts.encrypted:
        message = "The connection to Postgres isn't encrypted, and leaves this machine."
        yield Fault("setting-differs/sslmode", "sslmode of source.dsn", message, "SHOW ssl;")
    if facts.disk_free_share is not None and facts.disk_free_share < FULL_DISK:
        message = f"{facts.disk_free_share:.0%} of the disk with Postgres' data is free."
        yield Fault("disk-low/source", "Postgres", message, "SELECT * FROM pg_replication_slots;")


def _check_limits(facts: SourceFacts) -> Iterator[Fault]:
    slots = int(facts.settings.get("max_replication_slots", 1))
    senders = int(facts.settings.get("max_wal_senders", 1))
    if facts.slot is None and len(facts.slots) >= slots:
        message = f"All of the {slots} slots are taken, so that none can be made for the connector."
        fix = f"ALTER SYSTEM SET max_replication_slots = {slots + 4};"
        yield Fault("slots-exhausted", "max_replication_slots", f"{message} {RESTART}", fix)
    if not (facts.slot and facts.slot.active) and facts.senders >= senders:
        message = f"All of the {senders} senders are at work, so that the connector gets none."
        fix = f"ALTER SYSTEM SET max_wal_senders = {senders + 4};"
        yield Fault("slots-exhausted/senders", "max_wal_senders", f"{message} {RESTART}", fix)
    name = "idle_replication_slot_timeout"
    if facts.settings.get(name, "0") != "0":
        minutes = int(facts.settings[name]) // 60
        message = f"A slot that nobody reads for {minutes} minutes is given up."
        fix = f"ALTER SYSTEM SET {name} = 0; {RELOAD}"
        yield Fault(f"setting-differs/{name}", name, message, fix)
    name = "max_slot_wal_keep_size"
    if facts.settings.get(name) == "-1":
        message = f"{name} = -1: a slot that nobody reads keeps log without a limit."
        fix = f"ALTER SYSTEM SET {name} = '100GB'; {RELOAD}"
        yield Fault(f"setting-differs/{name}", name, message, fix)


def _check_slots(facts: SourceFacts) -> Iterator[Fault]:
    for slot in facts.slots:
        kept = slot.retained_bytes or 0
        if slot is not facts.slot and not slot.active and kept >= IDLE_BYTES:
            message = f"Nobody reads slot {slot.name}, which keeps {kept >> 20} MiB of log."
            fix = f"SELECT * FROM pg_replication_slots WHERE slot_name = '{slot.name}';"
            yield Fault("log-held/slot", slot.name, message, fix)
    if facts.slot:
        yield from _check_own_slot(facts, facts.slot)


def _check_own_slot(facts: SourceFacts, slot: Slot) -> Iterator[Fault]:
    name = facts.pipeline
    if slot.plugin != "pgoutput" or slot.database != facts.database:
        message = f"Slot {name} belongs to something else: plugin {slot.plugin}, database {slot.database}."
        yield Fault("slot-foreign", name, message, "SELECT * FROM pg_replication_slots;")
        return
    if slot.active and not facts.connected:
        message = (
            f"Slot {name} is in use by process {slot.active_pid} of Postgres, yet this Connect has no"
            f" connector {name}: a second pipeline of that name runs elsewhere."
        )
        fix = f"SELECT * FROM pg_stat_activity WHERE pid = {slot.active_pid};"
        yield Fault("slot-foreign/in-use", name, message, fix)
    if slot.wal_status == "lost":
        message = f"Slot {name} is lost: Postgres has removed log that the connector still needed."
        yield Fault("slot-lost", name, message, NEW_SNAPSHOT)
    yield from check_slot_risk(name, slot.safe_wal_size, slot.retained_bytes)
    if facts.version >= FAILOVER_VERSION and facts.standbys and not slot.failover:
        message = f"Slot {name} isn't copied to standbys: a failover would lose it."
        subject = f"failover of {name}"
        fix = "SHOW sync_replication_slots;"
        yield Fault("setting-differs/failover", subject, message, fix)


def check_slot_risk(
    pipeline: str,
    safe_bytes: int | None,
    retained_bytes: int | None,
    loss_s: float | None = None,
) -> Iterator[Fault]:
    """Say when a slot keeps nearly as much log as max_slot_wal_keep_size lets it, or will within two
    hours. `loss_s`: seconds until then, if that is known.
    """
    if safe_bytes is None or retained_bytes is None:
        return
    is_full = safe_bytes < SAFE_SHARE * (safe_bytes + retained_bytes)
    if is_full or (loss_s is not None and loss_s < SOON_S):
        pace = "" if loss_s is None else f", in {duration(loss_s)} at the present pace,"
        message = f"After {max(0, safe_bytes) >> 20} MiB more of log{pace} Postgres gives slot {pipeline} up."
        yield Fault("slot-at-risk", pipeline, message, LOOK_AT_TRANSACTIONS)


def _check_transactions(facts: SourceFacts) -> Iterator[Fault]:
    if (facts.transaction_s or 0.0) > LONG_S:
        message = f"A transaction that has written is open for {facts.transaction_s:.0f} s."
        yield Fault("log-held/transaction", "pg_stat_activity", message, LOOK_AT_TRANSACTIONS)
    if (facts.prepared_s or 0.0) > LONG_S:
        message = f"A prepared transaction waits for {facts.prepared_s:.0f} s."
        fix = "SELECT gid, prepared, owner FROM pg_prepared_xacts ORDER BY prepared;"
        yield Fault("log-held/prepared", "pg_prepared_xacts", message, fix)


def check_role_use(
    name: str,
    role: RoleFacts | None,
    user: str,
    tables: Iterable[TableFacts],
    reader: str | None = None,
) -> Iterator[Fault]:
    """Judge whether the connector's role is an administrator's or an application's: `migrate` takes
    nothing from such a role. `user`: the owner; `reader`: the role of `source.reader`.
    """
    uses = ["is the user of source.dsn"] if name == user else []
    uses += ["is the user of source.reader"] if name == reader else []
    uses += ["is the server's own superuser"] if role and role.bootstrap else []
    uses += [f"owns {table.label}" for table in tables if table.owner == name]
    if uses:
        message = f"Role {name} {uses[0]}, and the connector must not be able to write there."
        fix = f"SELECT * FROM pg_roles WHERE rolname = '{name}';"
        yield Fault("role-unfit/shared", name, message, fix)


def _check_role(facts: SourceFacts) -> Iterator[Fault]:
    name = facts.role_name
    role = facts.role
    if role is None:
        message = f"There is no role {name} for the connector."
        yield Fault("role-unfit/missing", name, message, MIGRATE)
        return
    shared = list(check_role_use(name, role, facts.user, facts.tables.values(), facts.reader_name))
    if not role.can_replicate:
        yield Fault("role-unfit", name, f"Role {name} lacks LOGIN or REPLICATION.", MIGRATE)
    if role.unreadable:
        message = f"Role {name} may not read (or write) {', '.join(role.unreadable)}."
        yield Fault("role-unfit/unreadable", name, message, MIGRATE)
    if role.superuser and not shared:
        yield Fault("role-unfit/superuser", name, f"Role {name} is a superuser.", MIGRATE)
    yield from shared


def _check_reader(facts: SourceFacts) -> Iterator[Fault]:
    name = facts.reader_name
    if name is None:
        return
    if facts.missing_grants:
        message = f"Role {name} of source.reader lacks: {'; '.join(facts.missing_grants)}."
        yield Fault("reader-unfit", name, message, MIGRATE)
    for table, hidden_by in facts.hidden_from_reader.items():
        yield hidden_rows(table, name, hidden_by, CONSEQUENCE_OF_READER)


def check_publication_owner(
    name: str, publication: PublicationFacts | None, user: str
) -> Iterator[Fault]:
    """Judge whether the publication of a pipeline's name is the pipeline's, if there is one. `user`:
    our own.
    """
    if publication and not publication.owned:
        owner = publication.owner
        message = f"Publication {name} belongs to {owner}, and source.dsn logs in as {user}."
        fix = f"use {owner} in source.dsn, or give the pipeline another name"
        yield Fault("publication-foreign", name, message, fix)
    elif publication and publication.everything:
        message = f"Publication {name} is for all tables, so it isn't this pipeline's."
        fix = f"give the pipeline another name, or run DROP PUBLICATION {name}"
        yield Fault("publication-foreign", name, message, fix)


def _check_publication(facts: SourceFacts) -> Iterator[Fault]:
    name = facts.pipeline
    publication = facts.publication
    foreign = list(check_publication_owner(name, publication, facts.user))
    yield from foreign
    if foreign or not facts.control:
        return
    if publication is None:
        message = f"There is no publication {name} in {facts.database}."
        yield Fault("publication-differs/missing", name, message, MIGRATE)
        return
    captured = [table for table in facts.tables if table not in facts.refused]
    missing = [table for table in (*captured, *CONTROL_TABLES) if table not in publication.tables]
    if missing:
        message = f"Publication {name} lacks {', '.join(missing)}."
        yield Fault("publication-differs", name, message, MIGRATE)
    if publication.partial or not publication.complete:
        lacks = f"rows or columns of {', '.join(publication.partial)}"
        lacks = lacks if publication.partial else "operations, roots or generated columns"
        message = f"Publication {name} leaves out {lacks}."
        yield Fault("publication-differs/partial", name, message, MIGRATE)
    elif not publication.truncates:
        message = f"Publication {name} leaves out TRUNCATE."
        yield Fault("publication-differs/truncates", name, message, MIGRATE)
    if extra := sorted(set(publication.tables) - {*facts.tables, *CONTROL_TABLES}):
        message = f"Publication {name} offers {', '.join(extra)}, which the file doesn't name."
        yield Fault("publication-differs/extra", name, message, MIGRATE)
    elif publication.schemas:
        message = f"Publication {name} is for whole schemas: it offers whatever is created in them."
        yield Fault("publication-differs/extra", name, message, MIGRATE)


def check_table(table: TableFacts, role_name: str, role: RoleFacts | None) -> Iterator[Fault]:
    """Judge whether a table can be captured: what `migrate` can't mend."""
    name = table.label
    if table.unlogged:
        message = f"{name} isn't logged: its changes never reach the log."
        fix = f"ALTER TABLE {table.unlogged} SET LOGGED;"
        yield Fault("table-unlogged", name, message, fix, name)
    if table.virtual and (table.toastable or table.full):
        message = (
            f"{name} has virtual generated columns ({', '.join(table.virtual)}): under the REPLICA"
            " IDENTITY FULL that it has or needs, Postgres refuses every UPDATE and DELETE of it."
        )
        yield Fault("table-refused", name, message, "make them STORED, or drop them", name)
    if table.hidden_by:
        yield hidden_rows(name, role_name, table.hidden_by, exists=role is not None)


def hidden_rows(
    table: str,
    role: str,
    hidden_by: str,
    consequence: str = "a snapshot, or whatever is sent again, would lack them",
    *,
    exists: bool = True,
) -> Fault:
    """Make the fault of policies that hide rows of a table from a role, the connector's if nothing
    is said. Its fix is a statement; for a restrictive policy, which no other one undoes, what a
    person has to decide.
    """
    message = f"Policies of {table} hide rows from {role}: {consequence}."
    fix = f'CREATE POLICY "{role}" ON {quoted_name(table)} FOR SELECT TO "{role}" USING (true);'
    if hidden_by == RESTRICTIVE:
        fix = (
            f"a restrictive policy of {table} counts for {role}: name the other roles instead, by"
            " ALTER POLICY ... TO ..."
        )
    elif not exists:
        fix = f'CREATE ROLE "{role}"; {fix}'
    return Fault("row-security", table, message, fix, table)


def _check_preparation(facts: SourceFacts, name: str, table: TableFacts) -> Iterator[Fault]:
    """Judge what `migrate` makes of a table."""
    if not facts.control:
        return
    if error := facts.unidentified.get(name):
        yield Fault("identity-unfit", name, error.message, error.hint, name)
    elif table.toastable and table.lean and not table.virtual:
        message = f"{name} has columns that may be TOASTed, and no REPLICA IDENTITY FULL."
        yield Fault("identity-unfit/partial", name, message, MIGRATE, name)
    if table.unwatched:
        message = f"No trigger notes a TRUNCATE of {name}."
        yield Fault("trigger-missing/truncation", name, message, MIGRATE, name)
    if table.unguarded:
        message = f"No trigger refuses an UPDATE of {name}, whose rows are events."
        yield Fault("trigger-missing/events", name, message, MIGRATE, name)
