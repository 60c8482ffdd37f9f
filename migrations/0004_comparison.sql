-- What a table is, is compared with the journal every few seconds. Event triggers take a superuser. Where there are some,
-- they don't see what a command does to other tables than the one that it names (children of INHERITS, tables with a type
-- that is part of another one), nor what is done while they are off, or to the catalogue itself. A comparison notes a
-- change later than an event trigger, behind changes that were made meanwhile (see cdc/control/definitions.py).

CREATE FUNCTION cdc.has_event_triggers() RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) = 4 FROM pg_event_trigger
    WHERE evtname IN ('cdc_ddl', 'cdc_ddl_around', 'cdc_drop', 'cdc_rewrite') AND evtenabled IN ('O', 'A')
$$;

CREATE VIEW cdc.definition AS
    SELECT DISTINCT ON (relation) * FROM cdc.ddl ORDER BY relation, id DESC;
COMMENT ON VIEW cdc.definition IS 'what the journal knows last of each table; columns is null after a drop';

-- A rewrite may leave every definition as it was (ALTER ... TYPE int USING -n), but never the file.
CREATE TABLE cdc.storage (
    relation oid PRIMARY KEY,
    filenode oid NOT NULL
);
COMMENT ON TABLE cdc.storage IS 'the file that each captured table had when it was looked at last';

-- A partition may be another one under the same name, or may have been changed while it was detached, without events:
-- its row of pg_inherits is then another one. Read without locks, unlike pg_partition_tree().
CREATE TABLE cdc.attachment (
    root oid,
    member oid,
    mark text,
    PRIMARY KEY (root, member)
);
COMMENT ON TABLE cdc.attachment IS 'the partitions that each captured table had when it was looked at last, on every level';

CREATE VIEW cdc.attached AS
    WITH RECURSIVE attached (root, member, mark) AS (
        SELECT i.inhparent, i.inhrelid, i.xmin::text
        FROM cdc.definition d JOIN pg_class c ON c.oid = d.relation JOIN pg_inherits i ON i.inhparent = c.oid
        WHERE c.relkind = 'p' AND d.columns IS NOT NULL AND NOT i.inhdetachpending
        UNION ALL
        SELECT a.root, i.inhrelid, i.xmin::text FROM attached a JOIN pg_inherits i ON i.inhparent = a.member
        WHERE NOT i.inhdetachpending
    )
    SELECT * FROM attached;
COMMENT ON VIEW cdc.attached IS 'the partitions of captured tables, as cdc.attachment has them; mark is what a new attachment changes';

-- A known attachment stays as it is: only a comparison may update it.
CREATE FUNCTION cdc.remember_attachments() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO cdc.attachment (root, member, mark) SELECT root, member, mark FROM cdc.attached ON CONFLICT DO NOTHING
$$;

CREATE FUNCTION cdc.remember_storage() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    SELECT cdc.remember_attachments();
    DELETE FROM cdc.storage WHERE relation NOT IN (SELECT oid FROM pg_class);
    INSERT INTO cdc.storage (relation, filenode)
    SELECT c.oid, c.relfilenode FROM cdc.definition d JOIN pg_class c ON c.oid = d.relation
    WHERE c.relkind = 'r' AND d.columns IS NOT NULL AND NOT EXISTS (SELECT FROM cdc.storage s WHERE s.relation = c.oid)
    ON CONFLICT DO NOTHING
$$;

-- Whether any of them has rows, that no event announced. Creating a partition in time takes no more than this. What
-- can't be read, as another owner's, may have some.
CREATE FUNCTION cdc.hold_rows(relations oid[]) RETURNS boolean
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET row_security = off
AS $$
DECLARE
    candidate oid;
    filled boolean;
BEGIN
    FOREACH candidate IN ARRAY relations LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %s)', candidate::regclass) INTO filled;
        IF filled THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
EXCEPTION WHEN insufficient_privilege THEN
    RETURN true;
END
$$;

-- Which of the captured tables, and of those that have taken the name of one, aren't what the journal says they are, with
-- the id of the entry that each differs from; `grown`: that is empty partitions that it has got, and nothing else. Of a
-- partition that isn't captured itself the name alone is compared: event triggers don't note a column for each partition
-- that gets it.
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
-- Event triggers distinguish a rewrite from VACUUM FULL, and note partitions that are attached again. So these are looked
-- for only where there are no event triggers.
CREATE FUNCTION cdc.compare_definitions() RETURNS bigint
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
            SELECT DISTINCT root FROM unnest(rewritten) AS leaf, unnest(cdc.captured_ancestors(leaf)) AS root));
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

-- The partitions that have come meanwhile of a table: by itself, so that one that is locked spoils no other's.
CREATE FUNCTION cdc.adopt_later_partitions(root oid) RETURNS text[]
    LANGUAGE sql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
AS $$
    SELECT cdc.adopt_partitions(root)
$$;

REVOKE ALL ON FUNCTION cdc.has_event_triggers(), cdc.remember_attachments(), cdc.remember_storage(), cdc.hold_rows(oid[]),
    cdc.differing(), cdc.compare_definitions(), cdc.adopt_later_partitions(oid) FROM PUBLIC;
