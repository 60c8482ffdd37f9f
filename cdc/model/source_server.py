"""Whether a Postgres server can be captured from: the one rule of `migrate`, `register` and
`doctor`.
"""

from dataclasses import dataclass

OLDEST_VERSION = 140000
"""As `server_version_num`."""
ON_DEMAND_VERSION = 190000
"""From here on a server with `wal_level = replica` writes for logical decoding once there is a
logical slot (its `effective_wal_level`).
"""
QUERY = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'), current_setting('server_encoding')
"""
"""What `server_fault` takes."""


@dataclass(frozen=True)
class ServerFault:
    """Why changes can't be captured, and the statement or the advice that mends it."""

    code: str
    subject: str
    message: str
    hint: str


def server_fault(version: int, wal_level: str, encoding: str) -> ServerFault | None:
    """Judge a server by its `server_version_num`, `wal_level` and `server_encoding`. Pure."""
    if version < OLDEST_VERSION:
        return ServerFault(
            "postgres-too-old",
            "Postgres",
            f"Postgres {version // 10000} is too old: 14 is the oldest that is supported.",
            "upgrade the server to 14 or later",
        )
    sufficient = ("logical", "replica") if version >= ON_DEMAND_VERSION else ("logical",)
    if wal_level not in sufficient:
        return ServerFault(
            "wal-level",
            "wal_level",
            f"The server has wal_level = {wal_level}; capturing changes takes {sufficient[-1]}.",
            f"ALTER SYSTEM SET wal_level = '{sufficient[-1]}', then restart the server",
        )
    if encoding == "SQL_ASCII":
        # The server stores any byte in it and converts none, so that a value needn't be text. The
        # connector then restarts at that value without end.
        return ServerFault(
            "source-encoding",
            "server_encoding",
            "The database has the encoding SQL_ASCII, which lets values be no text in any encoding.",
            "move it into a database with another encoding: createdb --encoding UTF8 --template template0 NEW,"
            " then pg_dump --encoding of what the values are, and restore",
        )
    return None
