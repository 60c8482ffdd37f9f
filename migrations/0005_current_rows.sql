-- Postgres writes a commit to its log before other sessions see it: for as long as a synchronous standby takes to confirm,
-- else until the writer's process gets its turn. A chunk of an incremental snapshot that is read in between has the former
-- row, and the connector would send it behind the change that the log has already. So each chunk leaves out rows that have
-- been replaced or deleted since it was begun: the log has that change, before the chunk or after it.

CREATE FUNCTION cdc.is_at_work(transaction xid8) RETURNS boolean
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN pg_xact_status(transaction) = 'in progress';
EXCEPTION WHEN OTHERS THEN
    RETURN false;  -- No transaction has had this number yet.
END
$$;

-- Whether a row that the calling statement reads is still there for a statement that is begun now. `snapshot` is the
-- calling statement's own. `holder` is the row's xmax: a transaction that has changed the row or only locked it, or the
-- number of a group of those; which of them it is can't be known, so both are looked at. While one of them is at work it
-- can't be known what becomes of the row. The connector's log waits with the statement, so this waits for a second at most,
-- for all rows of the statement together.
CREATE FUNCTION cdc.is_current(relation regclass, leaf oid, place tid, holder xid, snapshot pg_snapshot) RETURNS boolean
    LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    deadline CONSTANT timestamptz := statement_timestamp() + interval '1 s';
    oldest CONSTANT bigint := pg_snapshot_xmin(snapshot)::text::bigint;
    holders xid[] := ARRAY[holder];
    transactions xid8[];
    current boolean;
BEGIN
    IF mxid_age(holder) > 0 THEN
        BEGIN
            holders := holders || ARRAY(SELECT xid FROM pg_get_multixact_members(holder));
        EXCEPTION WHEN OTHERS THEN
            NULL;  -- The group with this number was so long ago that nobody knows its members.
        END;
    END IF;
    -- A number that isn't ahead of the oldest, as numbers of 32 bits are compared, was over before the statement.
    transactions := ARRAY(
        SELECT (oldest + ahead)::text::xid8
        FROM unnest(holders) AS number, LATERAL (SELECT (number::text::bigint - oldest) & 4294967295) AS a (ahead)
        WHERE ahead < 2147483648);
    IF transactions = '{}' THEN
        RETURN true;
    END IF;
    WHILE clock_timestamp() < deadline
          AND EXISTS (SELECT FROM unnest(transactions) AS transaction WHERE cdc.is_at_work(transaction)) LOOP
        PERFORM pg_sleep(0.002);
    END LOOP;
    EXECUTE format('SELECT EXISTS (SELECT FROM %s WHERE ctid = $1 AND tableoid = $2)', relation)
        INTO current USING place, leaf;
    RETURN current;
END
$$;

-- The connector's role reads chunks. These return nothing that it may not read by itself.
GRANT EXECUTE ON FUNCTION cdc.is_at_work(xid8), cdc.is_current(regclass, oid, tid, xid, pg_snapshot) TO PUBLIC;
