"""Find rows of the state by the values that a join compares."""

from collections.abc import Collection, Mapping

from cdc.model.table import Table
from cdc.views.plan import StatePlan, Values, is_key
from cdc.views.state import State


def find_rows(
    plan: StatePlan, state: State, table: Table, values: Values, texts: Collection[str]
) -> Mapping[str, Collection[str]]:
    """Return the ids of rows that have these values, by their text.

    Where the values are the key, an id may be of no row.
    """
    if is_key(table, values):
        return {text: (text,) for text in texts}
    return state.members(table.qualified, plan.slots[table.qualified].index(values), texts)
