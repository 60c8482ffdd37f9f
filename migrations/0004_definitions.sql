-- The journal tells a renamed table or column from a new one, and says what makes rows come and go without events:
-- partitions, rewrites of a table, renamed labels of a type.

ALTER TABLE cdc.ddl ADD relation bigint, ADD partitions jsonb;
COMMENT ON COLUMN cdc.ddl.relation IS
    'the table''s oid, which a rename leaves alone';
COMMENT ON COLUMN cdc.ddl.partitions IS
    'names of the partitions that hold rows, sorted; null for a table without partitions';
CREATE INDEX ON cdc.ddl (relation, id);

-- `missing`: rows from before the column have a value for it, which may also be a domain's default. `labels` of an enum
-- and `attributes` of a composite type are part of the text of rows.
CREATE OR REPLACE FUNCTION cdc.described(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'name', a.attname,
               'number', a.attnum,
               'type', format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull,
               'default', pg_get_expr(d.adbin, d.adrelid),
               'missing', a.atthasmissing,
               'key', array_position(k.conkey, a.attnum),
               'labels',
                   (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e
                    WHERE e.enumtypid IN (t.oid, t.typelem)),
               'attributes',
                   (SELECT jsonb_agg(m.attname || ' ' || format_type(m.atttypid, m.atttypmod) ORDER BY m.attnum)
                    FROM pg_type c JOIN pg_attribute m ON m.attrelid = c.typrelid
                    WHERE c.oid IN (t.oid, t.typelem) AND c.typtype = 'c' AND m.attnum > 0 AND NOT m.attisdropped)
           ) ORDER BY a.attnum), '[]')
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
$$;

CREATE FUNCTION cdc.leaves(relation oid) RETURNS SETOF oid
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT relid FROM pg_partition_tree(relation) WHERE isleaf AND relid <> relation
$$;

CREATE FUNCTION cdc.partitions(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(n.nspname || '.' || c.relname ORDER BY n.nspname || '.' || c.relname), '[]')
    FROM cdc.leaves(relation) AS leaf (oid) JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
    HAVING EXISTS (SELECT FROM pg_class WHERE oid = relation AND relkind = 'p')
$$;

-- A partition's entry comes before its table's, so that whoever reads knows a renamed one.
CREATE FUNCTION cdc.note(command text, relations oid[]) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO cdc.ddl (command, table_name, relation, columns, partitions)
    SELECT command, n.nspname || '.' || c.relname, c.oid, cdc.described(c.oid), cdc.partitions(c.oid)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = ANY (relations) AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
      AND n.nspname NOT IN ('cdc', 'pg_catalog', 'information_schema')
    ORDER BY c.relispartition DESC, c.oid
$$;

-- A partition that was dropped is gone from the catalogue when a trigger may look, so the journal itself has to
-- remember which table it belonged to.
CREATE FUNCTION cdc.repartitioned() RETURNS oid[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(c.oid), '{}')
    FROM pg_class c
    CROSS JOIN LATERAL (SELECT d.partitions FROM cdc.ddl d WHERE d.relation = c.oid ORDER BY d.id DESC LIMIT 1) AS last
    WHERE c.relkind = 'p' AND NOT c.relispartition AND last.partitions IS DISTINCT FROM cdc.partitions(c.oid)
$$;

CREATE OR REPLACE FUNCTION cdc.record_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    changed oid[];
BEGIN
    IF current_setting('cdc.adopting', true) = 'on' THEN
        RETURN;
    END IF;
    SELECT array_agg(DISTINCT c.oid) INTO changed
    FROM pg_event_trigger_ddl_commands() AS command
    JOIN pg_class c ON CASE
        -- A composite type's columns are a relation, so either may stand for it.
        WHEN TG_TAG = 'ALTER TYPE' THEN EXISTS (
            SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
            JOIN pg_type altered ON altered.oid IN (t.oid, t.typelem)
            WHERE a.attrelid = c.oid AND NOT a.attisdropped AND command.objid IN (altered.oid, altered.typrelid))
        -- Another schema is another name of every table in it.
        WHEN TG_TAG = 'ALTER SCHEMA' THEN c.relnamespace = command.objid
        ELSE command.classid = 'pg_class'::regclass AND c.oid = command.objid
        END
    WHERE c.relkind IN ('r', 'p');
    PERFORM cdc.note(TG_TAG, changed);
    PERFORM cdc.note(TG_TAG, cdc.repartitioned());
    PERFORM cdc.adopt_partitions(root.oid)
    FROM (SELECT DISTINCT pg_partition_root(oid) AS oid FROM unnest(changed) AS oid) AS root
    WHERE EXISTS (SELECT FROM pg_trigger WHERE tgrelid = root.oid AND tgfoid = 'cdc.begin_truncation()'::regprocedure);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;

