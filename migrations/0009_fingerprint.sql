-- What a table is, is compared with the journal also where event triggers write it: they don't see what a command does to
-- other tables than the one that it names (children of INHERITS, tables with a type that is part of another one), nor
-- what is done while they are off, or to the catalogue itself.

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

-- `types`: of a column's type, at any depth, what is part of the text of rows: a domain's base, an enum's labels by the
-- oid that a row holds, a composite's attributes. `labels` and `attributes` are those of the outermost type, as older
-- entries have them. Types of Postgres itself, with oids below 16384, have none of these. All tables at once: planning
-- this takes longer than describing one.
CREATE FUNCTION cdc.descriptions(relations oid[], OUT relation oid, OUT columns jsonb) RETURNS SETOF record
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH attribute AS MATERIALIZED (
        SELECT attrelid, attnum, attname, atttypid, atttypmod, attnotnull, atthasmissing
        FROM pg_attribute WHERE attrelid = ANY (relations) AND attnum > 0 AND NOT attisdropped
    ), root AS MATERIALIZED (
        SELECT DISTINCT atttypid AS oid FROM attribute WHERE atttypid >= 16384
    ), below AS MATERIALIZED (
        SELECT root.oid AS root, below.oid FROM root CROSS JOIN LATERAL cdc.types_below(root.oid) AS below (oid)
    ), composite AS (
        SELECT t.oid, jsonb_agg(m.attname || ' ' || format_type(m.atttypid, m.atttypmod) ORDER BY m.attnum) AS attributes
        FROM (SELECT DISTINCT oid FROM below) AS b JOIN pg_type t ON t.oid = b.oid AND t.typtype = 'c'
        JOIN pg_attribute m ON m.attrelid = t.typrelid AND m.attnum > 0 AND NOT m.attisdropped
        GROUP BY t.oid
    ), enum AS (
        SELECT enumtypid AS oid, jsonb_agg(enumlabel ORDER BY enumsortorder) AS labels,
               jsonb_object_agg(oid, enumlabel) AS labels_by_oid
        FROM pg_enum WHERE enumtypid IN (SELECT oid FROM below) GROUP BY enumtypid
    ), part AS (
        SELECT t.oid, jsonb_strip_nulls(jsonb_build_object(
            'oid', t.oid::bigint,
            'base', CASE t.typtype WHEN 'd' THEN format_type(t.typbasetype, t.typtypmod) END,
            'labels', enum.labels_by_oid,
            'attributes', composite.attributes)) AS definition
        FROM (SELECT DISTINCT oid FROM below) AS b JOIN pg_type t ON t.oid = b.oid AND t.typtype IN ('c', 'd', 'e')
        LEFT JOIN enum ON enum.oid = t.oid LEFT JOIN composite ON composite.oid = t.oid
    ), made AS MATERIALIZED (
        SELECT t.oid, enum.labels, composite.attributes,
               (SELECT jsonb_agg(part.definition ORDER BY part.oid) FROM below JOIN part USING (oid)
                WHERE below.root = t.oid) AS types
        FROM root JOIN pg_type t ON t.oid = root.oid
        LEFT JOIN enum ON enum.oid IN (t.oid, t.typelem) LEFT JOIN composite ON composite.oid IN (t.oid, t.typelem)
    )
    SELECT a.attrelid, jsonb_agg(jsonb_build_object(
               'name', a.attname,
               'number', a.attnum,
               'type', format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull,
               'default', pg_get_expr(d.adbin, d.adrelid),
               'missing', a.atthasmissing,
               'key', array_position(k.conkey, a.attnum),
               'labels', made.labels,
               'attributes', made.attributes,
               'types', coalesce(made.types, '[]')
           ) ORDER BY a.attnum)
    FROM attribute a
    LEFT JOIN made ON made.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    GROUP BY a.attrelid
$$;

CREATE OR REPLACE FUNCTION cdc.described(relation oid) RETURNS jsonb
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT columns FROM cdc.descriptions(ARRAY[relation])), '[]')
$$;

-- Read with the calling statement's own snapshot, as the journal is: pg_partition_tree() already knows what was committed
-- after that, and a comparison would take it for a change that nobody has noted.
CREATE OR REPLACE FUNCTION cdc.leaves(relation oid) RETURNS SETOF oid
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

-- Whether a table is captured under its own name, or has taken the name of one that was. A partition of a captured table
-- that isn't captured itself needs an entry for its name alone.
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

CREATE OR REPLACE FUNCTION cdc.record_ddl() RETURNS event_trigger
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

