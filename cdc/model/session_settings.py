"""Settings of Postgres that every session of a pipeline pins.

The owner of a database or a role can set them for its sessions (`ALTER DATABASE ... SET`). Some
change how values are written, which would make views differ from the source; others end a session
that waits or works for long.
"""

PINNED: dict[str, str] = {
    # How values are written. The connector reads intervals, bytes and amounts of money in one form.
    "bytea_output": "hex",
    "datestyle": "ISO",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "lc_monetary": "C",
    "timezone": "UTC",
    # The connector looks a column's type up by its name, which this setting would quote.
    "quote_all_identifiers": "off",
    # How statements are read.
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    # What a session may do, and for how long.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "exit_on_error": "off",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
    "restrict_nonsystem_relation_kind": "",
    "role": "none",
    "row_security": "on",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    # How long the server waits for a silent connector before it ends its session.
    "wal_sender_timeout": "60s",
}
"""The value of each setting, by its name. A test turns every setting of a server, and fails for one
that is missing here.
"""
SINCE = {"transaction_timeout": 170000, "restrict_nonsystem_relation_kind": 170000}
"""The first `server_version_num` with a setting that Postgres 14 lacks. A server refuses a session
with a setting that it doesn't know.
"""

CATALOG_FIRST = """
SELECT pg_catalog.set_config('search_path', pg_catalog.rtrim(
    pg_catalog.concat_ws(', ', 'pg_catalog', pg_catalog.current_setting('search_path')), ', '), false)
""".strip()
"""A statement that puts Postgres' own functions, operators, types and tables before all others.

A path may name another schema before `pg_catalog`, with a function `now`, an operator `=` or a type
`date`, as Orafce advises. The rest of the path stays as it is: it leads to the operators of
extensions.
"""
WORKER_ZONE = "The Kafka Connect worker's time zone is"
"""The beginning of the message of `ZONE_GUARD`."""
ZONE_GUARD = f"""\
DO $$ BEGIN
IF (SELECT bool_or(extract(timezone FROM moment) <> 0)
    FROM unnest('{{1900-07-01,1950-07-01,2025-01-01,2025-07-01}}'::timestamptz[]) AS moment) THEN
RAISE EXCEPTION USING ERRCODE = '28000', MESSAGE =
    $m${WORKER_ZONE} $m$ || current_setting('timezone') || $m$: start it with -Duser.timezone=UTC$m$;
END IF;
END $$"""
"""A statement that fails in a session whose time zone isn't UTC.

pgjdbc sends the zone of its JVM when a session starts, after the options, and nothing overrides it in
the session that reads the log. Time stamps within ranges and composite types would be written in that
zone. Debezium ends its task at errors of class 28 only (`PostgresErrorHandler`); after others it
tries again.
"""


def session_options(version: int) -> str:
    """Write the settings as the parameter `options` of a connection, where they take precedence over
    the settings of the database and the role. `version` is `server_version_num`.
    """
    return " ".join(
        "-c {}={}".format(name, value.replace(" ", "\\ "))
        for name, value in PINNED.items()
        if version >= SINCE.get(name, 0)
    )


def settings_since(oldest: int, version: int) -> dict[str, str]:
    """The settings that a server of `version` has, and one of `oldest` lacks."""
    return {name: value for name, value in PINNED.items() if oldest < SINCE.get(name, 0) <= version}
