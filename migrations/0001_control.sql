-- Rows that the pipelines write about themselves. The connector's role gets its privileges from
-- prepare_source(), because which role that is differs from one deployment to the next.

COMMENT ON SCHEMA cdc IS 'change data capture: rows that the pipelines write about themselves';

CREATE TABLE cdc.heartbeat (
    pipeline text PRIMARY KEY,
    beat     bigint NOT NULL DEFAULT 0,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE cdc.heartbeat IS
    'one row per pipeline, beaten by its connector: moves the slot on while captured tables are idle, and measures lag';

-- A pipeline's role may beat its own row only; a policy per role is added by prepare_source().
ALTER TABLE cdc.heartbeat ENABLE ROW LEVEL SECURITY;
CREATE POLICY "everyone reads" ON cdc.heartbeat FOR SELECT USING (true);

-- The layout that Debezium documents for its signalling table, but for the length of `data`: a request for rows whose
-- dates JDBC can't carry names every column.
CREATE TABLE cdc.signal (
    id   varchar(42) PRIMARY KEY,
    type varchar(32) NOT NULL,
    data text
);
COMMENT ON TABLE cdc.signal IS
    'requests to the connector; a filter in here runs as SQL of the connector''s role, so few may write it';
