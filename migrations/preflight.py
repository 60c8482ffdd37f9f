"""Checks before a pipeline may be prepared: they read the catalogue and change nothing.

In:  names of tables, of the role and of the publication, as the pipeline file has them.
Out: the captured tables as the catalogue knows them, or the first SourceError with its repair.
Invariant: nothing here writes, so a refusal leaves the database as it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from cdc.errors import SourceError
from cdc.migrations.runner import CONTROL, migrations, recorded
from cdc.model.row_security import HIDDEN_BY, show_rows
from cdc.model.wording import quoted_name

CONTROL_TABLES = ("heartbeat", "truncation", "ddl", "signal")
RESERVED = ("cdc", "pg_catalog", "information_schema")
NOT_TABLES = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "c": "a type",
}


class Index(Protocol):
    """A unique index that tells the rows of a table apart."""

    @property
    def name(self) -> str: ...

    @property
    def oid(self) -> int: ...

    @property
    def primary(self) -> bool: ...


KeyIndex = Callable[[psycopg.Connection[Any], int, str, Sequence[str]], Index]
"""Finds the key index of a relation, by oid, name and the columns that the file names. Raises
SourceError.
"""


@dataclass
class Relation:
    """A captured table in the catalogue. `members`: its oid and those of its partitions."""

    oid: int
    schema: str
    name: str
    relkind: str
    persistence: str
    owner: str
    owned: bool
    toastable: bool
    virtual_columns: list[str]
    children: list[str]
    """Tables that inherit from it and aren't its partitions."""
    hidden_by: str
    members: list[int]
    key_index: Index | None = None
    """The unique index of the key that the pipeline file names; None where the primary key
    serves.
    """

    @property
    def label(self) -> str:
        """The name for people: schema.table, without quotes."""
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        """The name for statements, quoted."""
        return sql.Identifier(self.schema, self.name)


RELATIONS = f"""
SELECT c.oid, n.nspname AS schema, c.relname AS name, c.relkind, c.relpersistence AS persistence,
       pg_get_userbyid(c.relowner) AS owner, pg_has_role(c.relowner, 'USAGE') AS owned,
       EXISTS (SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
               WHERE a.attrelid = c.oid AND a.attnum > 0 AND t.typstorage <> 'p') AS toastable,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attgenerated = 'v' AND NOT a.attisdropped
             ORDER BY a.attnum) AS virtual_columns,
       ARRAY(SELECT kn.nspname || '.' || k.relname FROM pg_inherits i JOIN pg_class k ON k.oid = i.inhrelid
             JOIN pg_namespace kn ON kn.oid = k.relnamespace
             WHERE i.inhparent = c.oid AND c.relkind = 'r' ORDER BY 1) AS children,
       {HIDDEN_BY} AS hidden_by,
       ARRAY(SELECT c.oid UNION SELECT t.relid FROM pg_partition_tree(c.oid) t
             JOIN pg_class m ON m.oid = t.relid AND m.relkind IN ('r', 'p')) AS members
FROM unnest(%(schemas)s::text[], %(names)s::text[]) WITH ORDINALITY AS wanted (nspname, relname, position)
JOIN pg_namespace n USING (nspname)
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
ORDER BY position
"""


def relations(
    conn: psycopg.Connection,
    tables: Sequence[tuple[str, str]],
    role: str,
    key_index: KeyIndex,
    keys: Mapping[str, Sequence[str]] | None = None,
) -> list[Relation]:
    """Read the captured tables, in the order given. Raises SourceError for the first that can't be
    captured.

    `keys` names, by table, columns of a unique index that stand for a primary key.
    """
    names_in_order = list(dict.fromkeys(tables))
    if not names_in_order:
        raise SourceError(
            "no tables to capture", hint="list them under source.tables of the pipeline file"
        )
    schemas, names = zip(*names_in_order, strict=True)
    with conn.cursor(row_factory=class_row(Relation)) as cursor:
        parameters = {"role": role, "schemas": list(schemas), "names": list(names)}
        rows = cursor.execute(RELATIONS, parameters).fetchall()
    existing = {(relation.schema, relation.name) for relation in rows}
    for table in names_in_order:
        if table not in existing:
            raise _unknown(conn, table)
    for relation in rows:
        _refuse_kind(relation)
        index = key_index(conn, relation.oid, relation.label, (keys or {}).get(relation.label, ()))
        relation.key_index = None if index.primary else index
        _refuse_rows(relation, role)
        _refuse_owner(conn, relation)
    return rows


def _unknown(conn: psycopg.Connection, table: tuple[str, str]) -> SourceError:
    label = ".".join(table)
    rows = conn.execute(
        "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND n.nspname <> ALL (%s) AND n.nspname !~ '^pg_'",
        [list(RESERVED)],
    ).fetchall()
    names = {name.lower(): name for (name,) in rows}
    matches = difflib.get_close_matches(label.lower(), names, n=1)
    hint = (
        f"did you mean {names[matches[0]]}?"
        if matches
        else "create it first; \\dt lists what is there"
    )
    return SourceError(
        f"there is no table {label} in {conn.info.dbname}",
        finding_key="table-refused",
        hint=hint,
        table=label,
    )


