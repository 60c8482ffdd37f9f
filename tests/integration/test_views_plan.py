"""What a changed file makes again, what `register` would meet of its views, and how much the state
holds: read from real servers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.documents.needs import all_needs, rebuilds
from cdc.errors import SinkUnavailable
from cdc.runtime.context import Context
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.documents import sink as documents
from tests.integration.test_document_cases import (
    AUTHOR_DOCS,
    BOOK_DOCS,
    DEEP,
    library,
)
from tests.support.document_history import PREFIX, History
from tests.support.shop import Shop
from tests.support.verbs import document_of

VIEWS = AUTHOR_DOCS + BOOK_DOCS
TABLES = ["lib.authors", "lib.books"]
NOTHING = (dict.fromkeys(TABLES, False), {"author_docs": False, "book_docs": False})


def outlook(history: History, views: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """What these views would make again, after those that the state was made for."""
    history.declare(views, prepare=False)
    needs = all_needs(history.plan, dict.fromkeys(history.views, "topic"))
    return rebuilds(history.sink, needs, empty(history))


def empty(history: History) -> set[str]:
    """The topics without a record."""
    filled = {name for name, _ in history.ends}
    return {table.topic for table in history.plan.tables if table.name not in filled}


def test_a_changed_file_makes_again_what_it_changes(history: History) -> None:
    history.connection.execute("CREATE TABLE lib.spare (id int PRIMARY KEY)")
    library(history, VIEWS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    assert outlook(history, VIEWS) == NOTHING
    # A column that may be NULL no more: what is in a document is what the log says.
    for column in ("authors ALTER name", "books ALTER author_id"):
        history.connection.execute(f"ALTER TABLE lib.{column} SET NOT NULL")
    assert outlook(history, VIEWS) == NOTHING
    # Another limit: the documents of one view, for which its root's rows are read again; so those
    # of the other, which hold these rows.
    limited = VIEWS.replace("columns: [title]", "columns: [title], limit: 3")
    assert outlook(history, limited) == (
        {"lib.authors": True, "lib.books": False},
        {"author_docs": True, "book_docs": True},
    )
    # One view less: what was its root is read again without it, and its lists go.
    assert outlook(history, BOOK_DOCS) == (
        {"lib.authors": True, "lib.books": True},
        {"book_docs": True},
    )
    # Another topic: all that goes there.
    history.declare(VIEWS, prepare=False)
    needs = all_needs(history.plan, {"author_docs": "topic", "book_docs": "another"})
    assert rebuilds(history.sink, needs, empty(history))[1] == {
        "author_docs": True,
        "book_docs": True,
    }
    # To look changes nothing.
    history.declare(VIEWS)
    history.settle()


def test_a_table_that_never_had_a_row_is_not_read_again(history: History) -> None:
    library(history, VIEWS)
    assert outlook(history, VIEWS) == NOTHING
    history.do("INSERT INTO lib.authors VALUES (1, 'A')")
    assert outlook(history, VIEWS)[0] == {"lib.authors": True, "lib.books": False}
    history.settle()
    assert outlook(history, VIEWS) == NOTHING


def test_a_table_that_no_view_uses_any_more_leaves_nothing_in_the_state(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a view with documents to send, also when the first run with the changed file ends
    amid that; and the table is read again when a view needs it again.
    """
    library(history, DEEP)
    adopt(history, DEEP)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books VALUES (1, 1)",
        "INSERT INTO lib.reviews VALUES (1, 1)",
        "INSERT INTO lib.tags VALUES (1, 't')",
        "INSERT INTO lib.book_tags VALUES (1, 1)",
    )
    history.settle()
    history.do("UPDATE lib.reviews SET stars = 1", "UPDATE lib.book_tags SET tag_id = 1")
    history.apply()
    with monkeypatch.context() as patch:
        patch.setattr(documents, "remove_keys", ends_here)
        with pytest.raises(SinkUnavailable):
            adopt(history, VIEWS)
    adopt(history, VIEWS)
    assert state_keys(history) > {"lib.authors", "lib.books"}
    assert not state_keys(history) & {"lib.reviews", "lib.tags", "lib.book_tags"}
    history.prepare()
    history.settle()
    adopt(history, DEEP)
    history.prepare()
    history.settle()
    assert history.document("author_docs", 1)["books"][0]["tags"]


