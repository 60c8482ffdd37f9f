"""Preparation of a source for one pipeline: role, publication, triggers, replica identities.

In:  the pipeline's name, its tables, the connector's role. Out: a line for each thing that was
changed.
Invariant: everything is checked before anything is created. A second run changes nothing; a run
with another list of tables moves the source to that list. Statements that the role may not run are
skipped and named; any other failure rolls everything back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import psycopg
from psycopg import sql

from cdc.errors import SourceError, TableRefused
from cdc.migrations.journal import (
    ensure_event_triggers,
    ensure_journal,
    ensure_published,
    published,
)
from cdc.migrations.role import (
    ensure_entry,
    ensure_heartbeat,
    ensure_privileges,
    ensure_reader,
    ensure_role,
)
from cdc.migrations.runner import (
    CONTROL,
    migration_lock,
    migrations,
    recorded,
    require_capturable,
    require_idle,
)
from cdc.migrations.statement import Outcome, Statement, carry_out
from cdc.migrations.truncation import ensure_triggers, reset_floors
from cdc.readiness.checks import check_publication_owner, check_role_use, check_table, refuse
from cdc.readiness.facts import (
    CONTROL_PRIVILEGES,
    SourceRequirements,
    TableFacts,
    bounded_locks,
    owner_of,
    read_publication,
    read_role,
    read_tables,
)
from cdc.readiness.key_index import find_table, key_index

PUBLISH = "insert, update, delete, truncate"
# Creating a trigger takes a lock that waits for open transactions, and every later query waits
# behind it.
LOCK_TIMEOUT = "10s"


class Unprivileged(SourceError):
    """The role may not do everything that is needed; `messages` say what it could do."""

    def __init__(self, conn: psycopg.Connection, outcome: Outcome) -> None:
        role = conn.info.user
        database = conn.info.dbname
        # Only the administrator's are named, where there are any: the others were refused because
        # of them.
        missing = [
            statement for statement in outcome.refused if statement.actor == "administrator"
        ] or outcome.refused
        texts = "; ".join(statement.text(conn) for statement in missing)
        super().__init__(
            f"role {role} may not run what is still needed: {texts}",
            hint="an administrator runs what this prints, e.g. cdc -p FILE migrate --sql |"
            f" psql -v ON_ERROR_STOP=1 -d {database} -f -; then: cdc -p FILE migrate",
            role=role,
        )
        self.messages = [*outcome.messages, *(f"note: {note}" for note in outcome.notes)]


def prepare_source(conn: psycopg.Connection, requirements: SourceRequirements) -> list[str]:
    """Prepare the source for the pipeline's connector.

    The connection must not be inside a transaction, and its role must own the tables. Lines that
    start with `note:` say what could not be done and isn't needed.

    Raises:
        Unprivileged: the role may not do all of it; the rest is done. SourceError: then nothing has
            been changed.
    """
    require_idle(conn)
    require_capturable(conn)
    try:
        with migration_lock(conn), bounded_locks(conn, LOCK_TIMEOUT):
            _require_complete(conn)
            captured = check_source(conn, requirements)
            outcome = carry_out(conn, required_statements(conn, requirements, captured))
    except psycopg.Error as error:
        raise SourceError(
            f"the source wasn't prepared: {error.diag.message_primary or 'the connection was lost'}",
            hint="nothing was changed; repair the cause and run cdc migrate again",
        ) from error
    if outcome.refused:
        raise Unprivileged(conn, outcome)
    notes = [*outcome.notes, *_uncaptured_children(captured)]
    return [*outcome.messages, *(f"note: {note}" for note in notes)]


def _uncaptured_children(captured: Sequence[TableFacts]) -> Iterator[str]:
    """A note for each captured table with children that aren't captured."""
    names = {relation.label for relation in captured}
    for relation in captured:
        if others := [child for child in relation.children if child not in names]:
            yield (
                f"rows of {', '.join(others)}, which inherit from {relation.label}, aren't in its views:"
                " list these tables to capture them"
            )


def heartbeat_query(pipeline: str) -> str:
    """Write the statement that the connector runs every few seconds as its heartbeat."""
    return (
        sql.SQL(
            "UPDATE cdc.heartbeat SET beat = beat + 1, at = clock_timestamp() WHERE pipeline = {}"
        )
        .format(sql.Literal(pipeline))
        .as_string()
    )


