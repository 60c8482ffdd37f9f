-- A journal of table definitions: logical decoding carries none of them. It says what makes rows come and go without
-- events, too: partitions, rewrites of a table, renamed labels of a type.

CREATE TABLE cdc.ddl (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    lsn        pg_lsn NOT NULL DEFAULT pg_current_wal_insert_lsn(),
    command    text NOT NULL,
    relation   bigint NOT NULL,
    table_name text NOT NULL,
    columns    jsonb,
    partitions jsonb
);
COMMENT ON TABLE cdc.ddl IS
    'what each table looked like after each CREATE, ALTER and DROP TABLE; columns is null after a drop';
COMMENT ON COLUMN cdc.ddl.command IS
    'the command''s tag; never its text, which may hold values';
COMMENT ON COLUMN cdc.ddl.relation IS
    'the table''s oid, which a rename leaves alone';
COMMENT ON COLUMN cdc.ddl.partitions IS
    'names of the partitions that hold rows, sorted; null for a table without partitions';
CREATE INDEX ON cdc.ddl (relation, id);
CREATE INDEX ON cdc.ddl (table_name) WHERE command = 'PUBLISH';
-- A wide table's columns are stored out of line.
ALTER TABLE cdc.ddl REPLICA IDENTITY FULL;

-- A type, and every type that its values are made of: elements, a domain's base, bounds of a range, attributes.
CREATE FUNCTION cdc.types_below(root oid) RETURNS SETOF oid
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE below (oid) AS (
        SELECT root
        UNION
        SELECT part.oid
        FROM below JOIN pg_type t ON t.oid = below.oid
        CROSS JOIN LATERAL (
            SELECT t.typelem WHERE t.typelem <> 0
            UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
            UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
            UNION ALL SELECT m.atttypid FROM pg_attribute m
                WHERE t.typrelid <> 0 AND m.attrelid = t.typrelid AND m.attnum > 0 AND NOT m.attisdropped
        ) AS part (oid)
    )
    SELECT oid FROM below
$$;

-- Read with the calling statement's own snapshot, as the journal is: pg_partition_tree() already knows what was committed
-- after that, and a comparison would take it for a change that nobody has noted.
CREATE FUNCTION cdc.leaves(relation oid) RETURNS SETOF oid
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE part (oid, relkind) AS (
        SELECT c.oid, c.relkind FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = relation AND c.relispartition AND NOT i.inhdetachpending
        UNION ALL
        SELECT c.oid, c.relkind FROM part JOIN pg_inherits i ON i.inhparent = part.oid JOIN pg_class c ON c.oid = i.inhrelid
        WHERE part.relkind = 'p' AND NOT i.inhdetachpending
    )
    SELECT oid FROM part WHERE relkind <> 'p'
$$;

-- What the columns of tables are. All tables at once: planning this takes longer than describing one.
--
-- `missing`: rows from before the column have a value for it, which may also be a domain's default.
--
-- `types`: of a column's type, at any depth, what is part of the text of rows: a domain's base, an enum's labels by the
-- oid that a row holds, a composite's attributes. Types of Postgres itself, with oids below 16384, have none of these.
--
-- `identified`: whether the column is in the replica identity of the table, or of all of its partitions. A delete, and an
-- update that moves a key, are logged with the columns of the identity; if that is an index without the key, they name no
-- row. FULL has every column, and so has DEFAULT here, which has the key. Without any identity Postgres refuses updates and
-- deletes, so nothing is lost.
--
-- The settings: the journal is written in sessions of applications, whose settings change how types and defaults are
-- printed. An entry would then seem to differ from what a comparison reads.
CREATE FUNCTION cdc.descriptions(relations oid[], OUT relation oid, OUT columns jsonb) RETURNS SETOF record
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    SET quote_all_identifiers = off SET bytea_output = 'hex' SET datestyle = 'ISO, MDY'
    SET extra_float_digits = 1 SET intervalstyle = 'postgres' SET timezone = 'UTC'
