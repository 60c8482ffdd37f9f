"""Whether a build of documents fits into the state's server: estimated before, and measured."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.documents.needs import EXCESS, require_room
from cdc.documents.state import StateTooLarge
from cdc.postgres.column_facts import estimate_rows
from tests.integration.test_document_cases import AUTHOR_DOCS, BOOK_DOCS, library
from tests.support.document_history import History
from tests.support.shop import Shop
from tests.support.verbs import document_of

VIEWS = AUTHOR_DOCS + BOOK_DOCS
FILLED = (
    "INSERT INTO lib.authors SELECT n, 'A' || n FROM generate_series(1, 3000) n",
    "INSERT INTO lib.books SELECT n, n % 3000, 'Title ' || n, 2000, 9.99"
    " FROM generate_series(1, 9000) n",
)


@pytest.fixture
def server(history: History) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(history.url) as server:
        yield server
        server.config_set("maxmemory", 0)


def used_memory(server: redis.Redis) -> int:
    return int(server.info("memory")["used_memory"])


def needed(message: str) -> int:
    """The bytes that a message says are needed."""
    return int(message.split("about ")[1].split(maxsplit=1)[0].replace(",", ""))


def lack(history: History) -> Any:
    return require_room(history.pipeline, history.sink, history.plan, history.sink.needs)


def test_an_estimate_is_near_what_the_rows_take(history: History, server: redis.Redis) -> None:
    library(history, VIEWS)
    used_before = used_memory(server)
    history.do(*FILLED)
    history.connection.execute("ANALYZE")
    server.config_set("maxmemory", 1 << 20)
    with pytest.raises(StateTooLarge) as refused:
        lack(history)
    server.config_set("maxmemory", 0)
    history.settle()
    growth = used_memory(server) - used_before
    assert 0.6 * growth < needed(refused.value.message) < EXCESS * growth


def test_a_build_is_refused_by_far_warned_of_by_a_little_and_else_nothing(
    history: History, server: redis.Redis
) -> None:
    library(history, VIEWS)
    history.do(*FILLED)
    server.config_set("maxmemory", 1 << 20)
    # Postgres doesn't know of the rows yet, and doesn't guess.
    assert estimate_rows(history.connection, history.plan.tables) == {}
    assert lack(history) is None
    history.connection.execute("ANALYZE")
    with pytest.raises(StateTooLarge) as refused:
        lack(history)
    error = refused.value
    assert error.finding_key == "state-too-large"
    assert history.url in error.message
    assert "of 1,048,576 bytes (maxmemory) are free" in error.message
    words = error.hint.split()
    assert words[-3:-1] == ["SET", "maxmemory"]
    # What the hint says is enough, for the estimate and for the rows.
    server.config_set("maxmemory", words[-1])
    assert lack(history) is None
    # The rows fit by themselves, beside what else is there they don't.
    while used_memory(server) < int(words[-1]) - 1_000_000:
        server.rpush("ballast", b"x" * 50_000)
    warning = lack(history)
    assert (warning.code, warning.severity) == ("state-too-large", "warning")
    assert warning.fix.split()[-2] == "maxmemory"
    server.delete("ballast")
    history.settle()
    # A state that is there isn't refused, whatever it takes.
    server.config_set("maxmemory", 1 << 20)
    assert lack(history) is None
    server.config_set("maxmemory", 0)
    history.connection.execute("TRUNCATE lib.books, lib.authors")


def test_nothing_is_refused_where_postgres_cannot_be_asked(
    history: History, server: redis.Redis
) -> None:
    library(history, VIEWS)
    history.do(*FILLED)
    history.connection.execute("ANALYZE")
    server.config_set("maxmemory", 1 << 20)
    source = history.pipeline.source.model_copy(update={"dsn": "host=127.0.0.1 port=1"})
    history.pipeline = history.pipeline.model_copy(update={"source": source})
    assert lack(history) is None


def test_rows_of_partitions_are_their_tables(history: History) -> None:
    history.connection.execute("""
        CREATE TABLE lib.days (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);
        CREATE TABLE lib.days_1 PARTITION OF lib.days FOR VALUES FROM (0) TO (1000);
        CREATE TABLE lib.days_2 PARTITION OF lib.days FOR VALUES FROM (1000) TO (2000);
        INSERT INTO lib.days SELECT n, 'abc' FROM generate_series(1, 1500) n;
        ANALYZE lib.days_1
    """)
    history.declare("  day_docs: {root: lib.days, to: [topic]}\n", prepare=False)
    assert estimate_rows(history.connection, history.plan.tables) == {}
    history.connection.execute("ANALYZE lib.days_2")
    (estimate,) = estimate_rows(history.connection, history.plan.tables).values()
    assert (estimate.rows, estimate.widths["note"]) == (1500, 4)


def test_plan_and_doctor_tell_it_before_a_run(
    shop: Shop, stack: Any, unique: str, state_url: str, tmp_path: Path
) -> None:
    file = shop.file(
        tmp_path,
        sinks={"search": {"type": "elasticsearch", "url": stack.endpoints.elasticsearch}},
        state={"type": "redis", "url": state_url, "prefix": unique},
        views={"order_docs": {"root": "shop.orders", "to": ["search"]}},
    )
    shop.conn.execute(
        "INSERT INTO shop.orders SELECT n, 'a note' FROM generate_series(1001, 20000) n"
    )
    shop.conn.execute("ANALYZE shop.orders")

    def findings() -> tuple[list[str], list[str]]:
        planned = [part["what"] for part in document_of(file, "plan", None)["refused"]]
        findings = document_of(file, "doctor", None)["findings"]
        of_state = [part["severity"] for part in findings if part["code"] == "state-too-large"]
        return planned, of_state

    assert findings() == ([], [])
    with redis.Redis.from_url(state_url) as server:
        server.flushall()
        try:
            server.config_set("maxmemory", 2_000_000)
            (planned,), severities = findings()
            assert "doesn't fit into the server" in planned
            assert severities == ["down"]
            # Without what the server itself takes.
            server.config_set("maxmemory", needed(planned))
            assert findings() == ([], ["warning"])
            server.config_set("maxmemory", 100_000_000)
            assert findings() == ([], [])
        finally:
            server.config_set("maxmemory", 0)
