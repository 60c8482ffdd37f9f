"""Describe the captured tables as the catalog has them.

In:  a connection and the pipeline file.
Out: `Table`s in the order of the file; SourceError with what repairs it.
Invariant: no function here writes or leaves a setting behind.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg.types.json import Jsonb

from cdc.config.mistakes import InvalidSetting
from cdc.config.settings import Pipeline
from cdc.config.source_settings import TableSettings
from cdc.config.view_settings import SCHEMA, tables_of
from cdc.errors import SettingsError, SourceError, TableRefused
from cdc.model import column_names, pg_types
from cdc.model.mask import TYPES
from cdc.model.table import Column, Derivation, Projection, RowCondition, Table
from cdc.postgres import catalog, source
from cdc.postgres.source import Connection
from cdc.readiness import facts
from cdc.readiness.facts import SourceFacts, SourceRequirements
from cdc.readiness.key_index import find_table, key_index
from cdc.scalar.operators import quoted_name, sql_text

# All columns: the connector also checks those that are excluded.
NAMES = "SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
# A domain is captured as what it is made of. A type that the connector doesn't know comes as its
# text.
COLUMNS = """
WITH RECURSIVE bare (at, name, type, mod) AS (
    SELECT attnum, attname::text, atttypid, atttypmod FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated::text = ANY (%s)
    UNION ALL
    SELECT at, name, typbasetype, CASE mod WHEN -1 THEN typtypmod ELSE mod END
    FROM bare JOIN pg_type d ON d.oid = type WHERE typtype = 'd'
)
SELECT name, CASE WHEN e.typtype IN ('c', 'd') OR e.typtype <> 'e' AND e.typname <> ALL (%s)
                       AND e.typnamespace <> 'pg_catalog'::regnamespace
                  THEN CASE e.oid WHEN t.oid THEN 'unknown' ELSE 'unknown[]' END
                  ELSE format_type(type, mod) END,
       CASE WHEN t.typtype = 'e' THEN ARRAY(
           SELECT enumlabel::text FROM pg_enum WHERE enumtypid = t.oid ORDER BY enumsortorder) END
FROM bare JOIN pg_type t ON t.oid = type
JOIN pg_type e ON e.oid = CASE t.typcategory WHEN 'A' THEN t.typelem ELSE t.oid END
WHERE t.typtype <> 'd'
ORDER BY at
"""
# The type of a domain is its own: Debezium masks none.
MASKED = """
SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = %s AND attname = ANY (%s) AND attnum > 0 AND NOT attisdropped
"""
GENERATED = """
SELECT n.nspname || '.' || c.relname, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND NOT a.attisdropped AND a.attgenerated <> ''
      AND a.attgenerated::text <> ALL (%s)
GROUP BY 1
"""
# Each table of a JSON object, whose values are the columns of its key, with the first of its
# partitions whose replica identity lacks one of them.
UNIDENTIFIED = """
WITH RECURSIVE member (name, key, oid) AS (
    SELECT wanted.name, wanted.key, c.oid FROM jsonb_each(%s) AS wanted (name, key)
    JOIN pg_class c ON true JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname || '.' || c.relname = wanted.name
    UNION ALL
    SELECT member.name, member.key, i.inhrelid FROM member JOIN pg_inherits i ON i.inhparent = member.oid
    JOIN pg_class p ON p.oid = i.inhrelid AND p.relispartition
)
SELECT member.name, min(n.nspname || '.' || c.relname)
FROM member JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relreplident <> 'f' AND NOT EXISTS (
    SELECT FROM pg_index i
    WHERE i.indrelid = c.oid
      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
      AND member.key <@ (
          SELECT jsonb_agg(a.attname) FROM unnest(i.indkey) WITH ORDINALITY AS part (attnum, at)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.attnum
          WHERE part.at <= i.indnkeyatts))