AS $$
    WITH attribute AS MATERIALIZED (
        SELECT attrelid, attnum, attname, atttypid, atttypmod, attnotnull, atthasmissing
        FROM pg_attribute WHERE attrelid = ANY (relations) AND attnum > 0 AND NOT attisdropped
    ), root AS MATERIALIZED (
        SELECT DISTINCT atttypid AS oid FROM attribute WHERE atttypid >= 16384
    ), below AS MATERIALIZED (
        SELECT root.oid AS root, below.oid FROM root CROSS JOIN LATERAL cdc.types_below(root.oid) AS below (oid)
    ), identity AS MATERIALIZED (
        SELECT member.root, i.indrelid AS relation, (i.indkey::int2[])[0 : i.indnkeyatts - 1] AS numbers
        FROM (
            SELECT oid AS root, oid FROM unnest(relations) AS oid
            UNION ALL
            SELECT c.oid, leaf FROM pg_class c CROSS JOIN LATERAL cdc.leaves(c.oid) AS leaf
            WHERE c.oid = ANY (relations) AND c.relkind = 'p'
        ) AS member JOIN pg_class c ON c.oid = member.oid AND c.relreplident = 'i'
        JOIN pg_index i ON i.indrelid = c.oid AND i.indisreplident
    ), composite AS (
        SELECT t.oid, jsonb_agg(m.attname || ' ' || format_type(m.atttypid, m.atttypmod) ORDER BY m.attnum) AS attributes
        FROM (SELECT DISTINCT oid FROM below) AS b JOIN pg_type t ON t.oid = b.oid AND t.typtype = 'c'
        JOIN pg_attribute m ON m.attrelid = t.typrelid AND m.attnum > 0 AND NOT m.attisdropped
        GROUP BY t.oid
    ), enum AS (
        SELECT enumtypid AS oid, jsonb_object_agg(oid, enumlabel) AS labels
        FROM pg_enum WHERE enumtypid IN (SELECT oid FROM below) GROUP BY enumtypid
    ), part AS (
        SELECT t.oid, jsonb_strip_nulls(jsonb_build_object(
            'oid', t.oid::bigint,
            'base', CASE t.typtype WHEN 'd' THEN format_type(t.typbasetype, t.typtypmod) END,
            'labels', enum.labels,
            'attributes', composite.attributes)) AS definition
        FROM (SELECT DISTINCT oid FROM below) AS b JOIN pg_type t ON t.oid = b.oid AND t.typtype IN ('c', 'd', 'e')
        LEFT JOIN enum ON enum.oid = t.oid LEFT JOIN composite ON composite.oid = t.oid
    ), made AS MATERIALIZED (
        SELECT below.root AS oid, jsonb_agg(part.definition ORDER BY part.oid) AS types
        FROM below JOIN part USING (oid) GROUP BY below.root
    )
    SELECT a.attrelid, jsonb_agg(jsonb_build_object(
               'name', a.attname,
               'number', a.attnum,
               'type', format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull,
               'default', pg_get_expr(d.adbin, d.adrelid),
               'missing', a.atthasmissing,
               'key', array_position(k.conkey, a.attnum),
               'types', coalesce(made.types, '[]'),
               'identified', NOT EXISTS (
                   SELECT FROM identity WHERE identity.root = a.attrelid AND NOT EXISTS (
                       SELECT FROM pg_attribute m WHERE m.attrelid = identity.relation
                           AND m.attname = a.attname AND m.attnum = ANY (identity.numbers)))
           ) ORDER BY a.attnum)
    FROM attribute a
    LEFT JOIN made ON made.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    GROUP BY a.attrelid
$$;

CREATE FUNCTION cdc.described(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT columns FROM cdc.descriptions(ARRAY[relation])), '[]')
$$;

