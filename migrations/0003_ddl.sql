-- A journal of table definitions: logical decoding carries none of them.

CREATE TABLE cdc.ddl (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    lsn        pg_lsn NOT NULL DEFAULT pg_current_wal_insert_lsn(),
    command    text NOT NULL,
    table_name text NOT NULL,
    columns    jsonb
);
COMMENT ON TABLE cdc.ddl IS
    'what each table looked like after each CREATE, ALTER and DROP TABLE; columns is null after a drop';
COMMENT ON COLUMN cdc.ddl.command IS
    'the command''s tag; never its text, which may hold values';
-- A wide table's columns are stored out of line.
ALTER TABLE cdc.ddl REPLICA IDENTITY FULL;

CREATE FUNCTION cdc.described(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'name', a.attname,
               'type', format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull,
               'default', pg_get_expr(d.adbin, d.adrelid),
               'key', array_position(k.conkey, a.attnum)
           ) ORDER BY a.attnum), '[]')
    FROM pg_attribute a
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
$$;
REVOKE ALL ON FUNCTION cdc.described(oid) FROM PUBLIC;

CREATE FUNCTION cdc.record_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.ddl (command, table_name, columns)
    SELECT TG_TAG, n.nspname || '.' || c.relname, cdc.described(c.oid)
    FROM (SELECT DISTINCT objid FROM pg_event_trigger_ddl_commands() WHERE classid = 'pg_class'::regclass) AS changed
    JOIN pg_class c ON c.oid = changed.objid AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname NOT IN ('cdc', 'pg_catalog', 'information_schema');
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;
REVOKE ALL ON FUNCTION cdc.record_ddl() FROM PUBLIC;

CREATE FUNCTION cdc.record_drop() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.ddl (command, table_name)
    SELECT TG_TAG, schema_name || '.' || object_name
    FROM pg_event_trigger_dropped_objects()
    WHERE object_type = 'table' AND NOT is_temporary
      AND schema_name NOT IN ('cdc', 'pg_catalog', 'information_schema');
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;
REVOKE ALL ON FUNCTION cdc.record_drop() FROM PUBLIC;

-- Event triggers take a superuser. Without one the rest of the pipeline works, so this says what is missing and
-- leaves it to a later call by a superuser: prepare_source() calls it every time.
CREATE FUNCTION cdc.watch_ddl() RETURNS text[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    made text[] := '{}';
BEGIN
    IF NOT EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'cdc_ddl') THEN
        CREATE EVENT TRIGGER cdc_ddl ON ddl_command_end
            WHEN TAG IN ('CREATE SCHEMA', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO', 'ALTER TABLE')
            EXECUTE FUNCTION cdc.record_ddl();
        ALTER EVENT TRIGGER cdc_ddl ENABLE ALWAYS;
        made := made || text 'cdc_ddl';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'cdc_drop') THEN
        CREATE EVENT TRIGGER cdc_drop ON sql_drop EXECUTE FUNCTION cdc.record_drop();
        ALTER EVENT TRIGGER cdc_drop ENABLE ALWAYS;
        made := made || text 'cdc_drop';
    END IF;
    RETURN made;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE NOTICE 'table definitions are not journalled: event triggers take a superuser; run cdc migrate as one to add them';
    RETURN '{}';
END
$$;
REVOKE ALL ON FUNCTION cdc.watch_ddl() FROM PUBLIC;

SELECT cdc.watch_ddl();
