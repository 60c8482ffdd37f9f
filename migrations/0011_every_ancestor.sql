-- A captured table may itself be a partition of a table that isn't captured. What happens to one of its partitions is
-- noted for every captured table above that, and not only for the topmost table.
CREATE FUNCTION cdc.captured_ancestors(leaf oid) RETURNS oid[]
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(array_agg(relid::oid), '{}') FROM pg_partition_ancestors(leaf) AS ancestor (relid)
    WHERE relid <> leaf AND cdc.is_captured(relid)
$$;

CREATE OR REPLACE FUNCTION cdc.record_rewrite() RETURNS event_trigger
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

CREATE OR REPLACE FUNCTION cdc.record_partition_truncation() RETURNS trigger
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
REVOKE ALL ON FUNCTION cdc.captured_ancestors(oid) FROM PUBLIC;

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

