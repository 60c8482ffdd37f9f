-- A publication that is narrowed for a while, and widened again, has lost what was changed meanwhile: those changes were
-- never in the log, and nothing else says so.

CREATE TABLE cdc.published (
    publication text,
    relation    oid,
    mark        text NOT NULL,
    PRIMARY KEY (publication, relation)
);
COMMENT ON TABLE cdc.published IS
    'the tables that each pipeline''s publication held whole when it was looked at last; mark is what every change of it changes';

-- The tables of which a publication leaves out nothing. ALTER PUBLICATION writes the row of the publication or of the table
-- again; a table that is taken out and in again has another row. Without the journal, floors or requests for rows in the
-- log nothing else of the publication can be trusted either. to_jsonb reads what older servers lack.
CREATE FUNCTION cdc.published_whole(OUT publication text, OUT relation oid, OUT mark text) RETURNS SETOF record
    LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH listed AS (
        SELECT p.pubname::text AS publication, r.prrelid AS relation, p.xmin::text AS publication_mark,
               format('%s %s', r.oid, r.xmin) AS mark
        FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
        WHERE p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubviaroot
          AND coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's'
          AND to_jsonb(r) ->> 'prqual' IS NULL AND to_jsonb(r) ->> 'prattrs' IS NULL
    ), control AS (
        SELECT listed.publication, string_agg(mark, ' ' ORDER BY relation) AS mark FROM listed
        WHERE relation IN ('cdc.ddl'::regclass, 'cdc.signal'::regclass, 'cdc.truncation'::regclass)
        GROUP BY listed.publication HAVING count(*) = 3
    )
    SELECT listed.publication, listed.relation, concat_ws(' ', publication_mark, control.mark, listed.mark)
    FROM listed JOIN control ON control.publication = listed.publication
    JOIN pg_class c ON c.oid = listed.relation AND c.relnamespace <> 'cdc'::regnamespace
$$;

CREATE FUNCTION cdc.remember_publications() RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM cdc.published WHERE relation NOT IN (SELECT oid FROM pg_class);
    INSERT INTO cdc.published (publication, relation, mark)
    SELECT publication, relation, mark FROM cdc.published_whole() ON CONFLICT DO NOTHING
$$;

-- Notes a table once it is published whole again: an entry before that might not reach the log, and what is deleted after
-- it wouldn't. Returns how many tables it has noted.
CREATE FUNCTION cdc.compare_publications() RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
AS $$
DECLARE
    widened oid[];
BEGIN
    WITH changed AS (
        UPDATE cdc.published p SET mark = whole.mark FROM cdc.published_whole() AS whole
        WHERE (p.publication, p.relation) = (whole.publication, whole.relation) AND p.mark <> whole.mark
        RETURNING p.relation
    ) SELECT array_agg(DISTINCT relation) INTO widened FROM changed;
    PERFORM cdc.note('PUBLICATION', widened);
    PERFORM cdc.remember_publications();
    RETURN coalesce(cardinality(widened), 0);
END
$$;

REVOKE ALL ON FUNCTION cdc.published_whole(), cdc.remember_publications(), cdc.compare_publications() FROM PUBLIC;

SELECT cdc.remember_publications();