def check_source(conn: psycopg.Connection, requirements: SourceRequirements) -> list[TableFacts]:
    """Check the source, and read the captured tables.

    Raises:
        SourceError: a table can't be captured, or something belongs to another role.
    """
    _require_control(conn, owner_of(conn, requirements))
    name = requirements.pipeline
    role = requirements.role
    owner = owner_of(conn, requirements)
    attributes = read_role(conn, requirements)
    captured = _read_captured(conn, requirements)
    for table in captured:
        refuse(check_table(table, role, attributes))
        if not table.owned:
            raise _foreign_error(owner, TableRefused, table.label, table.owner)
    refuse(check_publication_owner(name, read_publication(conn, name, owner), owner))
    refuse(check_role_use(role, attributes, owner, captured, requirements.reader))
    return captured


def _read_captured(conn: psycopg.Connection, requirements: SourceRequirements) -> list[TableFacts]:
    """Read the captured tables, in the order given. Raises SourceError for the first that isn't
    there or has no key.
    """
    if not requirements.tables:
        raise SourceError(
            "no tables to capture", hint="list them under source.tables of the pipeline file"
        )
    for schema, name in requirements.tables:
        find_table(conn, schema, name)
    captured = []
    for table in read_tables(conn, requirements):
        index = key_index(conn, table.oid, table.label, requirements.keys.get(table.label, ()))
        captured.append(replace(table, key_index=None if index.primary else index))
    return captured


def _require_complete(conn: psycopg.Connection) -> None:
    """Check that the control schema is up to date. Raises SourceError."""
    names = [file.name for file in migrations(CONTROL)]
    if missing := sorted(set(names) - recorded(conn, "control").keys()):
        raise SourceError(
            f"{missing[0]} hasn't been applied",
            finding_key="control-missing",
            hint="run cdc migrate first",
        )


def _require_control(conn: psycopg.Connection, owner: str) -> None:
    """Check that the control tables belong to this role. Raises SourceError."""
    foreign = conn.execute(
        "SELECT c.oid::regclass::text, pg_get_userbyid(c.relowner) FROM pg_class c"
        " WHERE c.relnamespace = to_regnamespace('cdc') AND c.relname = ANY (%s)"
        " AND NOT pg_has_role(%s, c.relowner, 'USAGE') ORDER BY c.oid",
        [list(CONTROL_PRIVILEGES), owner],
    ).fetchone()
    if foreign:
        raise _foreign_error(owner, SourceError, *foreign)


def _foreign_error(user: str, kind: type[SourceError], table: str, owner: str) -> SourceError:
    return kind(
        f"{table} belongs to {owner}, and only its owner may publish it",
        hint=f"connect as {owner}, or run GRANT {owner} TO {user}",
        table=table,
    )


def required_statements(
    conn: psycopg.Connection, requirements: SourceRequirements, captured: Sequence[TableFacts]
) -> Iterator[Statement]:
    """Yield the missing statements in the order in which they have to run.

    It only reads, one step ahead: the caller runs each statement before it takes the next.
    """
    role = requirements.role
    pipeline = requirements.pipeline
    yield from _ensure_creation(conn, pipeline, owner_of(conn, requirements))
    yield from ensure_role(conn, role, requirements.password)
    yield from ensure_entry(
        conn, role, sorted({relation.schema for relation in captured} | {"cdc"})
    )
    # Before the publication changes: the tables in it show which privileges are out of date.
    yield from ensure_privileges(conn, requirements)
    yield from ensure_heartbeat(conn, role, pipeline)
    for relation in captured:
        yield from _ensure_identity(conn, relation)
    published_before = published(conn, pipeline)
    yield from _ensure_publication(conn, pipeline, captured)
    yield from ensure_triggers(conn, pipeline, captured, requirements.events)
    yield from reset_floors(conn)
    yield from ensure_journal(conn, captured, published_before)
    yield from ensure_published(conn, pipeline, captured)
    yield from ensure_reader(conn, requirements)
    yield from ensure_event_triggers(conn)


