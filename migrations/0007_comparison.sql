-- Event triggers take a superuser. Where there is none `cdc run` compares definitions with the journal every few seconds
-- and notes what differs: later than an event trigger, behind changes that were made meanwhile (see cdc/ddl.py).

CREATE FUNCTION cdc.has_event_triggers() RETURNS boolean
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) = 4 FROM pg_event_trigger
    WHERE evtname IN ('cdc_ddl', 'cdc_ddl_around', 'cdc_drop', 'cdc_rewrite') AND evtenabled IN ('O', 'A')
$$;

CREATE VIEW cdc.definition AS
    SELECT DISTINCT ON (relation) * FROM cdc.ddl WHERE relation IS NOT NULL ORDER BY relation, id DESC;
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

-- One that is known stays as it is known: only a comparison may take what has become of it for told.
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

-- Rows that TRUNCATE took have a floor, or an entry of their own. The file that it has made is remembered here, so that
-- a rewrite before the next look is one.
CREATE OR REPLACE FUNCTION cdc.record_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO cdc.truncation AS t (table_name, at, lsn)
    VALUES (TG_TABLE_SCHEMA || '.' || TG_TABLE_NAME, clock_timestamp(), pg_current_wal_insert_lsn())
    ON CONFLICT (table_name) DO UPDATE SET at = excluded.at, lsn = excluded.lsn, n = t.n + 1;
    UPDATE cdc.storage s SET filenode = c.relfilenode FROM pg_class c
    WHERE c.oid = s.relation AND (s.relation = TG_RELID OR s.relation IN (SELECT cdc.leaves(TG_RELID)));
    PERFORM set_config(
        'cdc.truncating', replace(coalesce(current_setting('cdc.truncating', true), ''), format('<%s>', TG_RELID), ''), true);
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION cdc.record_partition_truncation() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    root oid := pg_partition_root(TG_RELID);
BEGIN
    IF TG_WHEN = 'AFTER' THEN
        INSERT INTO cdc.storage (relation, filenode) SELECT oid, relfilenode FROM pg_class WHERE oid = TG_RELID
        ON CONFLICT (relation) DO UPDATE SET filenode = excluded.filenode;
        RETURN NULL;
    END IF;
    -- Null: it was detached since, and its rows are no longer the table's.
    IF root <> TG_RELID AND coalesce(current_setting('cdc.truncating', true), '') NOT LIKE format('%%<%s>%%', root) THEN
        PERFORM cdc.note('TRUNCATE PARTITION', ARRAY[root]);
        DELETE FROM cdc.storage WHERE relation = TG_RELID;
    END IF;
    RETURN NULL;
END
$$;

-- As before, and with a trigger AFTER where nothing else tells what TRUNCATE did to a file from a rewrite.
CREATE OR REPLACE FUNCTION cdc.adopt_partitions(root oid) RETURNS text[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    leaf regclass;
    name text;
    moment text;
    made text[] := '{}';
BEGIN
    PERFORM set_config('cdc.adopting', 'on', true);
    FOR leaf, name, moment IN
        SELECT part.oid, wanted.* FROM cdc.leaves(root) AS part (oid),
            (VALUES ('cdc_truncation_alone', 'BEFORE'), ('cdc_truncation_done', 'AFTER')) AS wanted (name, moment)
        WHERE (wanted.moment = 'BEFORE' OR NOT cdc.has_event_triggers())
          AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = part.oid AND t.tgenabled = 'A'
                          AND t.tgname = wanted.name AND t.tgfoid = 'cdc.record_partition_truncation()'::regprocedure)
        ORDER BY part.oid::regclass::text, wanted.moment DESC
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER %I %s TRUNCATE ON %s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION cdc.record_partition_truncation()', name, moment, leaf);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', leaf, name);
        IF moment = 'BEFORE' THEN
            made := made || format('recording TRUNCATE of partition %s', leaf);
        END IF;
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

-- Whether any of them has rows, which no event has told of. Creating a partition in time takes no more than this. What
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

-- Which of the captured tables, and of those that have taken the name of one, aren't what the journal says they are;
-- `grown`: that is empty partitions that it has got, and nothing else.
CREATE FUNCTION cdc.differing(OUT relation oid, OUT grown boolean) RETURNS SETOF record
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
               cdc.described(c.oid) AS columns, cdc.partitions(c.oid) AS partitions
        FROM candidate JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE cdc.is_ours(c.oid)
    )
    SELECT a.oid, ((d.table_name, d.columns) IS NOT DISTINCT FROM (a.table_name, a.columns)
               AND d.partitions <@ a.partitions AND NOT cdc.hold_rows(ARRAY(
                   SELECT leaf FROM cdc.leaves(a.oid) AS leaf
                   JOIN pg_class c ON c.oid = leaf JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE NOT d.partitions ? (n.nspname || '.' || c.relname)))) IS TRUE
    FROM actual a LEFT JOIN cdc.definition d ON d.relation = a.oid
    WHERE (d.table_name, d.columns, d.partitions) IS DISTINCT FROM (a.table_name, a.columns, a.partitions)
$$;

-- Returns how many tables it has noted. It never waits for long: a TRUNCATE that holds a table may be waiting for this.
CREATE FUNCTION cdc.compare_definitions() RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
AS $$
DECLARE
    before bigint;
    reattached oid[];
    rewritten oid[];
BEGIN
    IF cdc.has_event_triggers() OR NOT pg_try_advisory_xact_lock(hashtextextended('cdc.compare', 0)) THEN
        RETURN 0;
    END IF;
    SELECT coalesce(max(id), 0) INTO before FROM cdc.ddl;
    INSERT INTO cdc.ddl (command, table_name, relation)
    SELECT 'COMPARE', d.table_name, d.relation FROM cdc.definition d
    WHERE d.columns IS NOT NULL AND d.relation NOT IN (SELECT oid FROM pg_class);

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

    PERFORM cdc.note(CASE WHEN grown THEN 'CREATE TABLE' ELSE 'COMPARE' END, array_agg(relation))
    FROM cdc.differing() GROUP BY grown;

    DELETE FROM cdc.storage WHERE relation = ANY (rewritten);
    PERFORM cdc.remember_storage();
    RETURN (SELECT count(*) FROM cdc.ddl WHERE id > before);
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
