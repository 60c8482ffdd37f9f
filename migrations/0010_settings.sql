-- The journal is written in sessions of applications, whose settings change how types and defaults are printed. An entry
-- then seems to differ from what a comparison reads.

ALTER FUNCTION cdc.descriptions(oid[]) SET quote_all_identifiers = off;
ALTER FUNCTION cdc.descriptions(oid[]) SET bytea_output = 'hex';
ALTER FUNCTION cdc.descriptions(oid[]) SET datestyle = 'ISO, MDY';
ALTER FUNCTION cdc.descriptions(oid[]) SET extra_float_digits = 1;
ALTER FUNCTION cdc.descriptions(oid[]) SET intervalstyle = 'postgres';
ALTER FUNCTION cdc.descriptions(oid[]) SET timezone = 'UTC';
