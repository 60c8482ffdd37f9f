"""Settings of Postgres that each session of a pipeline fixes for itself.

The owner of a database or a role can set them for others (`ALTER DATABASE ... SET`). Some change
how a value is written, so that the log and the views would differ; others end a session that waits
for a long time.
"""

PINNED: dict[str, str] = {
    # How values are written. The connector reads intervals, bytes and amounts of money in one form.
    "bytea_output": "hex",
    "datestyle": "ISO",
    "extra_float_digits": "1",
    "intervalstyle": "postgres",
    "lc_monetary": "C",
    "timezone": "UTC",
    # The connector finds a column's type by its name, which this would put in quotes.
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
    # How long the server waits for a sign of life before it ends the connector's session.
    "wal_sender_timeout": "60s",
}
"""The value of each setting, by its name. A test over all settings of a server finds those that are
missing here.
"""
SINCE = {"transaction_timeout": 170000, "restrict_nonsystem_relation_kind": 170000}
"""The first `server_version_num` of settings that Postgres 14 lacks. It refuses a session that
names a setting which it doesn't know.
"""


def session_options(version: int) -> str:
    """Write the settings as the parameter `options` of a connection: from its first statement on,
    they take precedence over those of the database and the role. `version` is `server_version_num`.
    """
    return " ".join(
        "-c {}={}".format(name, value.replace(" ", "\\ "))
        for name, value in PINNED.items()
        if version >= SINCE.get(name, 0)
    )


def settings_since(oldest: int, version: int) -> dict[str, str]:
    """The settings that a server of this version has and the oldest one lacks."""
    return {name: value for name, value in PINNED.items() if oldest < SINCE.get(name, 0) <= version}
