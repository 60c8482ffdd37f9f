-- What a run does in the source with the rights of this schema's owner, for a role that has only these functions and reads
-- the rest: the login of source.reader. prepare_source() grants them, because which role that is differs from one
-- deployment to the next. They take nothing of what they run from their caller but names, which they check.

CREATE FUNCTION cdc.compare_as_owner() RETURNS bigint
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT cdc.compare_definitions() + cdc.compare_publications()
$$;

CREATE FUNCTION cdc.adopt_as_owner(root oid) RETURNS text[]
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT cdc.adopt_later_partitions(root) WHERE cdc.is_captured(root)
$$;

-- Names are schema.table. The lock is the caller's until its transaction ends: no change below the floor comes after it.
CREATE FUNCTION cdc.raise_floor_as_owner(tables text[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    captured CONSTANT oid[] := ARRAY(
        SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname || '.' || c.relname = ANY (tables) AND c.relkind IN ('r', 'p') AND cdc.is_captured(c.oid)
        ORDER BY n.nspname || '.' || c.relname);
    relation oid;
BEGIN
    IF cardinality(captured) < cardinality(tables) THEN
        RAISE EXCEPTION 'only captured tables have a floor' USING ERRCODE = 'insufficient_privilege';
    END IF;
    FOREACH relation IN ARRAY captured LOOP
        EXECUTE format('LOCK TABLE %s IN SHARE MODE', relation::regclass);
    END LOOP;
    INSERT INTO cdc.truncation AS t (table_name, at, lsn)
    SELECT name, clock_timestamp(), pg_current_wal_insert_lsn() FROM unnest(tables) AS name
    ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1;
END
$$;

REVOKE ALL ON FUNCTION cdc.compare_as_owner(), cdc.adopt_as_owner(oid), cdc.raise_floor_as_owner(text[]) FROM PUBLIC;

-- These return what anybody reads in the catalogue; `cdc plan` asks them whether the journal is up to date.
GRANT EXECUTE ON FUNCTION cdc.types_below(oid), cdc.leaves(oid), cdc.descriptions(oid[]), cdc.described(oid),
    cdc.partitions(oid), cdc.has_event_triggers() TO PUBLIC;
