-- For tables with `events: true`. A view may have counted the row, and nothing says what it was before. Anybody may execute
-- it, since whoever makes a partition makes the trigger's copy for it.
CREATE FUNCTION cdc.refuse_update() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'an event of %.% can''t be changed', TG_TABLE_SCHEMA, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation',
              HINT = 'Insert another event that corrects it.';
END
$$;
