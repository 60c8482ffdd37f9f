-- Event triggers take a superuser. Without one the rest of the pipeline works, so this says what is missing, and
-- prepare_source() makes them once a superuser runs it. After all other files: what the triggers call is there then.
CREATE FUNCTION cdc.watch_ddl() RETURNS text[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    made text[] := '{}';
    name text;
    event text;
BEGIN
    FOR name, event IN VALUES
        ('cdc_ddl', 'ddl_command_end WHEN TAG IN (''CREATE SCHEMA'', ''CREATE TABLE'', ''CREATE TABLE AS'','
                    ' ''SELECT INTO'', ''ALTER TABLE'') EXECUTE FUNCTION cdc.record_ddl()'),
        ('cdc_ddl_around', 'ddl_command_end WHEN TAG IN (''ALTER SCHEMA'', ''ALTER TYPE'')'
                           ' EXECUTE FUNCTION cdc.record_ddl()'),
        ('cdc_drop', 'sql_drop EXECUTE FUNCTION cdc.record_drop()'),
        ('cdc_rewrite', 'table_rewrite EXECUTE FUNCTION cdc.record_rewrite()')
    LOOP
        CONTINUE WHEN EXISTS (SELECT FROM pg_event_trigger WHERE evtname = name);
        EXECUTE format('CREATE EVENT TRIGGER %I ON %s', name, event);
        EXECUTE format('ALTER EVENT TRIGGER %I ENABLE ALWAYS', name);
        made := made || name;
    END LOOP;
    RETURN made;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE NOTICE 'no event triggers, which take a superuser: cdc run compares table definitions every few seconds instead';
    RETURN '{}';
END
$$;
REVOKE ALL ON FUNCTION cdc.watch_ddl() FROM PUBLIC;

SELECT cdc.watch_ddl();
