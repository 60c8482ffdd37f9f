"""Flights as in the sample's schema, made by Postgres, as many as asked for: tables of different
sizes, each with airlines, planes, airports and weather that only its own rows name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from bench.workload import Data
from cdc import migrations
from cdc.postgres import source

PARENTS = ("airlines", "airports", "planes", "weather")
AIRLINES, PLANES, AIRPORTS = 15, 4000, 100
SHARE = 30
"""Percent of the flights that are the first airline's."""
STEP = 7919
"""Has no divisor in common with any number of rows: so many rows further is another row, always."""
START = "timestamptz '2000-01-01 00:00+00'"
FILL = f"""
INSERT INTO desk.airlines SELECT '{{0}}-' || n, 'Airline ' || n FROM generate_series(0, {AIRLINES - 1}) n;
INSERT INTO desk.airports SELECT '{{0}}-' || n, 'Airport ' || n, 40 + n / 7.0, -70 - n / 3.0, n * 11, -5, 'A',
    'America/New_York' FROM generate_series(0, {AIRPORTS - 1}) n;
INSERT INTO desk.planes SELECT 'N{{0}}-' || n, 1990 + n % 23, 'Fixed wing multi engine', 'BOEING',
    '7' || n % 8 || '7-' || n % 9, 2, 100 + n % 200, NULL, 'Turbo-fan' FROM generate_series(0, {PLANES - 1}) n;
INSERT INTO desk.weather SELECT '{{0}}-' || origins, {START} + hours * interval '1 hour', 40 + hours % 50, 30, 60,
    hours % 360, 9.20624, NULL, 0, 1012.3, 10
    FROM generate_series(0, 2) origins, generate_series(0, {{1}} / 60) hours;
"""
ADD = f"""
INSERT INTO desk.flights_{{0}}
    (carrier, flight, origin, sched_dep, dest, tailnum, dep_time, dep_delay, sched_arr, distance, status)
    SELECT '{{0}}-' || CASE WHEN n % 100 < {SHARE} THEN 0 ELSE 1 + n % {AIRLINES - 1} END, n % 8000,
        '{{0}}-' || n % 3, {START} + n * interval '1 minute', '{{0}}-' || n * 31 % {AIRPORTS},
        'N{{0}}-' || n * 7 % {PLANES}, {START} + n * interval '1 minute', n % 60,
        {START} + (n + 180) * interval '1 minute', 500 + n % 2000, 'departed'
    FROM generate_series({{1}}::bigint, {{2}}::bigint - 1) n
"""
REMOVE = f"DELETE FROM {{0}} WHERE sched_dep >= {START} + {{1}} * interval '1 minute'"
# Rows anywhere, each once, `size` a transaction: their delay, and with `moved` also their plane.
# With a rate each transaction waits for its time, and is made at once if that has passed.
CHANGE = f"""
CREATE OR REPLACE PROCEDURE desk.change(flights int, rows bigint, first bigint, transactions int, size int,
    moved boolean, rate float8)
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
    plane text := CASE WHEN moved THEN format(
        $f$, tailnum = 'N%s-' || (extract(epoch FROM sched_dep)::bigint / 60 + $1) %% {PLANES}$f$, flights) END;
    statement text := format(
        $f$UPDATE desk.flights_%s SET dep_delay = (dep_delay + 1) %% 1000, updated_at = clock_timestamp()%s
        WHERE sched_dep = ANY (SELECT {START} + ($1 + n) * {STEP} %% $2 * interval '1 minute'
        FROM generate_series(0, $3 - 1) n)$f$, flights, plane);
BEGIN
    FOR number IN 0..transactions - 1 LOOP
        IF rate > 0 THEN
            PERFORM pg_sleep(number / rate - extract(epoch FROM clock_timestamp() - began)::float8);
        END IF;
        EXECUTE statement USING first + number * size, rows, size;
        COMMIT;
    END LOOP;
END $$
"""
MARK = f"""
UPDATE {{0}} SET dep_delay = 1, updated_at = clock_timestamp()
WHERE sched_dep = {START} + %s * interval '1 minute'
RETURNING carrier, flight, origin, sched_dep, updated_at
"""
AGE = f"""
UPDATE {{0}} SET updated_at = clock_timestamp() - %s * interval '1 second'
WHERE sched_dep = {START} + %s * interval '1 minute'
RETURNING carrier, flight, origin, sched_dep, updated_at
"""
COMMITTED = (
    "SELECT pg_xact_commit_timestamp(xmin) FROM {0} WHERE sched_dep = %s AND updated_at = %s"
)
VIEW = """\
  {1}:
    root: {0}
    include:
      airline: {{table: desk.airlines, on: {{carrier: carrier}}, flatten: name}}
      plane: {{table: desk.planes, on: {{tailnum: tailnum}}, columns: [manufacturer, model, seats, year]}}
      from: {{table: desk.airports, on: {{origin: faa}}, columns: [name, tzone]}}
      to: {{table: desk.airports, on: {{dest: faa}}, columns: [name, tzone]}}
      weather:
        table: desk.weather
        on: {{origin: origin, "date_trunc('hour', sched_dep)": time_hour}}
        columns: [temp, wind_speed, visib]
    to: [cache]
"""


