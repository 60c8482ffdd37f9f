"""Check views against the source: what the catalog shows can't be kept right is refused, with its
line in the file.

`resolve` needs the tables alone. This needs a connection, so it is for commands that a person runs,
and for the start of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import psycopg

from cdc.config.settings import Pipeline
from cdc.config.view_settings import GroupedViewSettings, tables_of
from cdc.documents.plan import Node, View
from cdc.documents.resolve import Keys, resolve
from cdc.documents.sql import clock_setting, document_query
from cdc.documents.tables import view_table
from cdc.errors import SettingsError
from cdc.model.table import Table
from cdc.postgres.column_facts import TableFacts, column_facts
from cdc.postgres.source import Connection
from cdc.postgres.table_survey import Survey
from cdc.readiness.facts import bounded_locks
from cdc.scalar.operators import Term, quoted_name, quoted_table


class Examined(NamedTuple):
    """The views of a file: those that can be kept right, as tables; why others can't, by name."""

    tables: tuple[Table, ...]
    refused: Mapping[str, SettingsError]


def examine_views(conn: Connection, pipeline: Pipeline, survey: Survey) -> Examined:
    """Check the views as `migrate` and `register` do, but for replica identities, which `migrate`
    sets. Views of refused tables are left out, since they can't be checked yet.

    Raises SourceError: a table stays locked.
    """
    resolution = resolve(pipeline, survey.tables)
    with bounded_locks(conn):
        by_source = refused_by_source(conn, pipeline, resolution.views, identities=False)
    refused = {**resolution.refused, **by_source}
    known = {
        name for name, view in pipeline.views.items() if not survey.refused.keys() & tables_of(view)
    }
    accepted = [view for view in resolution.views if view.name in known - refused.keys()]
    return Examined(
        tuple(view_table(pipeline, view) for view in accepted),
        {name: error for name, error in refused.items() if name in known},
    )


def refused_by_source(
    conn: Connection, pipeline: Pipeline, views: Sequence[View], *, identities: bool = True
) -> dict[str, SettingsError]:
    """Check each view, and that Postgres plans its query. Return why some can't be kept right, by
    name. `identities`: also for what the tables' replica identities leave out of the log.
    """
    tables = {node.table.qualified for view in views for node in view.root.walk()}
    facts = column_facts(conn, tables)
    if not identities:
        facts = {name: replace(known, unlogged=frozenset()) for name, known in facts.items()}
    checks = _Checks(pipeline, facts)
    refused = {}
    for view in views:
        try:
            checks.check_grouping(view, ("views", view.name))
            is_sliding = isinstance(pipeline.views[view.name], GroupedViewSettings)
            checks.check_children(view.root, ("views", view.name), is_sliding=is_sliding)
            _explain(conn, pipeline, view)
        except SettingsError as error:
            refused[view.name] = error
    return refused


def missing_indexes(conn: Connection, views: Sequence[View]) -> list[str]:
    """Say which joins in time have no index in Postgres, in sentences with the statement that makes it.

    Documents don't need it. `verify` does: its query looks for the nearest row of each row.
    """
    facts = column_facts(
        conn, {node.table.qualified for view in views for node in view.root.walk()}
    )
    missing: dict[str, str] = {}
    for view in views:
        for node in view.root.walk():
            if node.time is None:
                continue
            columns = [value.text for value in node.join.child if value.operator == "column"]
            known = facts.get(node.table.qualified)
            # An index of an expression may have any form.
            if known is None or len(columns) < len(node.join.child):
                continue
            time = node.time.child
            if any(
                set(index[: len(columns)]) == set(columns) and time in index[len(columns) :][:1]
                for index in known.indexes
            ):
                continue
            statement = f"CREATE INDEX ON {quoted_table(node.table)} ({', '.join(map(quoted_name, [*columns, time]))})"
            missing.setdefault(
                statement,
                f"{view.name}: verify looks for rows of {node.table.qualified} by their times, which"
                f" takes long without an index; to make one: {statement}",
            )
    return list(missing.values())


def check_views(conn: Connection, pipeline: Pipeline, views: Sequence[View]) -> None:
    """Check all views. Raises SettingsError: the first that can't be kept right."""
    for error in refused_by_source(conn, pipeline, views).values():
        raise error


