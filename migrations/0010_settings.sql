-- The journal is written in sessions of applications, whose settings change how types and defaults are printed. An entry
-- then seems to differ from what a comparison reads.

ALTER FUNCTION cdc.described(oid) SET quote_all_identifiers = off;
ALTER FUNCTION cdc.described(oid) SET bytea_output = 'hex';
ALTER FUNCTION cdc.described(oid) SET datestyle = 'ISO, MDY';
ALTER FUNCTION cdc.described(oid) SET extra_float_digits = 1;
ALTER FUNCTION cdc.described(oid) SET intervalstyle = 'postgres';
ALTER FUNCTION cdc.described(oid) SET timezone = 'UTC';