-- As before, with the id of the entry that it differs from; and of a partition that isn't captured itself the name alone
-- is compared: event triggers don't note a column for each partition that gets it.
DROP FUNCTION cdc.differing();
CREATE FUNCTION cdc.differing(OUT relation oid, OUT entry bigint, OUT grown boolean) RETURNS SETOF record
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE captured AS MATERIALIZED (
        SELECT published.prrelid AS oid
        FROM pg_publication_rel journal JOIN pg_publication_rel published USING (prpubid)
        WHERE journal.prrelid = 'cdc.ddl'::regclass
        UNION
        SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN cdc.ddl d ON d.command = 'PUBLISH' AND d.table_name = n.nspname || '.' || c.relname
        WHERE c.relkind IN ('r', 'p')
    ), ours (oid, whole) AS (
        SELECT oid, true FROM captured
        UNION
        SELECT i.inhrelid, i.inhrelid IN (SELECT oid FROM captured)
        FROM ours JOIN pg_inherits i ON i.inhparent = ours.oid JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
    ), actual AS (
        SELECT c.oid, n.nspname || '.' || c.relname AS table_name, ours.whole,
               CASE c.relkind WHEN 'p' THEN cdc.partitions(c.oid) END AS partitions
        FROM ours JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname <> 'cdc'
        WHERE c.relkind IN ('r', 'p')
    ), description AS MATERIALIZED (
        SELECT relation, columns FROM cdc.descriptions(ARRAY(SELECT oid FROM actual WHERE whole))
    ), compared AS (
        SELECT a.oid, a.table_name, a.partitions,
               CASE WHEN a.whole THEN coalesce(description.columns, '[]') ELSE d.columns END AS columns,
               d.id AS entry, d.table_name AS noted_name, d.columns AS noted_columns, d.partitions AS noted_partitions
        FROM actual a LEFT JOIN description ON description.relation = a.oid
        LEFT JOIN cdc.definition d ON d.relation = a.oid
        WHERE d.columns IS NOT NULL OR a.oid IN (SELECT oid FROM captured)
    )
    SELECT oid, entry, ((noted_name, noted_columns) IS NOT DISTINCT FROM (table_name, columns)
               AND noted_partitions <@ partitions AND NOT cdc.hold_rows(ARRAY(
                   SELECT leaf FROM cdc.leaves(oid) AS leaf
                   JOIN pg_class c ON c.oid = leaf JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE NOT noted_partitions ? (n.nspname || '.' || c.relname)))) IS TRUE
    FROM compared
    WHERE (noted_name, noted_columns, noted_partitions) IS DISTINCT FROM (table_name, columns, partitions)
$$;

-- Returns how many tables it has noted. It never waits for long: a TRUNCATE that holds a table may be waiting for this.
-- Event triggers tell a rewrite and a partition that was away from what VACUUM FULL and they themselves have noted, so
-- these are looked for where there are none.
CREATE OR REPLACE FUNCTION cdc.compare_definitions() RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
AS $$
DECLARE
    watched CONSTANT boolean := cdc.has_event_triggers();
    before bigint;
    reattached oid[];
    rewritten oid[];
    looked text[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('cdc.compare', 0)) THEN
        RETURN 0;
    END IF;
    SELECT coalesce(max(id), 0) INTO before FROM cdc.ddl;
    INSERT INTO cdc.ddl (command, table_name, relation)
    SELECT 'COMPARE', d.table_name, d.relation FROM cdc.definition d
    WHERE d.columns IS NOT NULL AND d.relation NOT IN (SELECT oid FROM pg_class);

    IF NOT watched THEN
        WITH lost AS (
            DELETE FROM cdc.attachment a
            WHERE NOT EXISTS (SELECT FROM cdc.attached t WHERE (t.root, t.member, t.mark) = (a.root, a.member, a.mark))
            RETURNING a.root
        ) SELECT array_agg(DISTINCT root) INTO reattached FROM lost;
        -- Before it is noted: what happens to them from now on may come after the entry, and is for the next look.
        PERFORM cdc.remember_attachments();
        PERFORM cdc.note('DETACH PARTITION', reattached);

        rewritten := ARRAY(SELECT s.relation FROM cdc.storage s JOIN pg_class c ON c.oid = s.relation
                           WHERE c.relfilenode <> s.filenode AND cdc.is_ours(c.oid) ORDER BY s.relation);
        -- As an event trigger would: before the definition, and of the partition's table as well.
        PERFORM cdc.note('REWRITE TABLE', rewritten || ARRAY(
            SELECT DISTINCT root FROM unnest(rewritten) AS leaf, pg_partition_root(leaf) AS root WHERE root <> leaf));
    END IF;

    -- Twice: names of types and defaults are read as they are by now, so a command that is committed meanwhile may look
    -- like a difference. Then the second look sees its entry.
    looked := ARRAY(SELECT format('%s %s', relation, entry) FROM cdc.differing());
    IF looked <> '{}' THEN
        PERFORM cdc.note(CASE WHEN grown THEN 'CREATE TABLE' ELSE 'COMPARE' END, array_agg(relation))
        FROM cdc.differing() WHERE format('%s %s', relation, entry) = ANY (looked) GROUP BY grown;
    END IF;

    IF NOT watched THEN
        DELETE FROM cdc.storage WHERE relation = ANY (rewritten);
        PERFORM cdc.remember_storage();
    END IF;
    RETURN (SELECT count(*) FROM cdc.ddl WHERE id > before AND xmin = pg_current_xact_id_if_assigned()::xid);
END
$$;

REVOKE ALL ON FUNCTION cdc.types_below(oid), cdc.descriptions(oid[]), cdc.is_captured(oid), cdc.captured_heirs(oid[]), cdc.differing()
    FROM PUBLIC;
