"""Role of the connector: its attributes, its password, and exactly the privileges it needs.

In:  a name, perhaps a password, the captured tables. It only reads: the caller runs each statement
before it takes the next.
Out: a statement for each change; none when the role is right already.
Invariant: REPLICATION lets a role read the whole database's log, so it gets no more than this.
"""

import base64
import hashlib
import hmac
import unicodedata
from collections.abc import Iterator, Sequence
from typing import LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.migrations.statement import PASSWORD, Actor, Statement
from cdc.model import secrets
from cdc.readiness.facts import SourceRequirements, read_control, read_missing_grants

ATTRIBUTES = {
    "LOGIN": ("rolcanlogin", True),
    "REPLICATION": ("rolreplication", True),
    "NOSUPERUSER": ("rolsuper", False),
    "NOBYPASSRLS": ("rolbypassrls", False),
}

# Tables of other pipelines, which may share the role. A publication that holds the heartbeat is a
# pipeline's.
OF_OTHER_PIPELINES = """
SELECT prrelid FROM pg_publication_rel
WHERE prpubid IN (SELECT r.prpubid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                  WHERE r.prrelid = to_regclass('cdc.heartbeat') AND p.pubname <> %(pipeline)s)
"""

# Whether the server has Amazon's role in place of the attribute REPLICATION, and whether our role
# is a member.
MANAGED = """
SELECT true, coalesce(pg_has_role(to_regrole(quote_ident(%s))::oid, oid, 'MEMBER'), false)
FROM pg_roles WHERE rolname = 'rds_replication'
"""
LOGIN_S = 5

# Objects that are open to everybody need no grant, which only their owner could give. A missing
# schema will be ours.
CLOSED = """
SELECT 'CONNECT', 'DATABASE', d.datname, CASE WHEN pg_has_role(d.datdba, 'USAGE') THEN 'owner' ELSE 'administrator' END
FROM pg_database d
WHERE d.datname = current_database() AND NOT EXISTS (
    SELECT FROM aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a
    WHERE a.privilege_type = 'CONNECT' AND a.grantee IN (0, to_regrole(quote_ident(%(role)s))::oid))
UNION ALL
SELECT 'USAGE', 'SCHEMA', wanted.nspname,
       CASE WHEN n.oid IS NULL OR pg_has_role(n.nspowner, 'USAGE') THEN 'owner' ELSE 'administrator' END
FROM unnest(%(schemas)s::text[]) AS wanted (nspname) LEFT JOIN pg_namespace n USING (nspname)
WHERE NOT EXISTS (
    SELECT FROM aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
    WHERE a.privilege_type = 'USAGE' AND a.grantee IN (0, to_regrole(quote_ident(%(role)s))::oid))
ORDER BY 2, 3
"""

