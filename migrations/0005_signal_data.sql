-- A request for rows whose dates JDBC can't carry names every column.
ALTER TABLE cdc.signal ALTER COLUMN data TYPE text;