@dataclass
class Flights:
    """A table of flights, and how many of its rows have been changed: changes go on where the last
    ones ended, so that each row is changed once before any is again.
    """

    dsn: str
    number: int
    rows: int
    changed: int = 0

    @property
    def table(self) -> str:
        """Its name, schema.table."""
        return f"desk.flights_{self.number}"

    @property
    def view(self) -> str:
        """The name of its documents."""
        return f"flight_docs_{self.number}"

    @property
    def airline(self) -> str:
        """The key of the airline with the most flights."""
        return f"{self.number}-0"

    def change(
        self, changes: int, *, moved: bool = False, size: int = 100, rate: float = 0
    ) -> None:
        """Change so many rows, `size` a transaction: a column, and with `moved` also the plane.
        `rate` is in transactions a second; 0 is as fast as they commit.
        """
        first, self.changed = self.changed, self.changed + changes
        self._run(
            "CALL desk.change(%s, %s, %s, %s, %s, %s, %s)",
            self.number,
            self.rows,
            first,
            changes // size,
            size,
            moved,
            rate,
        )

    def add(self, rows: int) -> None:
        """Insert so many rows after the last one."""
        self._run(ADD.format(self.number, self.rows, self.rows + rows))

    def remove_added(self) -> None:
        """Delete them again."""
        self._run(REMOVE.format(self.table, self.rows))

    def rename(self, name: str) -> None:
        """Rename the airline with the most flights."""
        self._run("UPDATE desk.airlines SET name = %s WHERE carrier = %s", name, self.airline)

    def renamed_at(self) -> float:
        """When that was committed, Unix seconds."""
        query = (
            "SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM desk.airlines"
        )
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(f"{query} WHERE carrier = %s", [self.airline]).fetchone()
        return float(row[0]) if row else 0.0

    def mark(
        self, connection: psycopg.Connection, row: int
    ) -> tuple[list[Any], datetime, datetime]:
        """Change a row, by its place in the order of departure: its key, as in the topics, its
        `updated_at`, and when that was committed. `connection` commits each statement.
        """
        query = MARK.format(self.table)
        *key, departure, updated = connection.execute(query, [row % self.rows]).fetchone() or ()
        (committed,) = connection.execute(
            COMMITTED.format(self.table), [departure, updated]
        ).fetchone() or (updated,)
        return [*key, _stamp(departure)], updated, committed

    def age(
        self, connection: psycopg.Connection, row: int, seconds: float
    ) -> tuple[list[Any], datetime]:
        """Set a row's `updated_at` to so many seconds ago: its key, as in the topics, and that time."""
        *key, departure, updated = (
            connection.execute(AGE.format(self.table), [seconds, row]).fetchone() or ()
        )
        return [*key, _stamp(departure)], updated

    def _run(self, statement: str, *values: object) -> None:
        # Nothing waits for the disk: a transaction of one row would take as long as that does.
        with psycopg.connect(
            self.dsn, autocommit=True, options="-c synchronous_commit=off"
        ) as connection:
            connection.execute(statement, values or None)


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def make(data: Data, sizes: Sequence[int]) -> None:
    """Make a table of flights of each size, with what it names."""
    with source.connect(data.dsn) as connection:
        migrations.migrate(connection, migrations.SAMPLE)
        # Another part of the run may have had its own.
        connection.execute("DROP SCHEMA IF EXISTS desk CASCADE")
        connection.execute("CREATE SCHEMA desk")
        tables = [*((name, name) for name in PARENTS)]
        tables += [(f"flights_{number}", "flights") for number in range(len(sizes))]
        for name, model in tables:
            connection.execute(f"CREATE TABLE desk.{name} (LIKE public.{model} INCLUDING ALL)")
        for number, rows in enumerate(sizes):
            connection.execute(FILL.format(number, rows))
            connection.execute(ADD.format(number, 0, rows))
            connection.execute(f"ANALYZE desk.flights_{number}")
        connection.execute(CHANGE)


def names(sizes: Sequence[int], parents: Sequence[str] = PARENTS) -> list[str]:
    """Name the tables, schema.table: of the flights, and of what they name."""
    flights = [f"flights_{number}" for number in range(len(sizes))]
    return [f"desk.{name}" for name in (*parents, *flights)]


def views(dsn: str, sizes: Sequence[int]) -> str:
    """Write that part of a pipeline file."""
    tables = [Flights(dsn, number, rows) for number, rows in enumerate(sizes)]
    return "views:\n" + "".join(VIEW.format(flights.table, flights.view) for flights in tables)
