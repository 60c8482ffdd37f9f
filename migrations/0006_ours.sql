-- The journal is read whole by every sink: only what becomes of captured tables is noted. Staging tables that come and
-- go by the thousand, and whatever else nobody publishes, leave no entry.

CREATE INDEX ON cdc.ddl (table_name) WHERE command = 'PUBLISH';

-- A pipeline's publication holds the journal itself. A partition belongs to whatever of its ancestors is published; and a
-- table that takes the name of one that was captured once is told, too: rows of that name are no longer the same table's.
CREATE FUNCTION cdc.is_ours(candidate oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (
        SELECT FROM pg_publication_rel journal JOIN pg_publication_rel published USING (prpubid)
        WHERE journal.prrelid = 'cdc.ddl'::regclass AND (published.prrelid = candidate OR published.prrelid IN (
            SELECT relid FROM pg_partition_ancestors(candidate) AS ancestor (relid)))
    ) OR EXISTS (
        SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN cdc.ddl d ON d.command = 'PUBLISH' AND d.table_name = n.nspname || '.' || c.relname
        WHERE c.oid = candidate
    )
$$;

-- Partitions that aren't known yet come with their table, so that whoever reads knows them when they are renamed.
CREATE OR REPLACE FUNCTION cdc.note(command text, relations oid[]) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    WITH ours AS (SELECT oid FROM unnest(relations) AS oid WHERE cdc.is_ours(oid))
    INSERT INTO cdc.ddl (command, table_name, relation, columns, partitions)
    SELECT command, n.nspname || '.' || c.relname, c.oid, cdc.described(c.oid), cdc.partitions(c.oid)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE (c.oid IN (SELECT oid FROM ours)
           OR c.oid IN (SELECT cdc.leaves(oid) FROM ours)
              AND NOT EXISTS (SELECT FROM cdc.ddl d WHERE d.relation = c.oid))
      AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
      AND n.nspname NOT IN ('cdc', 'pg_catalog', 'information_schema')
    ORDER BY c.relispartition DESC, c.oid
$$;

-- What was dropped is no longer published when a trigger may look: the journal knows what it has told of.
CREATE OR REPLACE FUNCTION cdc.record_drop() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.ddl (command, table_name, relation)
    SELECT TG_TAG, schema_name || '.' || object_name, objid
    FROM pg_event_trigger_dropped_objects()
    WHERE object_type = 'table' AND NOT is_temporary
      AND schema_name NOT IN ('cdc', 'pg_catalog', 'information_schema')
      AND EXISTS (
          SELECT FROM cdc.ddl d WHERE d.relation = objid
          UNION ALL
          SELECT FROM cdc.ddl d WHERE d.relation IS NULL AND d.table_name = schema_name || '.' || object_name);
    PERFORM cdc.note(TG_TAG, cdc.repartitioned());
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;

REVOKE ALL ON FUNCTION cdc.is_ours(oid) FROM PUBLIC;
