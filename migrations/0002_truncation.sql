-- TRUNCATE as a row: Debezium's own truncate event has no key, and a compacted topic rejects it.

CREATE TABLE cdc.truncation (
    table_name text PRIMARY KEY,
    at         timestamptz NOT NULL,
    lsn        pg_lsn NOT NULL,
    n          bigint NOT NULL DEFAULT 1
);
COMMENT ON TABLE cdc.truncation IS
    'the latest TRUNCATE of each captured table; changes of that table with a smaller lsn are dead';

-- Unlike the DDL journal this one has no exception handler: a TRUNCATE that can't be recorded would leave
-- every view full of rows that the source lacks, so it must fail.
-- The insert position is taken after Postgres has logged the truncation and while the table is still locked
-- exclusively: every earlier change lies below it, every later one at or above.
CREATE FUNCTION cdc.record_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.truncation AS t (table_name, at, lsn)
    VALUES (TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME, clock_timestamp(), pg_current_wal_insert_lsn())
    ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1;
    RETURN NULL;
END
$$;
REVOKE ALL ON FUNCTION cdc.record_truncation() FROM PUBLIC;
