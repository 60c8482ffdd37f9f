"""Columns that can't be carried exactly: refuse their table, and say which columns to leave out.

Pure. An error holds a sentence for each bad column of a table. Other tables go on.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import yaml

from cdc.errors import SettingsError, SourceError, TableRefused
from cdc.model import pg_types
from cdc.model.table import Table

PIPELINE_PREFIX = "_cdc"
"""The prefix of the pipeline's own fields and columns in every view."""
Refusals = Callable[[Table], Sequence[str]]
"""Why a view can't hold a table, a sentence for each column concerned; empty if it can."""


def refusals(table: Table) -> list[str]:
    """Why no view of any sink can hold a table, a sentence for each column concerned."""
    return [*_types_refused(table), *_names_refused(table)]


def require_indexed(tables: Iterable[Table]) -> None:
    """Refuse `index.fields` of the pipeline file for columns that no view has. Raises
    SettingsError.
    """
    for table in tables:
        columns = [column.name for column in table.columns]
        for name in table.index.fields:
            if name not in columns:
                near = difflib.get_close_matches(name, columns, n=1)
                raise SettingsError(
                    f"index.fields of {table.qualified} names {name}, which is no column of its views.",
                    hint=f"did you mean {near[0]}?"
                    if near
                    else f"its columns: {', '.join(columns)}",
                )


def refusal_error(table: Table, refusals: Refusals, sink: str = "") -> SourceError | None:
    """The error for a table: all its bad columns, and the way out; None if there are none.

    `sink`: the one that can't hold the table; empty if no sink can.
    """
    sentences = refusals(table)
    if not sentences:
        return None
    place = (
        f"{table.qualified} can't be held by {sink}"
        if sink
        else f"{table.qualified} can't be captured exactly"
    )
    error = SourceError if sink else TableRefused
    return error(
        f"{place}: {'; '.join(sentences)}.",
        hint=_sinks_remedy(table, refusals, sink) if sink else _remedy(table, refusals),
        table=table.qualified,
    )


def combined_error(errors: Sequence[SourceError]) -> SourceError:
    """The errors of several tables as a single one."""
    if len(errors) == 1:
        return errors[0]
    hints = dict.fromkeys(error.hint for error in errors)
    message = " ".join(error.message for error in errors)
    return type(errors[0])(message, hint="; ".join(hints))


def _remedy(table: Table, refusals: Refusals) -> str:
    excluded, reduced = _without_bad(table, refusals)
    steps = []
    if excluded:
        names = ", ".join(map(_in_yaml, excluded))
        steps.append(
            f"write {{table: {table.qualified}, exclude: [{names}]}} in the pipeline file, or rename them"
        )
    if refusals(reduced):
        rename = f"ALTER TABLE {table.qualified} RENAME COLUMN ... TO ..."
        steps.append(
            f"{'for the rest ' if excluded else ''}{rename}, or choose another key (key: [...])"
        )
    return "; ".join(steps)


def _sinks_remedy(table: Table, refusals: Refusals, sink: str) -> str:
    bad, _ = _without_bad(replace(table, key=()), refusals)
    if table.derivation or not bad:
        return f"give the columns other names in what {table.qualified} is made of"
    names = ", ".join(f"{_in_yaml(name)}: NAME" for name in bad)
    entry = f"{{table: {table.qualified}, rename: {{{names}}}}}"
    return (
        f"give it other names there: write {entry} in sinks.{sink}.tables, beside its other tables"
    )


def _without_bad(table: Table, refusals: Refusals) -> tuple[list[str], Table]:
    """Columns, not of the key, without which fewer are refused, by the source's names; and the table
    without them.
    """
    reduced = table
    bad = []
    for column in table.columns:
        if column.name in table.key:
            continue
        columns = tuple(item for item in reduced.columns if item != column)
        candidate = replace(reduced, columns=columns)
        if len(refusals(candidate)) < len(refusals(reduced)):
            reduced = candidate
            bad.append(column.source_name)
    return bad, reduced


def _in_yaml(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and yaml.safe_load(name) == name
    return name if plain else json.dumps(name, ensure_ascii=False)


def _types_refused(table: Table) -> Iterable[str]:
    for column in table.columns:
        if why := pg_types.loss(column.type, key=column.name in table.key):
            yield f"column {column.name} is {column.type}: {why}"


def _names_refused(table: Table) -> Iterable[str]:
    for column in table.columns:
        if column.name.lower().startswith(PIPELINE_PREFIX):
            yield f"column {column.name} begins with {PIPELINE_PREFIX}, as the pipeline's own do"


def case_collisions(columns: Iterable[str]) -> list[str]:
    """Columns of a table that Debezium takes for the same, a sentence for each group.

    Its connector fails on them, even if the pipeline file excludes one of them.
    """
    return [
        f"columns {' and '.join(group)} differ in nothing but case, which the connector doesn't take"
        for group in alike(columns)
    ]


def alike(columns: Iterable[str]) -> list[list[str]]:
    """Groups of names that are equal, or differ in nothing but case."""
    groups: dict[str, list[str]] = {}
    for name in columns:
        groups.setdefault(_case_folded(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _case_folded(name: str) -> str:
    """A form in which names are equal if Java takes them for equal without case."""
    return name.upper().lower().replace("\u0307", "")