def _refuse_kind(relation: Relation) -> None:
    table = relation.label
    if relation.schema in RESERVED:
        raise SourceError(
            f"{table} isn't an application's table",
            finding_key="table-refused",
            hint="take it out of source.tables",
            table=table,
        )
    if relation.relkind not in ("r", "p"):
        raise SourceError(
            f"{table} is {NOT_TABLES.get(relation.relkind, 'no table')}; the log has rows of tables only",
            finding_key="table-refused",
            hint="capture the tables that it is made from",
            table=table,
        )
    if relation.persistence != "p":
        unlogged = relation.persistence == "u"
        raise SourceError(
            f"{table} is {'unlogged' if unlogged else 'temporary'}: its rows never reach the log",
            finding_key="table-unlogged",
            hint=f"run ALTER TABLE {quoted_name(table)} SET LOGGED"
            if unlogged
            else "create it as a lasting table",
            table=table,
        )


def _refuse_rows(relation: Relation, role: str) -> None:
    table = relation.label
    if relation.hidden_by:
        raise SourceError(
            f"{table} has row security, which would hide rows from {role}",
            finding_key="row-security",
            hint=f"{show_rows(table, role, relation.hidden_by)}"
            f" If there is no such role yet, CREATE ROLE {role} comes before it",
            table=table,
        )
    if relation.toastable and relation.virtual_columns:
        raise SourceError(
            f"{table} has virtual generated columns ({', '.join(relation.virtual_columns)}); with the replica"
            " identity that it needs, Postgres would refuse every UPDATE and DELETE",
            finding_key="table-refused",
            hint="make them STORED, or drop them",
            table=table,
        )


def _refuse_owner(conn: psycopg.Connection, relation: Relation) -> None:
    if not relation.owned:
        raise SourceError(
            f"{relation.label} belongs to {relation.owner}, and only its owner may publish it",
            finding_key="table-refused",
            hint=f"connect as {relation.owner}, or run GRANT {relation.owner} TO {conn.info.user}",
            table=relation.label,
        )


def require_complete(conn: psycopg.Connection) -> None:
    """Check that the control schema is up to date. Raises SourceError."""
    names = [file.name for file in migrations(CONTROL)]
    if missing := sorted(set(names) - recorded(conn, "control").keys()):
        raise SourceError(
            f"{missing[0]} hasn't been applied",
            finding_key="control-missing",
            hint="run cdc migrate first",
        )


def require_control(conn: psycopg.Connection) -> None:
    """Check that the control tables belong to this role. Raises SourceError."""
    foreign = conn.execute(
        "SELECT c.oid::regclass::text, pg_get_userbyid(c.relowner) FROM pg_class c"
        " WHERE c.relnamespace = to_regnamespace('cdc') AND c.relname = ANY (%s)"
        " AND NOT pg_has_role(c.relowner, 'USAGE') ORDER BY c.oid",
        [list(CONTROL_TABLES)],
    ).fetchone()
    if foreign:
        table, owner = foreign
        raise SourceError(
            f"{table} belongs to {owner}, and only its owner may publish it",
            hint=f"connect as {owner}, or run GRANT {owner} TO {conn.info.user}",
            table=table,
        )


def require_publication(conn: psycopg.Connection, publication: str) -> None:
    """Check that this role can and may change the publication, if there is one. Raises
    SourceError.
    """
    row = conn.execute(
        "SELECT pg_get_userbyid(pubowner), pg_has_role(pubowner, 'USAGE'), puballtables"
        " FROM pg_publication WHERE pubname = %s",
        [publication],
    ).fetchone()
    if row is None:
        return
    owner, owned, everything = row
    if not owned:
        raise SourceError(
            f"publication {publication} belongs to {owner}",
            finding_key="publication-foreign",
            hint=f"connect as {owner}, or give the pipeline another name",
            publication=publication,
        )
    if everything:
        raise SourceError(
            f"publication {publication} is for all tables, so it isn't this pipeline's",
            finding_key="publication-foreign",
            hint=f"give the pipeline another name, or run DROP PUBLICATION {publication}",
            publication=publication,
        )


def require_role(conn: psycopg.Connection, role: str, captured: Sequence[Relation]) -> None:
    """Check that the connector's role isn't used by an administrator or an application. Raises
    SourceError.
    """
    if role == conn.info.user:
        raise SourceError(
            f"{role} is the role that prepares the source; the connector needs its own",
            hint="name another role for the connector; it is created here",
            role=role,
        )
    bootstrap = conn.execute(
        "SELECT 1 FROM pg_roles WHERE rolname = %s AND oid = 10", [role]
    ).fetchone()
    owned = [relation.label for relation in captured if relation.owner == role]
    if bootstrap or owned:
        use = f"owns {owned[0]}" if owned else "is the server's own superuser"
        raise SourceError(
            f"role {role} {use}; the connector must not be able to write there",
            hint="name another role for the connector; it is created here",
            role=role,
        )