def test_a_table_that_comes_back_half_removed_counts_no_row_twice(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What rows had entered that are gone is forgotten: in numbers, lists and sets."""
    views = BOOK_DOCS + AUTHOR_DOCS.replace(
        "columns: [title]}",
        "columns: [title], order_by: [year], aggregates: {n: count(*), years: sum(year)}}",
    )
    library(history, views)
    adopt(history, views)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')",
        "INSERT INTO lib.books SELECT n, 1, 't', n FROM generate_series(1, 9) n",
    )
    history.settle()
    with monkeypatch.context() as patch:
        patch.setattr(documents, "remove_keys", ends_amid)
        with pytest.raises(SinkUnavailable):
            adopt(history, "  author_docs: {root: lib.authors, to: [topic]}\n")
    history.do("UPDATE lib.books SET author_id = 2 WHERE id < 9")
    adopt(history, views)
    history.prepare()
    history.settle()
    assert history.document("author_docs", 1)["n"] == 1


def adopt(history: History, views: str) -> None:
    history.declare(views, prepare=False)
    history.sink.adopt(history.plan, history.sink.needs, {})


def state_keys(history: History) -> set[str]:
    """The parts of the names of all keys of the state, and of the tables that it notes."""
    with redis.Redis.from_url(history.url, decode_responses=True) as server:
        keys = {part for key in server.scan_iter() for part in key.split(":")}
        noted = (server.smembers(f"{PREFIX}:_cdc"), server.hkeys(f"{PREFIX}:_needs"))
        return keys.union(*noted)


def ends_here(*_: object) -> None:
    raise SinkUnavailable("The run ends here.", hint="")


def ends_amid(pages: Iterable[Sequence[str]], database: Database) -> None:
    page = next(iter(pages))
    database.ask(lambda server: server.unlink(*page[: len(page) // 2]))
    ends_here()


def test_the_state_says_how_much_it_holds_and_has_to_do(history: History) -> None:
    library(history, VIEWS)
    state = history.sink.open_state()
    history.do(
        "INSERT INTO lib.authors SELECT n, 'A' FROM generate_series(1, 7) n",
        "INSERT INTO lib.books SELECT n, 1 FROM generate_series(1, 9) n",
    )
    history.apply()
    sizes = state.sizes(TABLES, list(history.views))
    assert sizes.rows == {"lib.authors": 7, "lib.books": 9}
    assert sizes.dirty == {"author_docs": 7, "book_docs": 9}
    assert sizes.pending > 0
    assert (sizes.used_bytes or 0) > sum(sizes.bytes.values())
    assert sizes.limit_bytes is None
    with redis.Redis.from_url(history.url) as server:
        server.config_set("maxmemory", 1 << 30)
        assert state.sizes(TABLES, []).limit_bytes == 1 << 30
        server.config_set("maxmemory", 0)
    history.settle()
    # A fan-out: what remains is what is dirty, once the changed row is climbed from.
    history.do("UPDATE lib.authors SET name = 'B' WHERE id = 1")
    history.apply()
    history.send("before write")
    sizes = state.sizes(TABLES, list(history.views))
    assert (sizes.dirty["book_docs"], sizes.pending) == (9, 0)
    assert sizes.bytes == {
        table: sum(
            len(row.row) + len(row.key) + 2 + len(row.head)
            for row in state.rows(table, [str(number) for number in range(1, 10)]).values()
        )
        for table in TABLES
    }
    history.do("DELETE FROM lib.books", "DELETE FROM lib.authors")
    history.settle()
    sizes = state.sizes(TABLES, list(history.views))
    assert set(sizes.rows.values()) | set(sizes.bytes.values()) == {0}


def test_plan_and_doctor_say_of_a_view_what_register_would_meet(
    shop: Shop,
    stack: Any,
    unique: str,
    tmp_path: Path,
) -> None:
    file = tmp_path / "shop.yaml"
    cdc = partial(document_of, file)
    url = stack.endpoints.redis.rsplit("/", 1)[0] + "/3"
    alike = {"table": "shop.orders", "on": {"note": "note"}, "many": True, "columns": ["id"]}

    def declare(counters: dict[str, Any]) -> None:
        include = {"counters": {"table": "shop.counters", **counters}, "alike": alike}
        shop.file(
            tmp_path,
            sinks={"search": {"type": "elasticsearch", "url": stack.endpoints.elasticsearch}},
            state={"type": "redis", "url": url, "prefix": unique},
            views={"order_docs": {"root": "shop.orders", "include": include, "to": ["search"]}},
        )

    def found(code: str) -> list[dict[str, Any]]:
        findings = cdc("doctor", code=None)["findings"]
        return [finding for finding in findings if finding["code"] == code]

    refused = {"on": {"id": "n"}}
    accepted = {"on": {"id": "id"}, "columns": ["n"]}
    # The log lacks the joined note until `migrate` has set the replica identity: it does so first.
    declare(accepted)
    before = cdc("plan")
    assert "set REPLICA IDENTITY FULL on shop.orders" in before["migrate"]
    assert (before["refused"], found("view-refused")) == ([], [])

    shop.migrate()
    shop.register()
    declare(refused)
    (planned,) = cdc("plan")["refused"]
    assert "several rows of shop.counters may have the same n" in planned["what"]
    (finding,) = found("view-refused")
    assert planned["what"] in finding["message"]
    assert finding["subject"] == "view.order_docs"
    assert planned["what"] == cdc("register", 2)["error"]["message"]

    declare(accepted)
    valid = cdc("plan")
    assert (valid["refused"], found("view-refused")) == ([], [])
    assert valid["register"] == ["make the topic of view.order_docs"]
    assert "make view.order_docs in search, from its first record on" in valid["run"]
    cdc("register")
    assert cdc("plan")["register"] == []

    context = Context(file, tmp_path)
    (view,) = context.views
    (search,) = context.sinks(None)
    # As if it had been made when `note` was a number.
    former = tuple(
        replace(column, type="integer") if column.name == "note" else column
        for column in view.columns
    )
    search.prepare(replace(view, columns=former))
    (unfit,) = found("table-waiting")
    assert unfit["subject"] == "view.order_docs"
    assert ["view.order_docs" in refusal["what"] for refusal in cdc("plan")["refused"]] == [True]
    search.clear(view)
