"""Find the tables that a pipeline file names: match patterns such as `public.*` with the catalog.

In:  a connection, the file's entries. Out: names of tables; those that a pattern leaves out, and
why.
Invariant: `cdc migrate` and `cdc register` decide the names, which are stored in the registration.
A table that is created later waits for the next run of both, so that no other command sees more
tables than are captured.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from psycopg import sql
from psycopg.rows import class_row

from cdc.config.settings import Pipeline
from cdc.config.source_settings import TOPIC_CHARACTERS, shared_names
from cdc.errors import SettingsError, SourceError, TableRefused
from cdc.model.finding import Finding, find
from cdc.postgres.source import Connection
from cdc.readiness.facts import read_publication
from cdc.readiness.key_index import KINDS

CANDIDATES = """
SELECT n.nspname::text AS schema, c.relname::text AS name, c.relkind::text AS kind,
       c.relpersistence <> 'p' AS unlogged,
       (SELECT rn.nspname || '.' || r.relname FROM pg_class r JOIN pg_namespace rn ON rn.oid = r.relnamespace
        WHERE c.relispartition AND r.oid = pg_partition_root(c.oid)) AS root,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate) AS keyed,
       (SELECT e.extname::text FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
        WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'
              AND d.refclassid = 'pg_extension'::regclass LIMIT 1) AS extension
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'cdc')
ORDER BY 1, 2
"""
PARTITIONS_BESIDE_ROOTS = """
SELECT n.nspname || '.' || c.relname, an.nspname || '.' || a.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN LATERAL pg_partition_ancestors(c.oid) up (oid) ON up.oid <> c.oid
JOIN pg_class a ON a.oid = up.oid JOIN pg_namespace an ON an.oid = a.relnamespace
WHERE c.relispartition AND n.nspname || '.' || c.relname = ANY (%(names)s)
      AND an.nspname || '.' || a.relname = ANY (%(names)s)
