"""Views that the source's catalog shows can't be kept right are refused, with their line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.config import settings
from cdc.documents.plan import View
from cdc.documents.resolve import resolve_views
from cdc.documents.source_checks import check_views, missing_indexes
from cdc.errors import SettingsError
from cdc.postgres import catalog, source, table_survey
from tests.support.postgres import sibling

TABLES = """
CREATE SCHEMA lib;
CREATE TYPE lib.stage AS ENUM ('draft', 'open', 'gone');
CREATE DOMAIN lib.phase AS lib.stage;
CREATE COLLATION lib.loose (provider = libc, locale = 'C');
CREATE TABLE lib.a (
    id int PRIMARY KEY, b int, code text, loose text COLLATE lib.loose, german text COLLATE "C",
    short varchar(3), plain text, stage lib.stage, phase lib.phase);
CREATE TABLE lib.b (
    id int PRIMARY KEY, n int, m int NOT NULL, code text, word text COLLATE lib.loose, unsure int,
    french text COLLATE "POSIX", short varchar(3) UNIQUE, late int UNIQUE DEFERRABLE);
CREATE TABLE lib.c (id int PRIMARY KEY, code text, seen timestamptz);
CREATE UNIQUE INDEX ON lib.b (n, m);
CREATE UNIQUE INDEX ON lib.b (unsure) WHERE n > 0;
CREATE UNIQUE INDEX ON lib.b (lower(code));
CREATE UNIQUE INDEX ON lib.b (word);
CREATE UNIQUE INDEX ON lib.b (french);
CREATE UNIQUE INDEX ON lib.b (code) INCLUDE (n);
-- As ICU makes one, which not every server has.
UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'loose';
"""
FILE = """\
pipeline: lib
kafka: localhost:9092
connect: http://localhost:8083
source: {{dsn: "{dsn}", tables: ["lib.*"]}}
sinks:
  cache: {{type: redis, url: "redis://localhost/0", prefix: lib}}
state: {{type: redis, url: "redis://localhost/2", prefix: lib}}
views:
  a_docs:
    root: lib.a
    include:
      first: {{table: lib.b, on: {{id: id}}, columns: [id], include: {{
        second: {{table: lib.b, on: {on}, {options}columns: [m]}}}}}}
    to: [topic]
"""


@pytest.fixture(scope="module")
def tables(stack: Any) -> Iterator[source.Connection]:
    with sibling(stack.endpoints.postgres) as dsn, source.connect(dsn) as connection:
        connection.execute(TABLES)
        for name in "abc":
            connection.execute(f"ALTER TABLE lib.{name} REPLICA IDENTITY FULL".encode())
        yield connection


@pytest.fixture
def connection(tables: source.Connection) -> Iterator[source.Connection]:
    """What a test changes is taken back."""
    with tables.transaction(force_rollback=True):
        yield tables


TIMED = """\
  last:
    root: lib.c
    include:
      before: {table: lib.c, on: {code: code}, previous: {seen: seen}, columns: [id]}
      computed: {table: lib.c, on: {code: "code || 'x'"}, as_of: {seen: seen}, columns: [id]}
    to: [topic]
  moving: {from: lib.c, window: {sliding: 1 hour, time: seen}, group_by: [code], select: {n: count(*)}, to: [topic]}
