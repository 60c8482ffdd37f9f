"""The connector's role: what it is, and exactly which privileges it has.

In:  a name, perhaps a password, the captured tables. Runs inside the caller's transaction.
Out: a line for each thing that was changed; none when the role was right already.
Invariant: REPLICATION lets a role read the whole database's log, so it gets no more than this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
from psycopg import sql

from migrations.preflight import Relation

ATTRIBUTES = {
    "LOGIN": ("rolcanlogin", True),
    "REPLICATION": ("rolreplication", True),
    "NOSUPERUSER": ("rolsuper", False),
    "NOBYPASSRLS": ("rolbypassrls", False),
}
CONTROL_PRIVILEGES = {
    "heartbeat": ("SELECT", "INSERT", "UPDATE"),
    "truncation": ("SELECT",),
    "ddl": ("SELECT",),
    "signal": ("SELECT", "INSERT"),
}

# Tables of other pipelines, which may share the role: their publications are known by the heartbeat in them.
OF_OTHER_PIPELINES = """
SELECT prrelid FROM pg_publication_rel
WHERE prpubid IN (SELECT r.prpubid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                  WHERE r.prrelid = 'cdc.heartbeat'::regclass AND p.pubname <> %(pipeline)s)
"""

GRANTED = """
SELECT n.nspname, c.relname, a.privilege_type, c.oid IN (SELECT prrelid FROM pg_publication_rel r
           JOIN pg_publication p ON p.oid = r.prpubid AND p.pubname = %(pipeline)s) AS published
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN aclexplode(c.relacl) a
WHERE a.grantee = to_regrole(quote_ident(%(role)s)) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""


def ensure_role(conn: psycopg.Connection, role: str, password: str | None) -> Iterator[str]:
    columns = sql.SQL(", ").join(sql.Identifier(column) for column, _ in ATTRIBUTES.values())
    found = conn.execute(sql.SQL("SELECT {} FROM pg_roles WHERE rolname = %s").format(columns), [role]).fetchone()
    name = sql.Identifier(role)
    if found is None:
        conn.execute(sql.SQL("CREATE ROLE {} WITH {}").format(name, _words(list(ATTRIBUTES))))
        yield f"created role {role} ({' '.join(ATTRIBUTES)})"
    else:
        # Only what differs: naming SUPERUSER at all in ALTER ROLE takes a superuser.
        expected = zip(ATTRIBUTES.items(), found, strict=True)
        wrong = [word for (word, (_, wanted)), actual in expected if actual is not wanted]
        if wrong:
            conn.execute(sql.SQL("ALTER ROLE {} WITH {}").format(name, _words(wrong)))
            yield f"changed role {role} to {' '.join(wrong)}"
    if password is not None:
        # Hashed on this side, so that no server log that keeps statements gets to see it.
        verifier = conn.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
        conn.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(name, sql.Literal(verifier.decode())))
        yield f"set the password of role {role}"


def ensure_privileges(
    conn: psycopg.Connection, role: str, pipeline: str, captured: Sequence[Relation]
) -> Iterator[str]:
    """Grant what is missing; revoke the rest in captured schemas, in `cdc`, on what was captured before."""
    yield from _ensure_entry(conn, role, sorted({relation.schema for relation in captured} | {"cdc"}))
    wanted = {(relation.schema, relation.name, "SELECT") for relation in captured}
    wanted |= {("cdc", table, word) for table, words in CONTROL_PRIVILEGES.items() for word in words}
    rows = conn.execute(GRANTED, {"role": role, "pipeline": pipeline}).fetchall()
    granted = {(schema, table, word) for schema, table, word, _ in rows}
    ours = {schema for schema, _, _ in wanted}
    within = {(schema, table, word) for schema, table, word, published in rows if published or schema in ours}
    for schema, table, word in sorted(wanted - granted):
        yield _change(conn, "GRANT {} ON {} TO {}", word, sql.Identifier(schema, table), role)
    for schema, table, word in sorted(within - wanted - _of_other_pipelines(conn, pipeline)):
        yield _change(conn, "REVOKE {} ON {} FROM {}", word, sql.Identifier(schema, table), role)


def ensure_heartbeat(conn: psycopg.Connection, role: str, pipeline: str) -> Iterator[str]:
    """Give the pipeline its row, and its role the right to beat that one row."""
    added = conn.execute(
        "INSERT INTO cdc.heartbeat (pipeline) VALUES (%s) ON CONFLICT DO NOTHING RETURNING 1", [pipeline]
    ).fetchone()
    if added:
        yield f"added the heartbeat of {pipeline}"
    found = conn.execute(
        "SELECT polroles = ARRAY[to_regrole(quote_ident(%s))::oid] FROM pg_policy"
        " WHERE polrelid = 'cdc.heartbeat'::regclass AND polname = %s",
        [role, pipeline],
    ).fetchone()
    names = {"policy": sql.Identifier(pipeline), "role": sql.Identifier(role), "row": sql.Literal(pipeline)}
    if found is None:
        conn.execute(
            sql.SQL(
                "CREATE POLICY {policy} ON cdc.heartbeat TO {role}"
                " USING (pipeline = {row}) WITH CHECK (pipeline = {row})"
            ).format(**names)
        )
        yield f"allowed {role} to write the heartbeat of {pipeline} only"
    elif found == (False,):
        conn.execute(sql.SQL("ALTER POLICY {policy} ON cdc.heartbeat TO {role}").format(**names))
        yield f"handed the heartbeat of {pipeline} to {role}"


def _ensure_entry(conn: psycopg.Connection, role: str, schemas: Sequence[str]) -> Iterator[str]:
    connects = conn.execute(
        "SELECT EXISTS (SELECT FROM pg_database d CROSS JOIN aclexplode(d.datacl) a"
        " WHERE d.datname = current_database() AND a.privilege_type = 'CONNECT'"
        " AND a.grantee = to_regrole(quote_ident(%s)))",
        [role],
    ).fetchone()
    if connects != (True,):
        database = sql.Identifier(conn.info.dbname)
        yield _change(conn, "GRANT {} ON DATABASE {} TO {}", "CONNECT", database, role)
    rows = conn.execute(
        "SELECT n.nspname FROM pg_namespace n CROSS JOIN aclexplode(n.nspacl) a"
        " WHERE a.privilege_type = 'USAGE' AND a.grantee = to_regrole(quote_ident(%s))",
        [role],
    ).fetchall()
    for schema in sorted(set(schemas) - {name for (name,) in rows}):
        yield _change(conn, "GRANT {} ON SCHEMA {} TO {}", "USAGE", sql.Identifier(schema), role)


def _of_other_pipelines(conn: psycopg.Connection, pipeline: str) -> set[tuple[str, str, str]]:
    rows = conn.execute(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid IN ({OF_OTHER_PIPELINES})",
        {"pipeline": pipeline},
    ).fetchall()
    return {(schema, table, "SELECT") for schema, table in rows}


def _change(conn: psycopg.Connection, statement: str, word: str, what: sql.Identifier, role: str) -> str:
    composed = sql.SQL(statement).format(sql.SQL(word), what, sql.Identifier(role))
    conn.execute(composed)
    return composed.as_string(conn).replace('"', "")


def _words(words: Sequence[str]) -> sql.Composed:
    return sql.SQL(" ").join(sql.SQL(word) for word in words)