class _Checks:
    def __init__(self, pipeline: Pipeline, facts: Mapping[str, TableFacts]) -> None:
        self._pipeline = pipeline
        self._facts = facts

    def check_grouping(self, view: View, keys: Keys) -> None:
        """Check what the rows of groups have in common, and columns whose different values are counted."""
        aggregates = [part for child in view.root.children for part in child.aggregates]
        if view.grouping is not None:
            aggregates += view.grouping.aggregates
            places = [(*keys, "group_by", column.name) for column in view.grouping.columns]
            places += [(*keys, "window", "time")] * (len(view.grouping.values) - len(places))
            for value, place in zip(view.grouping.values, places, strict=True):
                self._require_logged(view.root, value, place)
                self._require_strict(view.root, value.columns, place)
        for part in aggregates:
            if part.function == "distinct":
                self._require_strict(view.root, [part.argument], (*keys, "select", part.name))

    def check_children(self, node: Node, keys: Keys, *, is_sliding: bool = False) -> None:
        """Check all edges below a node, whose place in the file is `keys`.

        is_sliding: whether they lead to the rows of sliding windows
        """
        for child in node.children:
            place = (*keys, "include", child.field)
            on = (*place, "on")
            if child.presence is not None:
                place = keys
                on = (*keys, "pattern", "by")
            elif is_sliding:
                on = (*keys, "group_by")
            self._require_one(child, place)
            self._require_exact(node, child, on)
            self.check_children(child, place)

    def _require_one(self, node: Node, keys: Keys) -> None:
        """Refuse an object that several rows might be."""
        columns = [value.text for value in node.join.child if value.operator == "column"]
        facts = self._facts.get(node.table.qualified)
        if (
            node.many
            or node.time is not None
            or not node.shows
            or facts is None
            or facts.is_unique(columns)
        ):
            return
        joined = ", ".join(value.text for value in node.join.child)
        index = ", ".join(map(quoted_name, columns)) or "..."
        raise self._pipeline.mistake(
            (*keys, "on"),
            f"several rows of {node.table.qualified} may have the same {joined},"
            " and the document has place for one",
            f"add many: true, or: CREATE UNIQUE INDEX ON {quoted_table(node.table)} ({index})",
        )

    def _require_exact(self, parent: Node, child: Node, place: Keys) -> None:
        """Refuse joined columns with another equality in Postgres than here, or that a record may lack."""
        for left, right in zip(child.join.parent, child.join.child, strict=True):
            collations = set()
            for node, value in ((parent, left), (child, right)):
                self._require_logged(node, value, place)
                self._require_strict(node, value.columns, place)
                if value.operator == "column" and (facts := self._facts.get(node.table.qualified)):
                    collations.add(facts.collations.get(value.text))
            if len(collations - {None}) > 1:
                names = " and ".join(sorted(name for name in collations if name))
                raise self._pipeline.mistake(
                    place,
                    f"the columns have different collations, {names}: Postgres doesn't compare them",
                    "ALTER TABLE ... ALTER COLUMN ... TYPE ... COLLATE ..., the same for both",
                )

    def _require_strict(self, node: Node, columns: Sequence[str], keys: Keys) -> None:
        facts = self._facts.get(node.table.qualified)
        loose = [name for name in columns if facts and name in facts.loose]
        if facts and loose:
            raise self._pipeline.mistake(
                keys,
                f"{node.table.qualified}.{loose[0]} has a nondeterministic collation,"
                f" {facts.collations.get(loose[0])}: texts that differ may be equal",
                "take another column",
            )

    def _require_logged(self, node: Node, value: Term, keys: Keys) -> None:
        facts = self._facts.get(node.table.qualified)
        missing = [name for name in value.columns if facts and name in facts.unlogged]
        if missing:
            raise self._pipeline.mistake(
                keys,
                f"an update may leave {missing[0]} of {node.table.qualified} out of the log,"
                " so the view could not be made again from it",
                f"cdc -p FILE migrate, or: ALTER TABLE {quoted_table(node.table)} REPLICA IDENTITY FULL",
            )


def _explain(conn: Connection, pipeline: Pipeline, view: View) -> None:
    try:
        with conn.transaction(force_rollback=True):
            if view.has_clock:
                setting = clock_setting(view.name)
                conn.execute("SELECT set_config(%s, 'epoch', true)", [setting])
            conn.execute(f"EXPLAIN {document_query(view)}".encode())
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
        reason = error.diag.message_primary or str(error).splitlines()[0]
        raise pipeline.mistake(
            ("views", view.name),
            f"Postgres refuses the query of the view: {reason}",
            f"cdc -p FILE views sql {view.name} prints it",
        ) from None
