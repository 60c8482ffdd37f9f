"""Put days of 2013 into the sample schema as rows that were always there: the past.

In:  a database with the sample schema; a range of New York days. Out: rows of every table, complete
flights. `python -m cdc.sample.load -p FILE` loads January.
Invariant: one transaction; what is there already is left as it is, so loading twice adds nothing.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import pandas as pd
import psycopg
import typer
from psycopg import sql

from cdc.cli.console import call, print_error
from cdc.errors import CdcError, SourceError
from cdc.model import secrets
from cdc.runtime.context import Context
from cdc.sample import nyc2013

CHUNK_ROWS = 50_000


def load(dsn: str, start: date, end: date) -> dict[str, int]:
    """Load the reference tables, and flights and weather of the days; returns the rows added per
    table.

    Raises SourceError: no such schema, no such privilege.
    """
    frames = {
        "airlines": nyc2013.airlines(),
        "airports": nyc2013.airports(),
        "planes": nyc2013.planes(),
        "weather": nyc2013.weather(start, end),
        "flights": nyc2013.flights(start, end),
    }
    try:
        with psycopg.connect(secrets.read(dsn)) as conn:
            return {table: _copy(conn, table, frame) for table, frame in frames.items()}
    except psycopg.Error as error:
        raise failed(error) from error


def failed(error: psycopg.Error) -> SourceError:
    """Return an error that explains a database error to a user of the sample."""
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn):
        return SourceError(
            "the database lacks the sample schema",
            hint="run cdc -p FILE migrate --sample",
        )
    if error.diag.message_primary is None:
        return SourceError(
            f"no connection to Postgres: {error}", hint="check the DSN; cdc up prints it"
        )
    denied = isinstance(error, psycopg.errors.InsufficientPrivilege)
    hint = (
        "connect as the owner of the sample's tables"
        if denied
        else "the server's log has the details"
    )
    return SourceError(f"Postgres refused: {error.diag.message_primary}", hint=hint)


def _copy(conn: psycopg.Connection, table: str, frame: pd.DataFrame) -> int:
    """COPY knows no ON CONFLICT, so rows go through a temporary table."""
    target = sql.Identifier("public", table)
    staged = sql.Identifier(f"loading_{table}")
    columns = sql.SQL(", ").join(map(sql.Identifier, frame.columns))
    conn.execute(
        sql.SQL(
            "CREATE TEMPORARY TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA"
        ).format(staged, columns, target)
    )
    with conn.cursor() as cursor:
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(staged, columns)
        with cursor.copy(statement) as copy:
            for first in range(0, len(frame), CHUNK_ROWS):
                rows = frame.iloc[first : first + CHUNK_ROWS]
                copy.write(rows.to_csv(index=False, header=False, lineterminator="\n"))
        cursor.execute(
            sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT DO NOTHING").format(
                target, columns, columns, staged
            )
        )
        return cursor.rowcount


def main(
    pipeline: Annotated[Path, typer.Option("-p", help="The pipeline file: it names the database.")],
    state: Annotated[
        Path | None, typer.Option(help="The folder of local servers, as for cdc.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=31, help="Days of January 2013.")] = 31,
) -> None:
    """Load flights of January 2013 into the tables that `cdc migrate --sample` has made."""
    call.file = pipeline
    call.state = state
    try:
        dsn = Context(pipeline, state).load().source.dsn
        loaded = load(dsn, date(2013, 1, 1), date(2013, 1, days))
    except CdcError as error:
        print_error(error)
        raise typer.Exit(error.exit_code) from None
    typer.echo(", ".join(f"{rows:,} {table}" for table, rows in loaded.items()))


if __name__ == "__main__":
    typer.run(main)