"""


@dataclass(frozen=True)
class Candidate:
    """A relation that a pattern may match; `root` is the partitioned table whose rows it holds."""

    schema: str
    name: str
    kind: str = "r"
    unlogged: bool = False
    root: str | None = None
    keyed: bool = True
    extension: str | None = None

    @property
    def qualified(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def obstacle(self) -> str | None:
        """Why a pattern leaves the relation out; None if it doesn't."""
        reasons = {
            f"{KINDS.get(self.kind)}: the log has rows of tables only": self.kind in KINDS,
            f"a partition of {self.root}, which has its rows": self.root is not None,
            f"of the extension {self.extension}": self.extension is not None,
            "not logged: its rows never reach the log": self.unlogged,
            "a topic's name can't have other characters than letters, digits, _ and -": not all(
                re.fullmatch(TOPIC_CHARACTERS, part) for part in (self.schema, self.name)
            ),
            f"no primary key: list it with one, {{table: {self.qualified}, key: [...]}}": not self.keyed,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class Choice:
    """The tables of a file, in its order; `left_out` holds the reason for each match that isn't
    captured.
    """

    names: tuple[str, ...]
    left_out: Mapping[str, str]

    @property
    def findings(self) -> list[Finding]:
        return [
            find(
                "table-left-out",
                name,
                f"{name} is left out: {why}.",
                "cdc -p FILE plan",
                table=name,
            )
            for name, why in self.left_out.items()
        ]


def candidates(conn: Connection) -> list[Candidate]:
    """All relations of the database that a pattern may match: not the tables of Postgres, nor the
    pipeline's.
    """
    with conn.cursor(row_factory=class_row(Candidate)) as cursor:
        return cursor.execute(CANDIDATES).fetchall()


def choose_tables(pipeline: Pipeline, relations: Sequence[Candidate]) -> Choice:
    """Choose the tables of a pipeline file. Pure. A table listed by name is chosen even if a
    pattern leaves it out.

    Raises:
        SettingsError: a pattern matches nothing that can be captured, or tables whose views would
            have one name.
    """
    listed = [entry.table for entry in pipeline.listed if not entry.pattern]
    good = [candidate.qualified for candidate in relations if candidate.obstacle is None]
    left_out: dict[str, str] = {}
    for entry in pipeline.patterns:
        matched = [
            candidate
            for candidate in relations
            if entry.matches(candidate.qualified) and candidate.qualified not in listed
        ]
        left_out |= {
            candidate.qualified: candidate.obstacle for candidate in matched if candidate.obstacle
        }
        if not any(entry.matches(name) for name in [*good, *listed]):
            raise _no_match(entry.table, relations, left_out)
    owners = {shared: name for name in listed for shared in shared_names(name)}
    names = [entry.table for entry in pipeline.with_tables(good).source.tables]
    for name in names:
        if name in listed:
            continue
        owner = next((owners[shared] for shared in shared_names(name) if shared in owners), None)
        if owner is not None:
            left_out[name] = f"its index or topic would have the same name as {owner}'s"
    names = [name for name in names if name not in left_out]
    _refuse_alike(names)
    return Choice(tuple(names), left_out)


def find_tables(conn: Connection, pipeline: Pipeline) -> Choice:
    """Choose the tables of the file in this database. Queries it only for patterns. Raises
    SettingsError.
    """
    return choose_tables(pipeline, candidates(conn) if pipeline.patterns else [])


def refuse_published(conn: Connection, pipeline: Pipeline, aside: Collection[str] = ()) -> None:
    """Raise SourceError for a published table that exists and that a pattern now leaves out, unless
    it is set aside.
    """
    if pipeline.patterns and (publication := read_publication(conn, pipeline.pipeline)):
        published = [name for name in sorted(publication.tables) if name not in aside]
        refuse_slipped(published, find_tables(conn, pipeline), pipeline)


def refuse_slipped(captured: Iterable[str], choice: Choice, pipeline: Pipeline) -> None:
    """Raise SourceError for a captured table that a pattern now leaves out: nobody has removed it
    from the file.

    A partition of a captured table is no such table: its rows come as rows of that table.
    """
    partition_reasons = {f"a partition of {name}, which has its rows" for name in choice.names}
    for name in captured:
        if name in choice.left_out and choice.left_out[name] not in partition_reasons:
            table = sql.Identifier(*name.split(".", 1)).as_string()
            raise SourceError(
                f"{name} is captured, and by patterns in source.tables alone it no longer would be:"
                f" {choice.left_out[name]}. Its changes would be lost from then on.",
                finding_key="table-slipped",
                hint=f"undo that, or list {name} by its name; or, to give its views up: ALTER PUBLICATION"
                f" {pipeline.pipeline} DROP TABLE ONLY {table}, then cdc -p FILE migrate, and register",
                table=name,
            )


def listed_partitions(conn: Connection, names: Iterable[str]) -> dict[str, SourceError]:
    """An error for each table that is a partition of another one among them, by name.

    Its rows come once, as rows of the partitioned table.
    """
    return {
        partition: TableRefused(
            f"{partition} is a partition of {root}, which is listed, too: its rows come as rows of {root}.",
            hint=f"take {partition} out of source.tables",
            table=partition,
        )
        for partition, root in conn.execute(
            PARTITIONS_BESIDE_ROOTS, {"names": list(names)}
        ).fetchall()
    }


def _refuse_alike(names: Sequence[str]) -> None:
    owners: dict[str, str] = {}
    for name in names:
        for shared in shared_names(name):
            if owners.setdefault(shared, name) != name:
                raise SettingsError(
                    f"The views of {owners[shared]} and {name} would have one name: an index's is in lower case, and of"
                    " topics that differ only in . and _ only one can be.",
                    hint="list the one that you mean by its name in source.tables: patterns then leave the other out",
                )


def _no_match(
    pattern: str, relations: Sequence[Candidate], left_out: Mapping[str, str]
) -> SettingsError:
    if excluded := list(left_out):
        return SettingsError(
            f"{pattern} in source.tables matches no table that can be captured: {excluded[0]} is left out"
            f" ({left_out[excluded[0]]}).",
            hint="list tables by their names",
        )
    schemas = sorted({candidate.schema for candidate in relations if candidate.obstacle is None})
    return SettingsError(
        f"{pattern} in source.tables matches no table.",
        hint=f"tables are in: {', '.join(schemas) or 'no schema yet'}",
    )