GRANTED = """
SELECT n.nspname, c.relname, a.privilege_type, c.oid IN (SELECT prrelid FROM pg_publication_rel r
           JOIN pg_publication p ON p.oid = r.prpubid AND p.pubname = %(pipeline)s) AS published
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN aclexplode(c.relacl) a
WHERE a.grantee = to_regrole(quote_ident(%(role)s)) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""


def ensure_role(conn: psycopg.Connection, role: str, password: str | None) -> Iterator[Statement]:
    """Create the role, or correct its attributes and its password."""
    columns = sql.SQL(", ").join(sql.Identifier(column) for column, _ in ATTRIBUTES.values())
    row = conn.execute(
        sql.SQL("SELECT {} FROM pg_roles WHERE rolname = %s").format(columns), [role]
    ).fetchone()
    managed = conn.execute(MANAGED, [role]).fetchone() or (False, False)
    if row is None:
        create = sql.SQL("CREATE ROLE {role} WITH {words}")
        if managed[0]:
            # Amazon's administrators may not grant the attribute, but membership of a role that
            # stands for it.
            create = sql.SQL("CREATE ROLE {role} WITH LOGIN; GRANT rds_replication TO {role}")
        exists = sql.SQL("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = {})")
        yield Statement(
            create.format(role=sql.Identifier(role), words=_words(list(ATTRIBUTES))),
            (f"created role {role} ({' '.join(ATTRIBUTES)})",),
            actor="administrator",
            done_check=exists.format(sql.Literal(role)),
        )
    else:
        # Only attributes that differ, because ALTER ROLE with SUPERUSER or NOSUPERUSER takes a
        # superuser.
        attributes = zip(ATTRIBUTES.items(), row, strict=True)
        wrong = [
            word
            for (word, (_, expected_value)), actual in attributes
            if actual is not expected_value
        ]
        if managed[1] and "REPLICATION" in wrong:
            wrong.remove("REPLICATION")
        if wrong:
            statement = sql.SQL("ALTER ROLE {} WITH {}").format(sql.Identifier(role), _words(wrong))
            yield Statement(
                statement, (f"changed role {role} to {' '.join(wrong)}",), actor="administrator"
            )
    password = secrets.read(password) if password is not None else None
    if password is not None and (row is None or not _has_password(conn, role, password)):
        yield _password(conn, role, password)


def _password(conn: psycopg.Connection, role: str, password: str) -> Statement:
    # Hashed here, so that the password never appears in a server log that keeps statements.
    verifier = conn.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
    change = sql.SQL("ALTER ROLE {} PASSWORD {}")
    return Statement(
        change.format(sql.Identifier(role), sql.Literal(verifier.decode())),
        (f"set the password of role {role}",),
        actor="administrator",
        secret=change.format(sql.Identifier(role), sql.SQL(f":'{PASSWORD}'")),
    )


def _has_password(conn: psycopg.Connection, role: str, password: str) -> bool:
    """Whether this is the role's password. Also true where that can't be checked, because then the
    password isn't changed.
    """
    if conn.execute("SELECT has_table_privilege('pg_catalog.pg_authid', 'SELECT')").fetchone() == (
        True,
    ):
        (stored,) = conn.execute(
            "SELECT rolpassword FROM pg_authid WHERE rolname = %s", [role]
        ).fetchone() or (None,)
        return _verifies(stored or "", password)
    # Tried by a login. A server that trusts this address accepts any password, so success proves
    # nothing.
    login = make_conninfo(
        conn.info.dsn, user=role, password=password, options="", connect_timeout=LOGIN_S
    )
    try:
        psycopg.connect(login).close()
    except psycopg.OperationalError as error:
        return "password authentication failed" not in str(error)
    return True


def _verifies(stored: str, password: str) -> bool:
    """Whether a stored verifier (RFC 5803) was made from the password."""
    scheme, _, parameters = stored.partition("$")
    if scheme != "SCRAM-SHA-256":
        return False
    rounds, salt, key, _ = parameters.replace("$", ":").split(":")
    plain = unicodedata.normalize("NFKC", password).encode()
    salted = hashlib.pbkdf2_hmac("sha256", plain, base64.b64decode(salt), int(rounds))
    client = hmac.digest(salted, b"Client Key", "sha256")
    return hmac.compare_digest(hashlib.sha256(client).digest(), base64.b64decode(key))


def ensure_privileges(
    conn: psycopg.Connection, requirements: SourceRequirements
) -> Iterator[Statement]:
    """Grant missing privileges; revoke others in captured schemas, in `cdc` and on tables captured
    until now.
    """
    role = requirements.role
    pipeline = requirements.pipeline
    expected = set(requirements.privileges)
    rows = conn.execute(GRANTED, {"role": role, "pipeline": pipeline}).fetchall()
    granted = {(schema, table, word) for schema, table, word, _ in rows}
    schemas = {schema for schema, _, _ in expected}
    revocable = {
        (schema, table, word)
        for schema, table, word, published in rows
        if published or schema in schemas
    }
    for schema, table, word in sorted(expected - granted):
        yield _change(conn, "GRANT {} ON {} TO {}", word, sql.Identifier(schema, table), role)
    for schema, table, word in sorted(revocable - expected - _of_other_pipelines(conn, pipeline)):
        yield _change(conn, "REVOKE {} ON {} FROM {}", word, sql.Identifier(schema, table), role)


def ensure_heartbeat(conn: psycopg.Connection, role: str, pipeline: str) -> Iterator[Statement]:
    """Add the pipeline's heartbeat row, and allow its role to update that row alone."""
    names = {
        "policy": sql.Identifier(pipeline),
        "role": sql.Identifier(role),
        "row": sql.Literal(pipeline),
    }
    _, beats = read_control(conn, pipeline)
    if not beats:
        insert = sql.SQL(
            "INSERT INTO cdc.heartbeat (pipeline) VALUES ({row}) ON CONFLICT DO NOTHING"
        )
        yield Statement(insert.format(**names), (f"added the heartbeat of {pipeline}",))
    row = conn.execute(
        "SELECT polroles = ARRAY[to_regrole(quote_ident(%s))::oid] FROM pg_policy"
        " WHERE polrelid = to_regclass('cdc.heartbeat') AND polname = %s",
        [role, pipeline],
    ).fetchone()
    if row is None:
        create = sql.SQL(
            "CREATE POLICY {policy} ON cdc.heartbeat TO {role} USING (pipeline = {row}) WITH CHECK (pipeline = {row})"
        )
        exists = sql.SQL(
            "SELECT EXISTS (SELECT FROM pg_policy WHERE polrelid = 'cdc.heartbeat'::regclass AND polname = {row})"
        )
        lines = (f"allowed {role} to write the heartbeat of {pipeline} only",)
        yield Statement(create.format(**names), lines, done_check=exists.format(**names))
    elif row == (False,):
        alter = sql.SQL("ALTER POLICY {policy} ON cdc.heartbeat TO {role}")
        yield Statement(alter.format(**names), (f"handed the heartbeat of {pipeline} to {role}",))