CREATE OR REPLACE FUNCTION cdc.record_drop() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.ddl (command, table_name, relation)
    SELECT TG_TAG, schema_name || '.' || object_name, objid
    FROM pg_event_trigger_dropped_objects()
    WHERE object_type = 'table' AND NOT is_temporary
      AND schema_name NOT IN ('cdc', 'pg_catalog', 'information_schema');
    IF FOUND THEN
        PERFORM cdc.note(TG_TAG, cdc.repartitioned());
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;

-- A rewrite changes rows without events, and may leave every definition as it was (ALTER ... TYPE int USING -n).
-- The other reasons (another access method, logged or not) leave the rows alone.
CREATE FUNCTION cdc.record_rewrite() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pg_event_trigger_table_rewrite_reason() & 6 <> 0 THEN
        PERFORM cdc.note('REWRITE TABLE', ARRAY[
            pg_event_trigger_table_rewrite_oid(),
            pg_partition_root(pg_event_trigger_table_rewrite_oid())]);
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: a rewrite is not in the DDL journal: %', SQLERRM;
END
$$;

-- TRUNCATE of a partition alone takes rows that only a trigger of its own sees. Truncating the whole table fires that
-- one too: Postgres runs all triggers BEFORE, the table's first, and then all AFTER, so in between the table's own
-- mark tells the two apart.
CREATE FUNCTION cdc.begin_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM set_config(
        'cdc.truncating', coalesce(current_setting('cdc.truncating', true), '') || format('<%s>', TG_RELID), true);
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION cdc.record_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.truncation AS t (table_name, at, lsn)
    VALUES (TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME, clock_timestamp(), pg_current_wal_insert_lsn())
    ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1;
    PERFORM set_config(
        'cdc.truncating', replace(coalesce(current_setting('cdc.truncating', true), ''), format('<%s>', TG_RELID), ''), true);
    RETURN NULL;
END
$$;

CREATE FUNCTION cdc.record_partition_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    root oid := pg_partition_root(TG_RELID);
BEGIN
    -- Null: it was detached since, and its rows are no longer the table's.
    IF root <> TG_RELID AND coalesce(current_setting('cdc.truncating', true), '') NOT LIKE format('%%<%s>%%', root) THEN
        PERFORM cdc.note('TRUNCATE PARTITION', ARRAY[root]);
    END IF;
    RETURN NULL;
END
$$;

-- A new partition inherits neither triggers of statements nor the replica identity. Returns what was done.
CREATE FUNCTION cdc.adopt_partitions(root oid) RETURNS text[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    leaf regclass;
    made text[] := '{}';
BEGIN
    PERFORM set_config('cdc.adopting', 'on', true);
    FOR leaf IN
        SELECT part.oid FROM cdc.leaves(root) AS part (oid)
        WHERE NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = part.oid AND t.tgenabled = 'A'
                          AND t.tgfoid = 'cdc.record_partition_truncation()'::regprocedure)
        ORDER BY part.oid::regclass::text
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER cdc_truncation_alone BEFORE TRUNCATE ON %s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION cdc.record_partition_truncation()', leaf);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER cdc_truncation_alone', leaf);
        made := made || format('recording TRUNCATE of partition %s', leaf);
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

CREATE OR REPLACE FUNCTION cdc.watch_ddl() RETURNS text[]
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
    RAISE NOTICE 'table definitions are not journalled: event triggers take a superuser; run cdc migrate as one to add them';
    RETURN '{}';
END
$$;

REVOKE ALL ON FUNCTION cdc.leaves(oid), cdc.partitions(oid), cdc.note(text, oid[]), cdc.repartitioned(),
    cdc.record_rewrite(), cdc.begin_truncation(), cdc.record_partition_truncation(), cdc.adopt_partitions(oid)
    FROM PUBLIC;

SELECT cdc.watch_ddl();
