"""Whether row level security hides rows of a table from the connector's role: the one rule of
`migrate`, `register`, `run` and `doctor`.

The log has all rows. A snapshot, and whatever is sent again, has those that policies show.
"""

HIDES_ROWS = """
(c.relrowsecurity
 AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = %(role)s AND (
     r.rolsuper OR r.rolbypassrls
     OR pg_has_role(r.oid, c.relowner, 'USAGE') AND NOT c.relforcerowsecurity))
 AND coalesce((
     SELECT bool_or(NOT p.polpermissive)
         OR NOT bool_or(p.polpermissive AND pg_get_expr(p.polqual, p.polrelid) = 'true')
     FROM pg_policy p
     WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*') AND EXISTS (
         SELECT FROM unnest(p.polroles) AS holder
         WHERE holder = 0 OR pg_has_role(to_regrole(quote_ident(%(role)s))::oid, holder, 'USAGE'))
 ), true))
"""
"""A condition on a row `c` of pg_class, with the parameter `role`. Only a policy whose condition is
`true` counts as one that shows every row, and a restrictive one never does.
"""


def policy_statement(table: str, role: str) -> str:
    """Write the statement that shows a table's rows to a role. Both names are written as given."""
    return f'CREATE POLICY "{role}" ON {table} FOR SELECT TO "{role}" USING (true);'
