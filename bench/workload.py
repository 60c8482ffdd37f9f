"""The data: one table of ordinary columns, about 200 bytes a row, and the changes made to it.

All of it is made by Postgres itself, so that no generator's speed is measured.
"""

import psycopg

TABLE = "public.bench"
CREATE = """
CREATE TABLE public.bench (
    id bigint PRIMARY KEY, account integer NOT NULL, name text NOT NULL, amount numeric(12,2) NOT NULL,
    active boolean NOT NULL, note text NOT NULL, updated_at timestamptz NOT NULL
)
"""
# The same ids always come with the same text: nothing depends on the moment but updated_at.
INSERT = """
INSERT INTO public.bench
SELECT n, n % 9973, 'customer ' || n, (n % 100000) / 7.0, n % 3 = 0, repeat(md5(n::text), 3), clock_timestamp()
FROM generate_series({first}::bigint, {last}::bigint) n
"""
# A third each of inserts, updates and deletes, 100 rows a transaction: a block of new rows is written, rows anywhere
# are changed, the oldest block goes. So the table keeps its size.
MIXED = """
CREATE PROCEDURE public.bench_mixed(oldest bigint, newest bigint, transactions int) LANGUAGE plpgsql AS $$
BEGIN
    FOR number IN 1..transactions LOOP
        IF number % 3 = 1 THEN
            INSERT INTO public.bench
            SELECT n, n % 9973, 'customer ' || n, (n % 100000) / 7.0, n % 3 = 0, repeat(md5(n::text), 3),
                clock_timestamp() FROM generate_series(newest + 1, newest + 100) n;
            newest := newest + 100;
        ELSIF number % 3 = 2 THEN
            UPDATE public.bench SET amount = amount + 1, updated_at = clock_timestamp() WHERE id = ANY (
                SELECT oldest + 100 + (hashint8(number::bigint * 1000 + n) & 2147483647) % (newest - oldest - 99)
                FROM generate_series(1, 140) n LIMIT 100);
        ELSE
            DELETE FROM public.bench WHERE id BETWEEN oldest AND oldest + 99;
            oldest := oldest + 100;
        END IF;
        COMMIT;
    END LOOP;
END $$
"""


class Bench:
    """The table, and how far its ids go."""

    def __init__(self, dsn: str, rows: int) -> None:
        self.dsn, self.oldest, self.newest = dsn, 1, rows
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(CREATE)
            connection.execute(MIXED)
            connection.execute(INSERT.format(first=1, last=rows))
            connection.execute("ANALYZE public.bench")

    def mixed(self, changes: int) -> None:
        """W1: so many changes, in transactions of 100 rows."""
        transactions = changes // 100
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("CALL public.bench_mixed(%s, %s, %s)", [self.oldest, self.newest, transactions])
        self.oldest += (transactions // 3) * 100
        self.newest += ((transactions + 2) // 3) * 100

    def scattered(self, changes: int, seed: int) -> None:
        """Updates of so many rows anywhere, each once, in one transaction."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(
                "UPDATE public.bench SET amount = amount + 1, updated_at = clock_timestamp() WHERE id IN"
                " (SELECT id FROM public.bench ORDER BY md5(%s || id::text) LIMIT %s)",
                [str(seed), changes],
            )