CREATE FUNCTION cdc.partitions(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(jsonb_agg(n.nspname || '.' || c.relname ORDER BY n.nspname || '.' || c.relname), '[]')
    FROM cdc.leaves(relation) AS leaf (oid) JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
    HAVING EXISTS (SELECT FROM pg_class WHERE oid = relation AND relkind = 'p')
$$;

-- Whether a table is captured under its own name, or has taken the name of one that was: rows of that name are no longer
-- the same table's. A partition of a captured table that isn't captured itself needs an entry for its name alone. A
-- pipeline's publication holds the journal itself.
CREATE FUNCTION cdc.is_captured(candidate oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (
        SELECT FROM pg_publication_rel journal JOIN pg_publication_rel published USING (prpubid)
        WHERE journal.prrelid = 'cdc.ddl'::regclass AND published.prrelid = candidate
    ) OR EXISTS (
        SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN cdc.ddl d ON d.command = 'PUBLISH' AND d.table_name = n.nspname || '.' || c.relname
        WHERE c.oid = candidate
    )
$$;

-- Every sink reads the whole journal, so it has entries of captured tables only, and of partitions of which any ancestor
-- is published. Staging tables that come and go by the thousand leave no entry.
CREATE FUNCTION cdc.is_ours(candidate oid) RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT cdc.is_captured(candidate) OR EXISTS (
        SELECT FROM pg_publication_rel journal JOIN pg_publication_rel published USING (prpubid)
        WHERE journal.prrelid = 'cdc.ddl'::regclass
          AND published.prrelid IN (SELECT relid FROM pg_partition_ancestors(candidate) AS ancestor (relid))
    )
$$;

-- Tables that inherit from these, as children or partitions, on every level, and are captured under their own names.
CREATE FUNCTION cdc.captured_heirs(relations oid[]) RETURNS oid[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE heir (oid) AS (
        SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (relations)
        UNION
        SELECT i.inhrelid FROM heir JOIN pg_inherits i ON i.inhparent = heir.oid
    )
    SELECT coalesce(array_agg(oid), '{}') FROM heir WHERE oid <> ALL (relations) AND cdc.is_captured(oid)
$$;

-- A captured table may itself be a partition of a table that isn't captured. What happens to one of its partitions is
-- noted for every captured table above that, and not only for the topmost table.
CREATE FUNCTION cdc.captured_ancestors(leaf oid) RETURNS oid[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(relid::oid), '{}') FROM pg_partition_ancestors(leaf) AS ancestor (relid)
    WHERE relid <> leaf AND cdc.is_captured(relid)
$$;

-- A partition's entry comes before its table's, so that whoever reads knows a renamed one. Partitions that aren't known
-- yet come with their table, for the same reason.
CREATE FUNCTION cdc.note(command text, relations oid[]) RETURNS void
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

CREATE FUNCTION cdc.record_ddl() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    changed oid[];
BEGIN
    IF current_setting('cdc.adopting', true) = 'on' THEN
        RETURN;
    END IF;
    IF TG_TAG = 'ALTER TYPE' THEN
        -- Types that known tables have, and the altered one below them. A composite type's columns are a relation, so
        -- either may stand for it.
        WITH used AS (
            SELECT a.attrelid, a.atttypid FROM pg_attribute a
            WHERE a.attrelid IN (SELECT d.relation FROM cdc.ddl d) AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
        ), touched AS (
            SELECT root.oid FROM (SELECT DISTINCT atttypid FROM used) AS root (oid)
            WHERE EXISTS (
                SELECT FROM cdc.types_below(root.oid) AS below (oid) JOIN pg_type t ON t.oid = below.oid
                JOIN pg_event_trigger_ddl_commands() AS command ON command.objid IN (t.oid, t.typrelid))
        )
        SELECT array_agg(DISTINCT attrelid) INTO changed FROM used WHERE atttypid IN (SELECT oid FROM touched);
    ELSE
        SELECT array_agg(DISTINCT c.oid) INTO changed
        FROM pg_event_trigger_ddl_commands() AS command
        JOIN pg_class c ON CASE
            -- Another schema is another name of every table in it.
            WHEN TG_TAG = 'ALTER SCHEMA' THEN c.relnamespace = command.objid
            ELSE command.classid = 'pg_class'::regclass AND c.oid = command.objid
            END
        WHERE c.relkind IN ('r', 'p');
    END IF;
    PERFORM cdc.note(TG_TAG, changed);
    -- Their columns have changed with those of the table that the command names.
    PERFORM cdc.note(TG_TAG, cdc.captured_heirs(changed));
    PERFORM cdc.note(TG_TAG, cdc.repartitioned());
    PERFORM cdc.adopt_partitions(root.oid)
    FROM (SELECT DISTINCT pg_partition_root(oid) AS oid FROM unnest(changed) AS oid) AS root
    WHERE EXISTS (SELECT FROM pg_trigger WHERE tgrelid = root.oid AND tgfoid = 'cdc.begin_truncation()'::regprocedure);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: % is not in the DDL journal: %', TG_TAG, SQLERRM;
END
$$;

-- What was dropped is no longer published when a trigger may look: the journal knows the tables that it has noted.
CREATE FUNCTION cdc.record_drop() RETURNS event_trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.ddl (command, table_name, relation)
    SELECT TG_TAG, schema_name || '.' || object_name, objid
    FROM pg_event_trigger_dropped_objects()
    WHERE object_type = 'table' AND NOT is_temporary
      AND schema_name NOT IN ('cdc', 'pg_catalog', 'information_schema')
      AND EXISTS (SELECT FROM cdc.ddl d WHERE d.relation = objid);
    PERFORM cdc.note(TG_TAG, cdc.repartitioned());
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
        PERFORM cdc.note('REWRITE TABLE',
            pg_event_trigger_table_rewrite_oid() || cdc.captured_ancestors(pg_event_trigger_table_rewrite_oid()));
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'cdc: a rewrite is not in the DDL journal: %', SQLERRM;
END
$$;

REVOKE ALL ON FUNCTION cdc.types_below(oid), cdc.leaves(oid), cdc.descriptions(oid[]), cdc.described(oid), cdc.partitions(oid),
    cdc.is_ours(oid), cdc.is_captured(oid), cdc.captured_heirs(oid[]), cdc.captured_ancestors(oid), cdc.note(text, oid[]),
    cdc.repartitioned(), cdc.record_ddl(), cdc.record_drop(), cdc.record_rewrite() FROM PUBLIC;
