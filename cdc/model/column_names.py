"""Names of columns that Postgres takes: which of them can't be carried exactly, and what to leave out instead.

Pure. A table is refused by all of its sentences at once, and alone: others go on.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import yaml

from cdc.errors import SettingsError, SourceError
from cdc.model import pg_types
from cdc.model.table import Table

OURS = "_cdc"
"""How the names of the pipeline's own fields and columns begin, in every view."""
Refusals = Callable[[Table], Sequence[str]]
"""Why a table can't be held as it is, a sentence for each column concerned; nothing when it can."""


def refusals(table: Table) -> list[str]:
    """Why no view at all can have a table as it is."""
    return [*_of_types(table), *_of_ours(table)]


def require_indexed(tables: Iterable[Table]) -> None:
    """Refuse what the pipeline file asks of the index for columns that no view has. Raises SettingsError."""
    for table in tables:
        columns = [column.name for column in table.columns]
        for name in table.index.fields:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1)
                raise SettingsError(
                    f"index.fields of {table.qualified} names {name}, which is no column of its views.",
                    hint=f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}",
                )


def refused(table: Table, refusals: Refusals, where: str = "") -> SourceError | None:
    """The error that names all that is wrong with a table's columns, and which to leave out; None when nothing is."""
    sentences = refusals(table)
    if not sentences:
        return None
    place = f"{table.qualified} can't be held by {where}" if where else f"{table.qualified} can't be captured exactly"
    return SourceError(f"{place}: {'; '.join(sentences)}.", hint=_way_out(table, refusals), table=table.qualified)


def together(errors: Sequence[SourceError]) -> SourceError:
    """Several tables' errors as one."""
    if len(errors) == 1:
        return errors[0]
    hints = dict.fromkeys(error.hint for error in errors)
    return SourceError(" ".join(error.message for error in errors), hint="; ".join(hints))


def _way_out(table: Table, refusals: Refusals) -> str:
    kept, excluded = table, []
    for column in table.columns:
        without = replace(kept, columns=tuple(other for other in kept.columns if other != column))
        if column.name not in table.key and len(refusals(without)) < len(refusals(kept)):
            kept = without
            excluded.append(column.name)
    steps = []
    if excluded:
        columns = ", ".join(map(_in_yaml, excluded))
        steps.append(f"write {{table: {table.qualified}, exclude: [{columns}]}} in the pipeline file, or rename them")
    if refusals(kept):
        rename = f"ALTER TABLE {table.qualified} RENAME COLUMN ... TO ..."
        steps.append(f"{'for the rest ' if excluded else ''}{rename}, or choose another key (key: [...])")
    return "; ".join(steps)


def _in_yaml(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and yaml.safe_load(name) == name
    return name if plain else json.dumps(name, ensure_ascii=False)


def _of_types(table: Table) -> Iterable[str]:
    for column in table.columns:
        if why := pg_types.refused(column.type, key=column.name in table.key):
            yield f"column {column.name} is {column.type}: {why}"


def _of_ours(table: Table) -> Iterable[str]:
    for column in table.columns:
        if column.name.lower().startswith(OURS):
            yield f"column {column.name} begins with {OURS}, as the pipeline's own do"


def alike(columns: Iterable[str]) -> list[str]:
    """Which columns of a table Debezium takes for one, whose connector then fails; also where one is excluded."""
    folded: dict[str, list[str]] = {}
    for name in columns:
        folded.setdefault(_folded(name), []).append(name)
    return [
        f"columns {' and '.join(several)} differ in nothing but case, which the connector doesn't take"
        for several in folded.values()
        if len(several) > 1
    ]


def _folded(name: str) -> str:
    """What Java takes for equal without case, by characters or by whole texts, is equal in this form."""
    return name.upper().lower().replace("\u0307", "")
