-- TRUNCATE as a row: Debezium's own truncate event has no key, and a compacted topic rejects it.

CREATE TABLE cdc.truncation (
    table_name text PRIMARY KEY,
    at         timestamptz NOT NULL,
    lsn        pg_lsn NOT NULL,
    n          bigint NOT NULL DEFAULT 1
);
COMMENT ON TABLE cdc.truncation IS
    'the latest TRUNCATE of each captured table; changes of that table with a smaller lsn are dead';

-- TRUNCATE of a partition alone takes rows that only a trigger of its own sees. Truncating the whole table fires that
-- one too: Postgres runs all triggers BEFORE, the table's first, and then all AFTER, so in between the table's own
-- mark distinguishes them.
CREATE FUNCTION cdc.begin_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM set_config(
        'cdc.truncating', coalesce(current_setting('cdc.truncating', true), '') || format('<%s>', TG_RELID), true);
    RETURN NULL;
END
$$;

-- Unlike the DDL journal this one has no exception handler: a TRUNCATE that can't be recorded would leave
-- every view full of rows that the source lacks, so it must fail.
-- The insert position is taken after Postgres has logged the truncation and while the table is still locked
-- exclusively: every earlier change lies below it, every later one at or above.
--
-- Rows that TRUNCATE took have a floor, or an entry of their own. The file that it has made is remembered here, so that
-- a rewrite before the next look is one.
CREATE FUNCTION cdc.record_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.truncation AS t (table_name, at, lsn)
    VALUES (TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME, clock_timestamp(), pg_current_wal_insert_lsn())
    ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1;
    UPDATE cdc.storage s SET filenode = c.relfilenode FROM pg_class c
    WHERE c.oid = s.relation AND (s.relation = TG_RELID OR s.relation IN (SELECT cdc.leaves(TG_RELID)));
    PERFORM set_config(
        'cdc.truncating', replace(coalesce(current_setting('cdc.truncating', true), ''), format('<%s>', TG_RELID), ''), true);
    RETURN NULL;
END
$$;

CREATE FUNCTION cdc.record_partition_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unseen oid[];
BEGIN
    IF TG_WHEN = 'AFTER' THEN
        INSERT INTO cdc.storage (relation, filenode) SELECT oid, relfilenode FROM pg_class WHERE oid = TG_RELID
        ON CONFLICT (relation) DO UPDATE SET filenode = excluded.filenode;
        RETURN NULL;
    END IF;
    -- Those that are truncated themselves have a floor.
    SELECT array_agg(oid) INTO unseen FROM unnest(cdc.captured_ancestors(TG_RELID)) AS oid
    WHERE coalesce(current_setting('cdc.truncating', true), '') NOT LIKE format('%%<%s>%%', oid);
    IF unseen IS NOT NULL THEN
        PERFORM cdc.note('TRUNCATE PARTITION', unseen);
        DELETE FROM cdc.storage WHERE relation = TG_RELID;
    END IF;
    RETURN NULL;
END
$$;

-- A new partition inherits neither triggers of statements nor the replica identity. The trigger AFTER is for where only
-- this distinguishes a TRUNCATE from a rewrite. Returns what was done.
CREATE FUNCTION cdc.adopt_partitions(root oid) RETURNS text[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    leaf regclass;
    name text;
    moment text;
    made text[] := '{}';
BEGIN
    PERFORM set_config('cdc.adopting', 'on', true);
    FOR leaf, name, moment IN
        SELECT part.oid, wanted.* FROM cdc.leaves(root) AS part (oid),
            (VALUES ('cdc_truncation_alone', 'BEFORE'), ('cdc_truncation_done', 'AFTER')) AS wanted (name, moment)
        WHERE (wanted.moment = 'BEFORE' OR NOT cdc.has_event_triggers())
          AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = part.oid AND t.tgenabled = 'A'
                          AND t.tgname = wanted.name AND t.tgfoid = 'cdc.record_partition_truncation()'::regprocedure)
        ORDER BY part.oid::regclass::text, wanted.moment DESC
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s TRUNCATE ON %s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION cdc.record_partition_truncation()', name, moment, leaf);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', leaf, name);
        IF moment = 'BEFORE' THEN
            made := made || format('recording TRUNCATE of partition %s', leaf);
        END IF;
    END LOOP;
    FOR leaf IN
        SELECT c.oid FROM cdc.leaves(root) AS part (oid) JOIN pg_class c USING (oid), pg_class r
        WHERE r.oid = root AND r.relreplident = 'f' AND c.relreplident <> 'f'
        ORDER BY c.oid::regclass::text
    LOOP
        EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', leaf);
        made := made || format('set REPLICA IDENTITY FULL on %s', leaf);
    END LOOP;
    PERFORM set_config('cdc.adopting', '', true);
    RETURN made;
END
$$;

REVOKE ALL ON FUNCTION cdc.begin_truncation(), cdc.record_truncation(), cdc.record_partition_truncation(),
    cdc.adopt_partitions(oid) FROM PUBLIC;