GROUP BY member.name
"""


def describe(conn: Connection, pipeline: Pipeline) -> tuple[Table, ...]:
    """The captured tables, in the order of the pipeline file.

    Raises:
        SourceError: tables don't exist or can't be captured; the hint repairs them.
    """
    result = survey(conn, pipeline)
    if result.refused:
        raise column_names.combined_error(list(result.refused.values()))
    return result.tables


class UnknownExclude(TableRefused):
    """The pipeline file excludes a column that doesn't exist. The table can still be captured
    exactly.
    """


@dataclass(frozen=True)
class Survey:
    """The tables that can be captured, in the order of the pipeline file, and the errors for the
    others, by table.
    """

    tables: tuple[Table, ...]
    refused: Mapping[str, SourceError]


def survey(conn: Connection, pipeline: Pipeline) -> Survey:
    """Describe each captured table on its own, so that one that can't be captured doesn't stop the
    others.
    """
    tables: list[Table] = []
    refused: dict[str, SourceError] = {}
    # format_type leaves the schema out when the search path reaches the type; the rollback restores
    # the path.
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL search_path = ''")
        kinds = _published_kinds(conn, pipeline.pipeline)
        for entry in pipeline.source.tables:
            try:
                tables.append(_describe(conn, entry, pipeline, kinds))
            except SourceError as error:
                refused[entry.table] = error
        refused |= _odd_money(conn, tables)
        refused |= catalog.listed_partitions(conn, [table.qualified for table in tables])
    return Survey(tuple(table for table in tables if table.qualified not in refused), refused)


def _odd_money(conn: Connection, tables: Sequence[Table]) -> dict[str, SourceError]:
    """An error for each table with a money column, unless the database's currency has two decimals.

    Every session of the pipeline prints money with two.
    """
    named = {
        table.qualified: column.name
        for table in tables
        for column in table.columns
        if pg_types.base_type(column.type) == "money"
    }
    if not named or source.stored_units(conn) == 100:
        return {}
    return {
        table: TableRefused(
            f"{table}.{column} has the type money, and the database's lc_monetary has a currency without two decimals:"
            " the connector can't read its amounts.",
            hint=f"exclude {column}, or make it numeric: ALTER TABLE {table} ALTER {column} TYPE numeric",
            table=table,
        )
        for table, column in named.items()
    }


def unreplicated_columns(conn: Connection, pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """Generated columns that the log doesn't carry, by table. A snapshot would read them: exclude
    them.
    """
    kinds = _published_kinds(conn, pipeline.pipeline)
    tables = [entry.table for entry in pipeline.source.tables]
    return {table: tuple(columns) for table, columns in conn.execute(GENERATED, [tables, kinds])}


def _published_kinds(conn: Connection, publication: str) -> list[str]:
    """Values of `attgenerated` that the log carries: before 18 no generated columns, from 18 on
    perhaps stored ones.
    """
    if conn.info.server_version < 180000:
        return [""]
    row = conn.execute(
        "SELECT pubgencols FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    # `cdc migrate`, which comes before `cdc register`, makes the publication with stored ones.
    return ["", "s"] if row is None or row[0] == "s" else [""]


def requirements(pipeline: Pipeline, owner: str | None = None) -> SourceRequirements:
    """Translate the pipeline file into what its source database has to have. `owner`: the role of a
    connection with `source.dsn`; without one, the user that `source.dsn` names.
    """
    password = pipeline.source.replication_password
    entries = pipeline.source.tables
    pairs = [entry.table.split(".") for entry in entries]
    named = pipeline.source.reader
    if named and owner is None:
        owner = source.user_of(pipeline.source.dsn)
    reader = source.user_of(named, source.READER) if named else None
    return SourceRequirements(
        pipeline.pipeline,
        [(schema, name) for schema, name in pairs],
        pipeline.replication_user,
        password.get_secret_value() if password else None,
        {entry.table: entry.key for entry in entries if entry.key},
        [entry.table for entry in entries if entry.events],
        owner,
        reader if reader != owner else None,
    )


def unidentified(conn: Connection, tables: Iterable[Table]) -> dict[str, SourceError]:
    """An error for each table, by name, whose replica identity lacks a column of its key.

    If the identity is another index, a delete is logged without the key, and the connector writes it
    with made-up values (`TableSchemaBuilder.createKeyGenerator`): it would delete another row.
    Without an identity Postgres refuses updates and deletes.
    """
    keys = {table.qualified: list(table.key) for table in tables}
    errors = {}
    for name, part in conn.execute(UNIDENTIFIED, [Jsonb(keys)]).fetchall():
        errors[name] = SourceError(
            f"The replica identity of {part} lacks the key ({', '.join(keys[name])}): a delete wouldn't name its row.",
            finding_key="identity-unfit",
            hint="cdc -p FILE migrate",
            table=name,
        )
    return errors


def read_source(conn: Connection, pipeline: Pipeline, *, connected: bool) -> SourceFacts:
    """Read the facts about the source. `connected`: Connect has a connector of the pipeline's name.

    Raises:
        SourceError: Postgres refuses or is away, or a table stays locked. psycopg.Error likewise.
    """
    with facts.bounded_locks(conn):
        surveyed = survey(conn, pipeline)
        return facts.read_source(
            conn,
            requirements(pipeline),
            refused=surveyed.refused,
            unidentified=unidentified(conn, surveyed.tables),
            connected=connected,
        )


def table_named(tables: Sequence[Table], name: str) -> Table:
    """The table of that name, schema.table. Raises SettingsError."""
    for table in tables:
        if table.qualified == name:
            return table
    names = ", ".join(table.qualified for table in tables)
    raise SettingsError(f"The pipeline doesn't capture {name}.", hint=f"one of: {names}")


def tables_in(
    sinks: Sequence[str], tables: Sequence[Table], name: str | None = None
) -> tuple[Table, ...]:
    """Select the tables of which one of these sinks, at least, has a view, with the columns that it has. A
    table is there again for sinks that have others: each is in the sinks of its columns alone.

    `name`: of the only one that was asked for. Raises SettingsError if no sink has that.
    """
    selected: list[Table] = []
    for table in tables:
        shapes: dict[Table, list[str]] = {}
        for sink in filter(table.is_in, sinks):
            shapes.setdefault(table.for_sink(sink), []).append(sink)
        for shaped, own in shapes.items():
            others = tuple(sink for sink in sinks if sink not in own)
            selected.append(replace(shaped, unlisted_by=others) if len(shapes) > 1 else shaped)
    if name and not selected:
        setting = "to" if name.startswith(f"{SCHEMA}.") else f"sinks.{sinks[0]}.tables"
        raise SettingsError(
            f"{name} isn't in {', '.join(sinks)}.",
            hint=f"name another table or sink, or add it in the pipeline file: {setting}",
        )
    return tuple(selected)


def tables_by_name_only(pipeline: Pipeline) -> tuple[Table, ...]:
    """The captured tables without columns and key, which are unknown while Postgres is down."""
    return tuple(
        Table(
            schema,
            name,
            (),
            (),
            pipeline.topic(entry.table),
            unlisted_by=pipeline.unlisted_by(entry.table),
            projections=pipeline.projections(entry.table),
        )
        for entry in pipeline.source.tables
        for schema, name in [entry.table.split(".")]
    )


def views_by_name_only(pipeline: Pipeline) -> tuple[Table, ...]:
    """The views of several tables, also without columns and key."""
    return tuple(
        Table(
            SCHEMA,
            name,
            (),
            (),
            pipeline.view_topic(name),
            derivation=Derivation(
                "",
                tuple((table, pipeline.topic(table)) for table in tables_of(view)),
                tuple(sink for sink in view.to if sink in pipeline.sinks),
            ),
        )
        for name, view in pipeline.views.items()
    )


def _describe(
    conn: Connection,
    entry: TableSettings,
    pipeline: Pipeline,
    kinds: list[str],
) -> Table:
    schema, name = entry.table.split(".")
    oid, has_children = find_table(conn, schema, name)
    unique = key_index(conn, oid, entry.table, entry.key)
    key = entry.key or tuple(unique.columns)
    rows = conn.execute(COLUMNS, [oid, kinds, list(pg_types.CONNECTOR_TYPES)]).fetchall()
    columns = [Column(column, type_) for column, type_, _ in rows]
    labels = {column: tuple(names) for column, _, names in rows if names is not None}
    _check_columns(
        entry.table, entry.table, entry.exclude, [column.name for column in columns], key
    )
    captured = tuple(
        replace(column, mask=entry.mask.get(column.name))
        for column in columns
        if column.name not in entry.exclude
    )
    _check_masks(conn, oid, entry, key)
    topic = pipeline.topic(entry.table)
    table = Table(
        schema,
        name,
        captured,
        key,
        topic,
        index=entry.index.options,
        labels=labels,
        has_children=has_children,
        events=entry.events,
    )
    collisions = column_names.case_collisions(name for (name,) in conn.execute(NAMES, [oid]))
    if error := column_names.refusal_error(
        table, lambda table: [*collisions, *column_names.refusals(table)]
    ):
        raise error
    return for_sinks(table, pipeline)


def for_sinks(table: Table, pipeline: Pipeline) -> Table:
    """The table with what the pipeline file says of it under `sinks`."""
    projections = pipeline.projections(table.qualified)
    conditions: dict[str, RowCondition] = {}
    misnamed: dict[str, tuple[str, str]] = {}
    for sink, projection in projections.items():
        subject = f"In sinks.{sink}, {table.qualified}"
        try:
            _check_projection(table, projection, subject)
            if projection.where:
                conditions[sink] = _row_condition(table, projection.where, subject)
        except TableRefused as mistake:
            # That sink's matter: the others have the table as it is.
            misnamed[sink] = mistake.message, mistake.hint
    return replace(
        table,
        unlisted_by=pipeline.unlisted_by(table.qualified),
        projections=projections,
        conditions=conditions,
        misnamed=misnamed,
    )


def _row_condition(table: Table, text: str, subject: str) -> RowCondition:
    """Raises TableRefused."""
    # Its library takes a tenth of a second to load, and hardly a file has a condition.
    from cdc.scalar.parser import parse_condition

    try:
        term = parse_condition(table, text)
    except InvalidSetting as error:
        problem = str(error).rstrip(".")
        raise TableRefused(
            f"{subject}: where: {problem}.", hint=error.hint, table=table.qualified
        ) from None
    columns = tuple(column for column in table.columns if column.name in term.columns)

    def as_in_log(name: str) -> str:
        mask = table.column(name).mask
        return mask.sql(table.column(name).type, quoted_name(name)) if mask else quoted_name(name)

    return RowCondition(sql_text(term, as_in_log), term, columns)


def _check_projection(table: Table, projection: Projection, subject: str) -> None:
    """Raise TableRefused for columns that a sink's entry can't mean."""
    columns = [column.name for column in table.columns]
    _check_columns(table.qualified, subject, projection.named, columns, ())
    _check_columns(table.qualified, subject, projection.exclude, columns, table.key)
    kept = [name for name in columns if name in table.key or projection.keeps(name)]
    if left_out := [name for name in projection.rename if name not in kept]:
        raise TableRefused(
            f"{subject} renames {left_out[0]}, which the sink doesn't have.",
            hint=f"take {left_out[0]} out of rename, or keep the column",
            table=table.qualified,
        )
    names = [projection.rename.get(name, name) for name in kept]
    if projection.rename and (alike := column_names.alike(names)):
        raise TableRefused(
            f"{subject} has two columns of one name after rename: {' and '.join(alike[0])}.",
            hint="rename one of them to another name, which differs in more than case",
            table=table.qualified,
        )


def _check_masks(conn: Connection, oid: int, entry: TableSettings, key: Sequence[str]) -> None:
    """Refuse a mask that the connector wouldn't apply."""
    if not entry.mask:
        return
    types: dict[str, str] = dict(conn.execute(MASKED, [oid, list(entry.mask)]).fetchall())
    for name in entry.mask:
        if name not in types:
            # Not UnknownExclude: under another name its values would come unmasked.
            problem = f"{entry.table} has no column {name}, which its `mask` names."
            hint = f"correct mask of {entry.table} in the pipeline file, then: cdc -p FILE register"
        elif name in key:
            problem = f"{entry.table}.{name} is part of the key, which the connector can't mask."
            hint = f"take {name} out of mask, or choose another key (key: [...])"
        elif types[name] not in TYPES:
            problem = (
                f"{entry.table}.{name} can't be masked: the connector masks {', '.join(TYPES)}, and its"
                f" type is {types[name]}."
            )
            hint = f"take {name} out of mask, and exclude it: {{table: {entry.table}, exclude: [{name}]}}"
        else:
            continue
        raise TableRefused(problem, hint=hint, table=entry.table)


def _check_columns(
    table: str,
    subject: str,
    named: Iterable[str],
    columns: list[str],
    key: Sequence[str],
) -> None:
    """Refuse a column that a list names and the table hasn't, or that is of its key."""
    for column in named:
        if column in key:
            raise TableRefused(
                f"{subject} excludes {column}, which is part of its key.",
                hint=f"take {column} out of exclude: rows can't be identified without it",
                table=table,
            )
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            raise UnknownExclude(
                f"{subject} names {column}, but has no such column.",
                hint=f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}",
                table=table,
            )
