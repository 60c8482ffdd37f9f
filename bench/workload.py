"""The data: tables of one shape, about 200 bytes a row, and the changes made to them.

All of it is made by Postgres itself, so that no generator's speed is measured.
"""

from collections.abc import Sequence

import psycopg

CREATE = """
CREATE TABLE {table} (
    id bigint PRIMARY KEY, account integer NOT NULL, name text NOT NULL, amount numeric(12,2) NOT NULL,
    active boolean NOT NULL, note text NOT NULL, updated_at timestamptz NOT NULL
)
"""
# The same ids always come with the same text: nothing depends on the moment but updated_at.
ROW = "n, n % 9973, 'customer ' || n, (n % 100000) / 7.0, n % 3 = 0, repeat(md5(n::text), 3), clock_timestamp()"
WIDE = """
ALTER TABLE {table} ADD document jsonb;
UPDATE {table} SET document = (SELECT jsonb_agg(md5(id || ' ' || n)) FROM generate_series(1, 228) n)
"""
"""8 kB that don't shrink below what Postgres keeps outside the row; no change touches them."""

# A third each of inserts, updates and deletes, 100 rows a transaction: a block of new rows is
# written, rows anywhere are changed, the oldest block goes. So the table keeps its size.
MIXED = f"""
CREATE OR REPLACE PROCEDURE public.bench_mixed(changed regclass, transactions int) LANGUAGE plpgsql AS $$
DECLARE oldest bigint; newest bigint;
BEGIN
    EXECUTE format('SELECT min(id), max(id) FROM %s', changed) INTO oldest, newest;
    FOR number IN 1..transactions LOOP
        IF number % 3 = 1 THEN
            EXECUTE format('INSERT INTO %s SELECT {ROW.replace("%", "%%").replace("'", "''")}'
                ' FROM generate_series($1 + 1, $1 + 100) n', changed) USING newest;
            newest := newest + 100;
        ELSIF number % 3 = 2 THEN
            EXECUTE format('UPDATE %s SET amount = amount + 1, updated_at = clock_timestamp() WHERE id = ANY (
                SELECT $1 + 100 + (hashint8($3::bigint * 1000 + n) & 2147483647) %% ($2 - $1 - 99)
                FROM generate_series(1, 140) n LIMIT 100)', changed) USING oldest, newest, number;
        ELSE
            EXECUTE format('DELETE FROM %s WHERE id BETWEEN $1 AND $1 + 99', changed) USING oldest;
            oldest := oldest + 100;
        END IF;
        COMMIT;
    END LOOP;
END $$
"""
# One row a transaction, the tables in turn. As many of the oldest rows go as new ones come, the
# rest are updates. Keys are drawn by age, the newest first: uniform; zipf, whose rank is
# distributed as 1/rank; hot, where nine of ten updates meet the same 100 rows. With a rate each
# change waits for its time, and is made at once if that has passed.
SINGLE = f"""
CREATE OR REPLACE PROCEDURE public.bench_single(tables text[], changes int, moved float8, keys text, rate float8)
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp(); oldest bigint[]; newest bigint[]; lowest bigint; highest bigint;
    chosen int; dice float8; many bigint; age bigint;
BEGIN
    PERFORM setseed(0.5);
    FOR chosen IN 1..cardinality(tables) LOOP
        EXECUTE format('SELECT min(id), max(id) FROM %s', tables[chosen]) INTO lowest, highest;
        oldest[chosen] := lowest; newest[chosen] := highest;
    END LOOP;
    FOR number IN 0..changes - 1 LOOP
        IF rate > 0 THEN
            PERFORM pg_sleep(number / rate - extract(epoch FROM clock_timestamp() - began)::float8);
        END IF;
        chosen := 1 + number % cardinality(tables);
        dice := random();
        IF dice < moved THEN
            newest[chosen] := newest[chosen] + 1;
            EXECUTE format('INSERT INTO %s SELECT {ROW.replace("%", "%%").replace("'", "''")} FROM (SELECT $1 AS n) n',
                tables[chosen]) USING newest[chosen];
        ELSIF dice < 2 * moved THEN
            EXECUTE format('DELETE FROM %s WHERE id = $1', tables[chosen]) USING oldest[chosen];
            oldest[chosen] := oldest[chosen] + 1;
        ELSE
            many := newest[chosen] - oldest[chosen] + 1;
            age := CASE WHEN keys = 'zipf' THEN floor(many ^ random()) - 1
                WHEN keys = 'hot' AND random() < 0.9 THEN floor(least(many, 100) * random())
                ELSE floor(many * random()) END;
            EXECUTE format('UPDATE %s SET amount = amount + 1, updated_at = clock_timestamp() WHERE id = $1',
                tables[chosen]) USING newest[chosen] - age;
        END IF;
        COMMIT;
    END LOOP;
END $$
"""


class Data:
    """The tables of a pipeline, schema.table; all have the same columns."""

    def __init__(self, dsn: str, tables: Sequence[str]) -> None:
        self.dsn, self.tables = dsn, list(tables)

    def fill(self, rows: int, *, wide: bool = False) -> None:
        """Make the tables with so many rows each, ids from 1; wide rows have a JSON column of 8 kB
        as well.
        """
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(MIXED)
            connection.execute(SINGLE)
            for table in self.tables:
                connection.execute(CREATE.format(table=table))
                connection.execute(
                    f"INSERT INTO {table} SELECT {ROW} FROM generate_series(1, {rows}::bigint) n"
                )
                if wide:
                    connection.execute(WIDE.format(table=table))
                connection.execute(f"ANALYZE {table}")

    def mixed(self, changes: int) -> None:
        """W1: so many changes of the first table, a third each, in transactions of 100 rows."""
        self._call("CALL public.bench_mixed(%s, %s)", self.tables[0], changes // 100)

    def single(
        self, changes: int, *, moved: float = 0.0, keys: str = "uniform", rate: float = 0.0
    ) -> None:
        """W2, W6: so many transactions of one row; see SINGLE. `moved` is the share of inserts, and
        also the share of deletes.

        `rate` is in transactions per second; 0 is as fast as they commit.
        """
        self._call(
            "CALL public.bench_single(%s, %s, %s, %s, %s)", self.tables, changes, moved, keys, rate
        )

    def scattered(self, changes: int, seed: int) -> None:
        """W3: updates of so many rows of the first table, anywhere in it, each once, in one
        transaction.
        """
        self._call(
            f"UPDATE {self.tables[0]} SET amount = amount + 1, updated_at = clock_timestamp() WHERE id IN"
            f" (SELECT id FROM {self.tables[0]} ORDER BY md5(%s || id::text) LIMIT %s)",
            str(seed),
            changes,
        )

    def _call(self, statement: str, *values: object) -> None:
        # Nothing waits for the disk: a transaction of one row would take as long as that does.
        with psycopg.connect(
            self.dsn, autocommit=True, options="-c synchronous_commit=off"
        ) as connection:
            connection.execute(statement, values)
