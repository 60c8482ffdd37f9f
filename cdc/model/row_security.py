"""Whether row level security hides rows of a table from the connector's role: the one rule of
`migrate`, `register`, `run` and `doctor`.

The log has all rows. A snapshot, and whatever is sent again, has those that policies show.
"""

from cdc.model.wording import quoted_name

RESTRICTIVE = "restrictive"
HIDDEN_BY = f"""
CASE WHEN c.relrowsecurity
 AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = %(role)s AND (
     r.rolsuper OR r.rolbypassrls
     OR pg_has_role(r.oid, c.relowner, 'USAGE') AND NOT c.relforcerowsecurity))
THEN coalesce((
     SELECT CASE WHEN bool_or(NOT p.polpermissive) THEN '{RESTRICTIVE}'
                 WHEN bool_or(pg_get_expr(p.polqual, p.polrelid) = 'true') THEN ''
                 ELSE 'permissive' END
     FROM pg_policy p
     WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*') AND EXISTS (
         SELECT FROM unnest(p.polroles) AS holder
         WHERE holder = 0 OR pg_has_role(to_regrole(quote_ident(%(role)s))::oid, holder, 'USAGE'))
     HAVING count(*) > 0
 ), 'permissive')
ELSE '' END
"""
"""Which kind of policies hides rows of a row `c` of pg_class from the parameter `role`; empty for
none. Only a policy whose condition is `true` counts as one that shows every row, and a restrictive
one never does.
"""


def show_rows(table: str, role: str, hidden_by: str) -> str:
    """Say what shows a table's rows to a role: a statement; for a restrictive policy, which no other
    one undoes, what a person has to decide.
    """
    if hidden_by == RESTRICTIVE:
        return (
            f"a restrictive policy of {table} counts for {role}: name the other roles instead, by"
            " ALTER POLICY ... TO ..."
        )
    return f'CREATE POLICY "{role}" ON {quoted_name(table)} FOR SELECT TO "{role}" USING (true);'
