-- A delete, and an update that moves a key, are logged with the columns of the replica identity. If that is an index
-- without the key, they name no row. `identified`: whether the column is in the identity of the table, or of all of its
-- partitions. FULL has every column, and so has DEFAULT here, which has the key. Without any identity Postgres refuses
-- updates and deletes, so nothing is lost.
CREATE OR REPLACE FUNCTION cdc.descriptions(relations oid[], OUT relation oid, OUT columns jsonb) RETURNS SETOF record
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
