"""Views that the source's catalog shows can't be kept right are refused, with their line."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc.config import settings
from cdc.documents.resolve import resolve_views
from cdc.documents.source_checks import check_views, missing_indexes
from cdc.errors import SettingsError
from cdc.postgres import catalog, source, table_survey

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


@pytest.fixture
def connection(postgres_dsn: str) -> Iterator[source.Connection]:
    with source.connect(postgres_dsn) as connection:
        connection.execute(TABLES)
        for name in "abc":
            connection.execute(f"ALTER TABLE lib.{name} REPLICA IDENTITY FULL".encode())
        yield connection


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
    (tmp_path / "lib.yaml").write_text(head + TIMED)
    pipeline = settings.load(tmp_path / "lib.yaml", {})
    pipeline = pipeline.with_tables(catalog.find_tables(connection, pipeline).names)
    tables = table_survey.describe(connection, pipeline)
    advice = missing_indexes(connection, resolve_views(pipeline, tables))
    statement = 'CREATE INDEX ON "lib"."c" ("code", "seen")'
    assert [text.partition("make one: ")[2] for text in advice] == [statement] * (not is_enough)


def check(connection: source.Connection, folder: Path, text: str) -> None:
    (folder / "lib.yaml").write_text(text)
    pipeline = settings.load(folder / "lib.yaml", {})
    pipeline = pipeline.with_tables(catalog.find_tables(connection, pipeline).names)
    tables = table_survey.describe(connection, pipeline)
    check_views(connection, pipeline, resolve_views(pipeline, tables))


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


@pytest.mark.parametrize(
    ("on", "options", "message", "hint"),
    [
        ("{m: m}", "", "several rows of lib.b may have the same m", 'INDEX ON "lib"."b" ("m")'),
        ("{m: n}", "", "several rows of lib.b may have the same n", "add many: true"),
        ("{m: unsure}", "", "several rows of lib.b", "many: true"),
        ("{code: code || 'x'}", "", "several rows of lib.b may have the same", "many"),
    ],
)
def test_an_object_that_several_rows_might_be_is_refused_with_its_line(
    connection: source.Connection, tmp_path: Path, on: str, options: str, message: str, hint: str
) -> None:
    require_refusal(connection, tmp_path, (on, options), message, hint)


@pytest.mark.parametrize(
    ("on", "options", "message", "hint"),
    [
        ("{word: code}", "", "lib.b.word has a nondeterministic collation, lib.loose", "another"),
        ("{word || 'x': code}", "", "lib.b.word has a nondeterministic collation", ""),
        ("{code: word}", "many: true, ", "lib.b.word has a nondeterministic collation", ""),
    ],
)
def test_a_collation_that_can_not_be_kept_is_refused_with_its_line(
    connection: source.Connection, tmp_path: Path, on: str, options: str, message: str, hint: str
) -> None:
    require_refusal(connection, tmp_path, (on, options), message, hint)


def require_refusal(
    connection: source.Connection,
    folder: Path,
    include: tuple[str, str],
    message: str,
    hint: str,
) -> None:
    """A nested object that is joined `on`, with further options, is refused at its line."""
    on, options = include
    text = FILE.format(dsn=connection.info.dsn, on=on, options=options)
    with pytest.raises(SettingsError) as caught:
        check(connection, folder, text)
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


def test_what_rows_of_a_pattern_have_in_common_is_refused_with_its_line(
    connection: source.Connection, tmp_path: Path
) -> None:
    connection.execute("ALTER TABLE lib.a ADD COLUMN at timestamptz")
    text = (
        FILE[: FILE.index("  a_docs:")].format(dsn=connection.info.dsn)
        + """\
  risen:
    from: lib.a
    pattern: {by: [plain], order_by: at, steps: {up: {where: b > 0, times: 3}}, within: 1 day, unless: b < 0}
    to: [topic]
"""
    )
    check(connection, tmp_path, text)
    with pytest.raises(SettingsError, match=r"lib\.a\.loose has a nondeterministic") as caught:
        check(connection, tmp_path, text.replace("plain", "loose"))
    assert "lib.yaml:11: views.risen.pattern.by: " in caught.value.message


@pytest.mark.parametrize("window", ["", "window: {sliding: 1 day, time: at}, "])
def test_different_values_that_may_be_equal_are_refused_with_their_line(
    connection: source.Connection, tmp_path: Path, window: str
) -> None:
    connection.execute("ALTER TABLE lib.a ADD COLUMN at timestamptz")
    text = (
        FILE[: FILE.index("  a_docs:")].format(dsn=connection.info.dsn)
        + f"""\
  words:
    {{from: lib.a, {window}group_by: [b], to: [topic], select: {{n: count(*),
      words: count(DISTINCT plain)}}}}
"""
    )
    check(connection, tmp_path, text)
    with pytest.raises(SettingsError, match=r"lib\.a\.loose has a nondeterministic") as caught:
        check(connection, tmp_path, text.replace("plain", "loose"))
    assert "lib.yaml:11: views.words.select.words: " in caught.value.message


def test_a_query_that_postgres_refuses_is_named(
    connection: source.Connection, tmp_path: Path
) -> None:
    connection.execute("CREATE ROLE blind_reader")
    try:
        connection.execute("GRANT USAGE ON SCHEMA lib TO blind_reader")
        connection.execute("GRANT SELECT ON lib.a TO blind_reader")
        connection.execute("SET ROLE blind_reader")
        text = FILE.format(dsn=connection.info.dsn, on="{m: id}", options="")
        with pytest.raises(SettingsError, match=r"lib\.yaml:9: .*permission denied") as caught:
            check(connection, tmp_path, text)
        assert "views sql a_docs" in caught.value.hint
    finally:
        connection.execute("RESET ROLE")
        connection.execute("DROP OWNED BY blind_reader")
        connection.execute("DROP ROLE blind_reader")


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
    # A domain over an enum it doesn't even compare with a text.
    with pytest.raises((psycopg.errors.DataError, psycopg.errors.UndefinedFunction)):
        connection.execute(b"SELECT FROM lib.a WHERE " + condition.encode())
    check(connection, tmp_path, text.replace("'draft'", "'hidden'"))


def test_a_condition_with_a_misspelt_label_names_the_right_one(
    connection: source.Connection, tmp_path: Path
) -> None:
    text = FILE.format(dsn=connection.info.dsn, on="{m: id}", options="")
    text = text.replace("    root: lib.a\n", "    root: lib.a\n    where: phase <> 'drafts'\n")
    with pytest.raises(SettingsError, match=r"lib\.a\.phase has no label 'drafts'") as caught:
        check(connection, tmp_path, text)
    assert caught.value.hint == "did you mean 'draft'?"
