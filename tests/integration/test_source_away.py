"""Postgres that goes away while it is asked: what a connection that breaks in mid-question leads to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from cdc.apply.schema_follower import SchemaFollower
from cdc.config.settings import Pipeline
from cdc.control.registrations import Captured, Registration
from cdc.errors import SourceUnavailable
from cdc.observe.collection import collect
from cdc.postgres import source, table_survey
from cdc.postgres.table_definition import Definition
from cdc.sink.remedy import Remedy, remedy
from tests.support.pipelines import pipeline
from tests.support.proxy import Road


@pytest.fixture
def items(postgres_dsn: str) -> Pipeline:
    with psycopg.connect(postgres_dsn) as conn:
        conn.execute("CREATE TABLE items (id int PRIMARY KEY, v int)")
        conn.execute("CREATE PUBLICATION shop FOR TABLE items")
    return pipeline("shop", postgres_dsn, "public.items")


@contextmanager
def through(items: Pipeline, word: bytes) -> Iterator[Pipeline]:
    """The same pipeline on a way to Postgres that breaks at a word."""
    address = urlsplit(items.source.dsn)
    road = Road(address.port or 0, word)
    netloc = address.netloc.rpartition("@")[0] + f"@127.0.0.1:{road.port}"
    yield pipeline("shop", address._replace(netloc=netloc).geturl(), "public.items")
    road.close()


def definition(number: int) -> Definition:
    return Definition(number, "public.items", 1, number, "ALTER TABLE", (), None, streamed=False)


def test_tables_stay_as_they_were_known(items: Pipeline) -> None:
    with source.connect(items.source.dsn) as conn:
        known_tables = table_survey.describe(conn, items)
    with through(items, b"search_path") as broken:
        tables, aside = SchemaFollower(lambda: broken, known_tables)([], Registration())
    assert (tuple(tables), aside) == (known_tables, {})


def test_a_password_that_cant_be_read_is_a_source_that_is_away(
    items: Pipeline, tmp_path: Path
) -> None:
    with source.connect(items.source.dsn) as conn:
        known_tables = table_survey.describe(conn, items)
    file = tmp_path / "password"
    reference = f"${{file:{file}}}"
    locked = pipeline("shop", f"{items.source.dsn}?password={reference}", "public.items")
    tables, aside = SchemaFollower(lambda: locked, known_tables)([], Registration())
    assert (tuple(tables), aside) == (known_tables, {})
    with pytest.raises(SourceUnavailable, match=re.escape(reference)) as caught:
        source.connect(locked.source.dsn)
    assert "it is read again at the next connection" in caught.value.hint


def test_tables_that_have_changed_meanwhile_are_waited_for(items: Pipeline) -> None:
    """Else the new column would stay out of all views until somebody starts `cdc run` again."""
    with source.connect(items.source.dsn) as conn:
        known_tables = table_survey.describe(conn, items)
    with through(items, b"search_path") as broken:
        file = [items]
        follower = SchemaFollower(lambda: file[0], known_tables)
        follower([definition(1)], Registration())
        file[0] = broken
        with pytest.raises(SourceUnavailable) as caught:
            follower([definition(1), definition(2)], Registration())
        assert remedy(caught.value) is Remedy.RETRY
        with pytest.raises(SourceUnavailable):
            follower([definition(1)], Registration(tables={"public.items": Captured(("v",))}))
        file[0] = items
        assert tuple(follower([definition(1), definition(2)], Registration())[0]) == known_tables


def test_status_names_the_part_that_went_away(items: Pipeline) -> None:
    with through(items, b"pg_replication_slots") as broken:
        findings = {finding.code: finding for finding in collect(broken, positions={}).findings}
    assert "Postgres" in findings["source-unreachable"].message
    assert findings["source-unreachable"].fix