"""


@pytest.mark.parametrize(
    ("index", "is_enough"),
    [
        ("(id)", False),
        ("(seen, code)", False),
        ("(code)", False),
        ("(code, seen) WHERE id > 0", False),
        ("(code, seen)", True),
        ("(code, seen, id)", True),
    ],
)
def test_an_index_for_joins_in_time_is_advised(
    connection: source.Connection, tmp_path: Path, index: str, is_enough: bool
) -> None:
    connection.execute(f"CREATE INDEX ON lib.c {index}".encode())
    head, _, _ = FILE.format(dsn=connection.info.dsn, on="", options="").partition("  a_docs")
    _, views = resolve(connection, tmp_path, head + TIMED)
    advice = missing_indexes(connection, views)
    statement = 'CREATE INDEX ON "lib"."c" ("code", "seen")'
    assert [text.partition("make one: ")[2] for text in advice] == [statement] * (not is_enough)


def resolve(
    connection: source.Connection, folder: Path, text: str
) -> tuple[settings.Pipeline, tuple[View, ...]]:
    (folder / "lib.yaml").write_text(text)
    pipeline = settings.load(folder / "lib.yaml", {})
    pipeline = pipeline.with_tables(catalog.find_tables(connection, pipeline).names)
    tables = table_survey.describe(connection, pipeline)
    return pipeline, resolve_views(pipeline, tables)


def check(connection: source.Connection, folder: Path, text: str) -> None:
    check_views(connection, *resolve(connection, folder, text))


@pytest.mark.parametrize(
    ("on", "options"),
    [
        ("{m: id}", ""),
        ("{n: n, m: m}", ""),
        ("{code: code}", ""),
        ("{code: code, n: m}", ""),
        ("{m: late}", ""),
        ("{short: short}", ""),
        ("{m: unsure}", "many: true, "),
        ("{code || 'x': code}", ""),
    ],
)
def test_what_can_be_kept_is_accepted(
    connection: source.Connection, tmp_path: Path, on: str, options: str
) -> None:
    check(connection, tmp_path, FILE.format(dsn=connection.info.dsn, on=on, options=options))


SEVERAL = "several rows of lib.b"
LOOSE = "lib.b.word has a nondeterministic collation"


@pytest.mark.parametrize(
    ("on", "options", "message", "hint"),
    [
        ("{m: m}", "", f"{SEVERAL} may have the same m", 'INDEX ON "lib"."b" ("m")'),
        ("{m: n}", "", f"{SEVERAL} may have the same n", "add many: true"),
        ("{m: unsure}", "", SEVERAL, "many: true"),
        ("{code: code || 'x'}", "", f"{SEVERAL} may have the same", "many"),
        ("{word: code}", "", f"{LOOSE}, lib.loose", "another"),
        ("{word || 'x': code}", "", LOOSE, ""),
        ("{code: word}", "many: true, ", LOOSE, ""),
    ],
)
def test_a_join_that_can_not_be_kept_is_refused_with_its_line(
    connection: source.Connection, tmp_path: Path, on: str, options: str, message: str, hint: str
) -> None:
    text = FILE.format(dsn=connection.info.dsn, on=on, options=options)
    with pytest.raises(SettingsError) as caught:
        check(connection, tmp_path, text)
    assert "lib.yaml:13: views.a_docs.include.first.include.second.on" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_two_collations_are_refused(connection: source.Connection, tmp_path: Path) -> None:
    text = FILE.format(dsn=connection.info.dsn, on="{m: id}", options="")
    with pytest.raises(SettingsError, match='different collations, "C" and "POSIX"'):
        check(connection, tmp_path, text.replace("on: {id: id}", "on: {german: french}"))


def test_a_joined_column_that_the_log_may_lack_is_refused(
    connection: source.Connection, tmp_path: Path
) -> None:
    connection.execute("ALTER TABLE lib.b REPLICA IDENTITY DEFAULT")
    for on in ("{code: code}", "{code || short: code}"):
        text = FILE.format(dsn=connection.info.dsn, on=on, options="")
        with pytest.raises(SettingsError, match=r"leave code of lib\.b out of the log") as caught:
            check(connection, tmp_path, text)
        assert 'ALTER TABLE "lib"."b" REPLICA IDENTITY FULL' in caught.value.hint
    # A text of three characters is always in its row.
    check(
        connection,
        tmp_path,
        FILE.format(dsn=connection.info.dsn, on="{short: short}", options=""),
    )


DISTINCT = "group_by: [b], to: [topic], select: {n: count(*), n2: count(DISTINCT plain)}"


@pytest.mark.parametrize(
    ("view", "place"),
    [
        (
            "pattern: {by: [plain], order_by: at, steps: {up: {where: b > 0, times: 3}}, within: 1 day,"
            " unless: b < 0}, to: [topic]",
            "pattern.by",
        ),
        (DISTINCT, "select.n2"),
        (f"window: {{sliding: 1 day, time: at}}, {DISTINCT}", "select.n2"),
    ],
)
def test_different_values_that_may_be_equal_are_refused_with_their_line(
    connection: source.Connection, tmp_path: Path, view: str, place: str
) -> None:
    connection.execute("ALTER TABLE lib.a ADD COLUMN at timestamptz")
    head = FILE[: FILE.index("  a_docs:")].format(dsn=connection.info.dsn)
    text = f"{head}  found: {{from: lib.a, {view}}}\n"
    check(connection, tmp_path, text)
    with pytest.raises(SettingsError, match=r"lib\.a\.loose has a nondeterministic") as caught:
        check(connection, tmp_path, text.replace("plain", "loose"))
    assert f"lib.yaml:9: views.found.{place}: " in caught.value.message


def test_a_query_that_postgres_refuses_is_named(
    connection: source.Connection, tmp_path: Path
) -> None:
    connection.execute("CREATE ROLE blind_reader")
    connection.execute("GRANT USAGE ON SCHEMA lib TO blind_reader")
    connection.execute("GRANT SELECT ON lib.a TO blind_reader")
    connection.execute("SET LOCAL ROLE blind_reader")
    text = FILE.format(dsn=connection.info.dsn, on="{m: id}", options="")
    with pytest.raises(SettingsError, match=r"lib\.yaml:9: .*permission denied") as caught:
        check(connection, tmp_path, text)
    assert "views sql a_docs" in caught.value.hint


CONDITIONS = (
    "stage <> 'draft'",
    "stage IN ('open', 'draft')",
    "id > 1 AND NOT (phase = 'draft')",
    "coalesce(stage, 'draft') = stage",
    "stage = coalesce(phase, 'draft')",
)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_with_a_label_that_is_renamed_is_refused_with_its_line(
    connection: source.Connection, tmp_path: Path, condition: str
) -> None:
    """As Postgres refuses it: it would hide no row any more, and what it hid would be shown."""
    text = FILE.format(dsn=connection.info.dsn, on="{m: id}", options="")
    text = text.replace("    root: lib.a\n", f"    root: lib.a\n    where: {condition}\n")
    check(connection, tmp_path, text)
    connection.execute("ALTER TYPE lib.stage RENAME VALUE 'draft' TO 'hidden'")
    with pytest.raises(SettingsError) as caught:
        check(connection, tmp_path, text)
    assert "lib.yaml:11: views.a_docs.where" in caught.value.message
    assert "has no label 'draft'" in caught.value.message
    assert caught.value.hint == "its labels: hidden, open, gone"
    misspelt = text.replace("'draft'", "'hiden'")
    with pytest.raises(SettingsError, match=r"has no label 'hiden'") as caught:
        check(connection, tmp_path, misspelt)
    assert caught.value.hint == "did you mean 'hidden'?"
    # A domain over an enum it doesn't even compare with a text.
    refusals = (psycopg.errors.DataError, psycopg.errors.UndefinedFunction)
    with pytest.raises(refusals), connection.transaction():
        connection.execute(b"SELECT FROM lib.a WHERE " + condition.encode())
    check(connection, tmp_path, text.replace("'draft'", "'hidden'"))
