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
-- entries have them. Types of Postgres itself, with oids below 16384, have none of these.
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
                    WHERE c.oid IN (t.oid, t.typelem) AND c.typtype = 'c' AND m.attnum > 0 AND NOT m.attisdropped),
               'types',
                   CASE WHEN t.oid < 16384 THEN '[]' ELSE (
                       SELECT coalesce(jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                           'oid', b.oid::bigint,
                           'base', CASE b.typtype WHEN 'd' THEN format_type(b.typbasetype, b.typtypmod) END,
                           'labels',
                               (SELECT jsonb_object_agg(e.oid, e.enumlabel) FROM pg_enum e WHERE e.enumtypid = b.oid),
                           'attributes',
                               (SELECT jsonb_agg(m.attname || ' ' || format_type(m.atttypid, m.atttypmod) ORDER BY m.attnum)
                                FROM pg_attribute m
                                WHERE b.typtype = 'c' AND m.attrelid = b.typrelid AND m.attnum > 0 AND NOT m.attisdropped)
                       )) ORDER BY b.oid), '[]')
                       FROM cdc.types_below(t.oid) AS below (oid) JOIN pg_type b ON b.oid = below.oid
                       WHERE b.typtype IN ('c', 'd', 'e'))
                   END
           ) ORDER BY a.attnum), '[]')
    FROM pg_attribute a
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    LEFT JOIN pg_constraint k ON k.conrelid = a.attrelid AND k.contype = 'p'
    WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
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
    SELECT array_agg(DISTINCT c.oid) INTO changed
    FROM pg_event_trigger_ddl_commands() AS command
    JOIN pg_class c ON CASE
        -- A composite type's columns are a relation, so either may stand for it.
        WHEN TG_TAG = 'ALTER TYPE' THEN EXISTS (SELECT FROM cdc.ddl d WHERE d.relation = c.oid) AND EXISTS (
            SELECT FROM pg_attribute a
            CROSS JOIN LATERAL cdc.types_below(a.atttypid) AS below (oid)
            JOIN pg_type altered ON altered.oid = below.oid
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
              AND command.objid IN (altered.oid, altered.typrelid))
        -- Another schema is another name of every table in it.
        WHEN TG_TAG = 'ALTER SCHEMA' THEN c.relnamespace = command.objid
        ELSE command.classid = 'pg_class'::regclass AND c.oid = command.objid
        END
    WHERE c.relkind IN ('r', 'p');
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
    WITH candidate AS (
        SELECT d.relation::oid AS oid FROM cdc.definition d WHERE d.columns IS NOT NULL
        UNION
        SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        JOIN cdc.ddl d ON d.command = 'PUBLISH' AND d.table_name = n.nspname || '.' || c.relname
        WHERE c.relkind IN ('r', 'p')
    ), actual AS (
        SELECT c.oid, n.nspname || '.' || c.relname AS table_name,
               CASE WHEN NOT c.relispartition OR cdc.is_captured(c.oid) THEN cdc.described(c.oid) END AS columns,
               cdc.partitions(c.oid) AS partitions
        FROM candidate JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE cdc.is_ours(c.oid)
    ), compared AS (
        SELECT a.oid, a.table_name, coalesce(a.columns, d.columns) AS columns, a.partitions,
               d.id AS entry, d.table_name AS noted_name, d.columns AS noted_columns, d.partitions AS noted_partitions
        FROM actual a LEFT JOIN cdc.definition d ON d.relation = a.oid
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

REVOKE ALL ON FUNCTION cdc.types_below(oid), cdc.is_captured(oid), cdc.captured_heirs(oid[]), cdc.differing()
    FROM PUBLIC;