def _ensure_creation(conn: psycopg.Connection, pipeline: str, owner: str) -> Iterator[Statement]:
    """Grant the owner CREATE on the database, where it has to create a schema or publication and
    may not.
    """
    closed = conn.execute(
        "SELECT WHERE NOT has_database_privilege(%s, current_database(), 'CREATE')"
        " AND (to_regnamespace('cdc') IS NULL OR NOT EXISTS (SELECT FROM pg_publication WHERE pubname = %s))",
        [owner, pipeline],
    ).fetchone()
    if closed is not None:
        database = conn.info.dbname
        grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(
            sql.Identifier(database), sql.Identifier(owner)
        )
        yield Statement(
            grant, (f"GRANT CREATE ON DATABASE {database} TO {owner}",), actor="administrator"
        )


def _ensure_identity(conn: psycopg.Connection, relation: TableFacts) -> Iterator[Statement]:
    """Set REPLICA IDENTITY FULL where a column can be TOASTed; elsewhere change only one that lacks
    the key.

    Without FULL an update that leaves a TOASTed column alone doesn't carry its value, so the log
    alone couldn't rebuild the row. NOTHING, or another index, would make updates fail or hide the
    key.
    """
    rows = conn.execute(
        "SELECT n.nspname, c.relname, c.relreplident = 'f',"
        " c.relreplident = 'd' AND %(index)s::oid IS NULL OR c.relreplident = 'i' AND EXISTS"
        " (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident"
        "  AND CASE WHEN %(index)s::oid IS NULL THEN i.indisprimary ELSE i.indexrelid = %(index)s END)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%(members)s) ORDER BY 1, 2",
        {"members": relation.members, "index": relation.key_index and relation.key_index.oid},
    ).fetchall()
    for schema, name, full, keyed in rows:
        if full or (keyed and not relation.toastable):
            continue
        identity = _identity(relation)
        yield Statement(
            sql.SQL("ALTER TABLE {} REPLICA IDENTITY {}").format(
                sql.Identifier(schema, name), identity
            ),
            (f"set REPLICA IDENTITY {identity.as_string(conn)} on {schema}.{name}",),
        )


def _identity(relation: TableFacts) -> sql.Composable:
    if relation.key_index is None:
        return sql.SQL("FULL" if relation.toastable else "DEFAULT")
    # A partition has an index of its own in the place of its table's.
    if relation.toastable or relation.kind == "p":
        return sql.SQL("FULL")
    return sql.SQL("USING INDEX {}").format(sql.Identifier(relation.key_index.name))


def _ensure_publication(
    conn: psycopg.Connection, pipeline: str, captured: Sequence[TableFacts]
) -> Iterator[Statement]:
    name = sql.Identifier(pipeline)
    expected = {(relation.schema, relation.name) for relation in captured}
    expected |= {("cdc", table) for table in CONTROL_PRIVILEGES}
    # Without ONLY, tables that inherit from them would be published too.
    tables = sql.SQL(", ").join(
        sql.SQL("ONLY {}").format(sql.Identifier(*table)) for table in sorted(expected)
    )
    options = _options(conn)
    publication = read_publication(conn, pipeline)
    if publication is None:
        create = sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(
            name, tables, options
        )
        exists = sql.SQL("SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = {})").format(
            sql.Literal(pipeline)
        )
        yield Statement(
            create,
            (f"created publication {pipeline} of {len(expected)} tables",),
            done_check=exists,
        )
        return
    labels = {".".join(table) for table in expected}
    listed = set(publication.tables)
    if listed != labels or publication.partial or publication.schemas:
        lines = [f"publishing {table}" for table in sorted(labels - listed)]
        lines += [f"no longer publishing {table}" for table in sorted(listed - labels)]
        lines = lines or [f"made publication {pipeline} hold its tables whole"]
        yield Statement(
            sql.SQL("ALTER PUBLICATION {} SET TABLE {}").format(name, tables), tuple(lines)
        )
    if not (publication.complete and publication.truncates):
        lines = [f"set publication {pipeline} to {options.as_string(conn)}"]
        yield Statement(
            sql.SQL("ALTER PUBLICATION {} SET ({})").format(name, options), tuple(lines)
        )


def _options(conn: psycopg.Connection) -> sql.Composable:
    options = sql.SQL("publish = {}, publish_via_partition_root = true").format(
        sql.Literal(PUBLISH)
    )
    if conn.info.server_version >= 180000:
        # Otherwise a stored generated column is in the snapshot but never in the stream, and with
        # REPLICA IDENTITY FULL Postgres refuses every update of its table.
        options += sql.SQL(", publish_generated_columns = stored")
    return options