def ensure_entry(
    conn: psycopg.Connection, role: str, schemas: Sequence[str]
) -> Iterator[Statement]:
    """Grant the role CONNECT on the database and USAGE on the schemas, where neither it nor PUBLIC
    has it.
    """
    for word, kind, name, actor in conn.execute(
        CLOSED, {"role": role, "schemas": list(schemas)}
    ).fetchall():
        yield _change(
            conn, f"GRANT {{}} ON {kind} {{}} TO {{}}", word, sql.Identifier(name), role, actor
        )


def ensure_reader(
    conn: psycopg.Connection, requirements: SourceRequirements
) -> Iterator[Statement]:
    """Create the role of `source.reader`, without a password, and grant it what it lacks. It may
    have other uses, so nothing is taken from it.
    """
    role = requirements.reader
    if role is None:
        return
    if conn.execute("SELECT FROM pg_roles WHERE rolname = %s", [role]).fetchone() is None:
        exists = sql.SQL("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = {})")
        yield Statement(
            sql.SQL("CREATE ROLE {} WITH LOGIN").format(sql.Identifier(role)),
            (f"created role {role} (LOGIN), which has no password yet",),
            actor="administrator",
            done_check=exists.format(sql.Literal(role)),
        )
    for statement, by_owner in read_missing_grants(conn, requirements):
        yield Statement(
            sql.SQL(statement),
            (statement.replace('"', ""),),
            actor="owner" if by_owner else "administrator",
        )


def _of_other_pipelines(conn: psycopg.Connection, pipeline: str) -> set[tuple[str, str, str]]:
    rows = conn.execute(
        "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        f" WHERE c.oid IN ({OF_OTHER_PIPELINES})",
        {"pipeline": pipeline},
    ).fetchall()
    return {(schema, table, "SELECT") for schema, table in rows}


def _change(
    conn: psycopg.Connection,
    statement: LiteralString,
    word: str,
    target: sql.Identifier,
    role: str,
    actor: Actor = "owner",
) -> Statement:
    composed = sql.SQL(statement).format(sql.SQL(word), target, sql.Identifier(role))
    return Statement(composed, (composed.as_string(conn).replace('"', ""),), actor)


def _words(words: Sequence[str]) -> sql.Composed:
    return sql.SQL(" ").join(sql.SQL(word) for word in words)
