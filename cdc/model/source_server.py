"""Whether changes can be captured from a Postgres server: one rule for `migrate`, `register` and
`doctor`.
"""

from dataclasses import dataclass

OLDEST_VERSION = 140000
"""As `server_version_num`."""
ON_DEMAND_VERSION = 190000
"""Since this version `wal_level = replica` is enough: the server logs what logical decoding needs as
soon as it has a logical slot (`effective_wal_level`).
"""
QUERY = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'), current_setting('server_encoding')
"""
"""Reads the arguments of `server_fault`."""


@dataclass(frozen=True)
class ServerFault:
    """Why changes can't be captured, and a statement or advice that mends it."""

    code: str
    subject: str
    message: str
    hint: str


def server_fault(version: int, wal_level: str, encoding: str) -> ServerFault | None:
    """Judge a server by its `server_version_num`, `wal_level` and `server_encoding`. Pure."""
    if version < OLDEST_VERSION:
        return ServerFault(
            "source-unfit/version",
            "Postgres",
            f"Postgres {version // 10000} is too old: 14 is the oldest that is supported.",
            "upgrade the server to 14 or later",
        )
    sufficient = ("logical", "replica") if version >= ON_DEMAND_VERSION else ("logical",)
    if wal_level not in sufficient:
        return ServerFault(
            "setting-differs/wal_level",
            "wal_level",
            f"The server has wal_level = {wal_level}; capturing changes takes {sufficient[-1]}.",
            f"ALTER SYSTEM SET wal_level = '{sufficient[-1]}', then restart the server",
        )
    if encoding == "SQL_ASCII":
        # The server stores any bytes and converts none, so a value may be invalid in every encoding.
        # At such a value the connector restarts forever.
        return ServerFault(
            "source-unfit/encoding",
            "server_encoding",
            "The database has the encoding SQL_ASCII, so its values may be invalid text, which the connector"
            " can't read.",
            "move it into a database with another encoding: createdb --encoding UTF8 --template template0 NEW,"
            " then pg_dump --encoding with the encoding of the values, and restore",
        )
    return None
