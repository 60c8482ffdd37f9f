"""Documents case by case: what no random history reaches (`test_document_queries.py`, `test_time_joins.py`,
`test_grouped_views.py`). Each is a short history, compared with Postgres' own query.
"""

import json
import random
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from cdc.documents import state as state_module
from cdc.documents import tasks
from cdc.documents.state import State
from cdc.documents.tables import view_table
from cdc.documents.tasks import SLICE
from cdc.errors import ConnectorError, SettingsError
from cdc.verify.repair import send_documents_again
from tests.support.budget import SCALE
from tests.support.document_history import History
from tests.support.envelopes import PLACEHOLDER
from tests.support.wait import wait_until

LIBRARY = """
CREATE TABLE lib.authors (id int PRIMARY KEY, name text, agent_id int, unused text);
CREATE TABLE lib.books (id int PRIMARY KEY, author_id int, title text, year int, price numeric);
CREATE TABLE lib.tags (id int PRIMARY KEY, name text, parent_id int);
CREATE TABLE lib.book_tags (book_id int, tag_id int, PRIMARY KEY (book_id, tag_id));
CREATE TABLE lib.reviews (id int PRIMARY KEY, book_id int, stars int);
"""
BOOK_DOCS = """
  book_docs:
    root: lib.books
    include:
      author: {table: lib.authors, on: {author_id: id}, columns: [name]}
    to: [topic]
"""
AUTHOR_DOCS = """
  author_docs:
    root: lib.authors
    columns: [name]
    include:
      books: {table: lib.books, on: {id: author_id}, many: true, columns: [title]}
    to: [topic]
"""
DEEP = """
  author_docs:
    root: lib.authors
    columns: [name]
    include:
      books:
        table: lib.books
        on: {id: author_id}
        many: true
        include:
          reviews: {table: lib.reviews, on: {id: book_id}, many: true}
          tags:
            table: lib.book_tags
            on: {id: book_id}
            many: true
            flatten: tag
            include: {tag: {table: lib.tags, on: {tag_id: id}, columns: [name]}}
    to: [topic]
  review_docs:
    root: lib.reviews
    include:
      book:
        table: lib.books
        on: {book_id: id}
        include: {author: {table: lib.authors, on: {author_id: id}}}
    to: [topic]
"""
REVIEW_DOCS = DEEP[DEEP.index("  review_docs:") :]


def library(history: History, views: str) -> None:
    history.connection.execute(LIBRARY.encode())
    history.declare(views)


def test_the_first_documents(history: History) -> None:
    """None is looked for by what it includes: all of them are dirty. After it a parent's change sends its
    own documents and no other.
    """
    library(history, BOOK_DOCS)
    history.do(
        "INSERT INTO lib.authors SELECT n, 'x' FROM generate_series(1, 10) n",
        "INSERT INTO lib.books SELECT n, n % 10 + 1, 't' FROM generate_series(1, 1000) n",
    )
    history.apply()
    history.rows_read = 0
    history.send()
    assert history.rows_read == 1000 + 10
    history.check()
    history.forget_emitted()
    history.do("UPDATE lib.authors SET name = 'y' WHERE id = 2")
    history.settle()
    assert sorted(history.emitted_ids) == sorted(f"book_docs/{n}" for n in range(1, 1001, 10))


def test_what_changes_no_document_sends_none(history: History) -> None:
    library(history, BOOK_DOCS + AUTHOR_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')", "INSERT INTO lib.books VALUES (1, 1)"
    )
    history.settle()
    history.forget_emitted()
    # There and back within a batch.
    history.do("UPDATE lib.books SET author_id = 2")
    history.do("UPDATE lib.books SET author_id = 1")
    history.settle()
    # A column that no view uses.
    history.do("UPDATE lib.authors SET unused = 'x', agent_id = 3")
    history.settle()
    # The same range again.
    for place in list(history.log):
        for record in list(history.log[place]):
            history.log[place].append(type(record)(history.ends[place], record.key, record.value))
            history.ends[place] += 1
    history.settle()
    assert history.emitted_ids == []


def test_two_rows_swap_a_unique_value(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.products (
            id int PRIMARY KEY, code int UNIQUE DEFERRABLE INITIALLY DEFERRED, name text);
        CREATE TABLE lib.items (id int PRIMARY KEY, code int)""")
    history.declare("""
  item_docs:
    root: lib.items
    include: {product: {table: lib.products, on: {code: code}}}
    to: [topic]
""")
    history.do("INSERT INTO lib.products VALUES (1, 1, 'a'), (2, 2, 'b')")
    history.do("INSERT INTO lib.items VALUES (1, 1), (2, 2)")
    history.settle()
    for first in (0, 1):
        history.do("UPDATE lib.products SET code = 3 - code")
        history.batch(("products", first))
        history.batch(("products", 1 - first))
        history.check()


def test_many_children(history: History) -> None:
    library(
        history,
        AUTHOR_DOCS.replace(
            "columns: [title]}",
            "columns: [title], order_by: [-id], limit: 2,"
            " aggregates: {n: count(*), years: sum(year), mean: avg(year), first: min(year),"
            " last: max(year), cheapest: min(price), cost: sum(price), price: avg(price)}}\n"
            "      late: {table: lib.books, on: {id: author_id}, many: true, where: year > 2000,"
            " show: false, aggregates: {late: count(*)}}",
        ),
    )
    history.do("INSERT INTO lib.authors VALUES (1, 'A')")
    history.do(
        "INSERT INTO lib.books SELECT n, 1, 't' || n, 1990 + n % 20 FROM generate_series(1, 4000) n"
    )
    history.settle()
    assert history.document("author_docs", 1) == {
        "id": 1,
        "name": "A",
        "n": 4000,
        "years": 7998000,
        "mean": "1999.5000000000000000",
        "first": 1990,
        "last": 2009,
        "cheapest": None,
        "cost": None,
        "price": None,
        "late": 1800,
        "books": [{"title": "t4000"}, {"title": "t3999"}],
    }
    # The author, the book that has changed, and those that are shown: whatever there are besides.
    for statement in (
        "UPDATE lib.books SET year = 2030 WHERE id = 4000",
        "UPDATE lib.books SET title = 'x', year = NULL WHERE id = 5",
        "DELETE FROM lib.books WHERE id = 4000",
        "INSERT INTO lib.books VALUES (30000, 1, 'new', 2031)",
        "UPDATE lib.books SET price = 1.50 WHERE id = 7",
    ):
        history.do(statement)
        history.apply()
        history.rows_read = 0
        history.send()
        assert history.rows_read <= 8
        history.check()
    assert history.document("author_docs", 1)["late"] == 1801


def test_a_parent_of_many_changes(history: History) -> None:
    """It is made once a batch, however many of its rows have changed."""
    library(
        history,
        AUTHOR_DOCS.replace(
            "columns: [title]}", "columns: [title], limit: 2, aggregates: {cost: sum(price)}}"
        ),
    )
    history.do("INSERT INTO lib.authors VALUES (1, 'A')")
    history.do("INSERT INTO lib.books SELECT n, 1, 't', 2000, n FROM generate_series(1, 3000) n")
    history.settle()
    history.do("UPDATE lib.books SET price = price + 1 WHERE id <= 1000")
    history.apply()
    history.rows_read = 0
    history.forget_emitted()
    history.send()
    assert history.emitted_ids == ["author_docs/1"]
    assert history.rows_read <= 1000 + 1 + 2
    history.check()


def test_a_sum_of_what_was_only_counted(history: History) -> None:
    numbers = "columns: [title], aggregates: {{{}}}}}"
    counted = AUTHOR_DOCS.replace("columns: [title]}", numbers.format("n: count(price)"))
    library(history, counted)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books VALUES (1, 1, 'a', 2000, 1.50), (2, 1, 'b', 2001, -0.125)",
    )
    history.settle()
    summed = "n: count(price), cost: sum(price)"
    history.declare(AUTHOR_DOCS.replace("columns: [title]}", numbers.format(summed)))
    history.settle()
    assert history.document("author_docs", 1)["cost"] == "1.375"


def test_truncate(history: History) -> None:
    library(history, DEEP)
    insert = (
        "INSERT INTO lib.authors SELECT n, 'A' FROM generate_series(1, 3) n",
        "INSERT INTO lib.books SELECT n, n % 3 + 1 FROM generate_series(1, 9) n",
        "INSERT INTO lib.reviews SELECT n, n % 9 + 1, 5 FROM generate_series(1, 20) n",
        "INSERT INTO lib.tags SELECT n, 't' FROM generate_series(1, 3) n",
        "INSERT INTO lib.book_tags SELECT n, n % 3 + 1 FROM generate_series(1, 9) n",
    )
    history.do(*insert)
    history.settle()
    for name in ("book_tags", "books", "authors", "reviews"):
        # The log has no record of a TRUNCATE: rows are gone without one.
        history.connection.execute(f"TRUNCATE lib.{name}".encode())
        history.rows[name] = {}
        history.clear(name)
        # Other tables go on, and a crash comes before anything is sent.
        history.do("UPDATE lib.tags SET name = name || 'x'", "UPDATE lib.reviews SET stars = 1")
        history.apply()
        history.send("before climbed")
        history.settle()
    history.do(*(f"DELETE FROM lib.{name}" for name in ("tags", "authors", "books")))
    history.do(*insert)
    history.settle()


def test_records_before_a_floor(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    history.connection.execute(b"TRUNCATE lib.books")
    history.rows["books"] = {}
    history.clear("books")
    history.do("INSERT INTO lib.books VALUES (2, 1, 'new')")
    history.settle()
    # The state is lost, and made again from the whole log: dead records stay dead.
    with redis.Redis.from_url(history.url) as server:
        server.flushdb()
    history.declare(AUTHOR_DOCS)
    history.settle()


def test_columns_come_and_go(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    # One that no view uses, at a nested table: nothing is made again.
    history.forget_emitted()
    history.connection.execute(b"ALTER TABLE lib.authors ADD COLUMN born date")
    history.declare(BOOK_DOCS)
    history.apply()
    history.send()
    assert history.emitted_ids == []
    # Default columns: a new one of the root is shown.
    history.connection.execute(b"ALTER TABLE lib.books ADD COLUMN pages int DEFAULT 7")
    history.declare(BOOK_DOCS)
    # A default comes by an incremental snapshot.
    history.capture()
    history.settle()
    assert history.document("book_docs", 1)["pages"] == 7
    history.connection.execute(b"ALTER TABLE lib.books DROP COLUMN price")
    history.declare(BOOK_DOCS)
    history.settle()
    history.connection.execute(b"ALTER TABLE lib.authors RENAME COLUMN name TO full_name")
    with pytest.raises(SettingsError, match=r"lib\.authors has no column name"):
        history.declare(BOOK_DOCS)
    history.connection.execute(b"ALTER TABLE lib.authors RENAME COLUMN full_name TO name")
    history.connection.execute(b"ALTER TABLE lib.authors ALTER COLUMN id TYPE text")
    with pytest.raises(SettingsError, match="integer can't be compared with text"):
        history.declare(BOOK_DOCS)


def test_a_value_that_the_log_does_not_carry(history: History) -> None:
    library(history, DEEP)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books VALUES (1, 1, 'long text', 2000)",
    )
    history.settle()
    history.do("UPDATE lib.books SET year = 2001")
    # The connector leaves out a large value that the UPDATE didn't touch.
    (record,) = [records[-1] for (name, _), records in history.log.items() if name == "books"]
    assert record.value is not None
    record.value = record.value.replace(b"long text", PLACEHOLDER.encode())
    history.settle()
    assert history.document("author_docs", 1)["books"][0]["title"] == "long text"
    assert history.rejection.rejected == []


JOINED = {
    "int_and_bigint": ("int", "bigint", ["1", "-2147483648"]),
    "smallint_and_int": ("smallint", "int", ["1"]),
    "text_and_varchar": ("text", "varchar(9)", ["'a'", "' a '", "E'\\x1e\\x1f\\x1b1'"]),
    "char": ("char(3)", "char(3)", ["'a'", "'ab '", "'abc'"]),
    "uuid": ("uuid", "uuid", ["'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"]),
    "timestamptz": ("timestamptz", "timestamptz(0)", ["'2013-01-01 00:00+00'", "'2013-01-01 02:00+02'"]),
    "timestamp": ("timestamp", "timestamp(3)", ["'2013-01-01 00:00:00.120'"]),
    "numeric": ("numeric(9,2)", "numeric(5,2)", ["1.0", "1.00", "'NaN'", "-0.00"]),
    "boolean": ("boolean", "boolean", ["true", "false"]),
    "date": ("date", "date", ["'2013-01-01'"]),
}  # fmt: skip


def test_equal_values_join(history: History) -> None:
    views = ""
    for name, (left, right, _) in JOINED.items():
        history.connection.execute(
            f"CREATE TABLE lib.a_{name} (id int PRIMARY KEY, v {left});"
            f" CREATE TABLE lib.b_{name} (id int PRIMARY KEY, w {right})".encode()
        )
        views += f"""
  {name}_docs:
    root: lib.a_{name}
    columns: [id]
    include: {{bs: {{table: lib.b_{name}, on: {{v: w}}, many: true, columns: [id]}}}}
    to: [topic]
"""
    history.declare(views)
    rows = [(name, *row) for name in JOINED for row in enumerate(JOINED[name][2])]
    for name, number, value in rows:
        history.do(
            f"INSERT INTO lib.a_{name} VALUES ({number}, {value})",
            f"INSERT INTO lib.b_{name} VALUES ({number}, {value})",
        )
    history.settle()
    unjoined = [row for row in rows if not history.document(f"{row[0]}_docs", row[1])["bs"]]
    assert unjoined == []


def test_long_ids_and_ids_alike(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.names (a text, b text, up text, PRIMARY KEY (a, b));
        CREATE TABLE lib.words (w text PRIMARY KEY, up text)""")
    history.declare("""
  name_docs:
    root: lib.names
    include: {word: {table: lib.words, on: {up: w}}}
    to: [topic]
  word_docs:
    root: lib.words
    include:
      names: {table: lib.names, on: {w: a}, many: true, order_by: [b]}
      upper: {table: lib.words, on: {up: w}, columns: [w]}
    to: [topic]
""")
    long = "x" * 700
    history.do(
        "INSERT INTO lib.words VALUES ('[\"a,b\"]'), ('[\"a\",\"b\"]'), ('a:b'), ('a'), ('%3A'),"
        f" ('{long}'), ('{long}y')",
        "INSERT INTO lib.names VALUES ('a,b', ''), ('a', 'b'), ('', 'a,b'), ('a:b', '[]'),"
        f" ('{long}', '{long}'), ('{long}', '')",
        "UPDATE lib.names SET up = '[\"' || a || '\",\"' || b || '\"]'",
        f"UPDATE lib.words SET up = '{long}'",
    )
    history.settle()
    history.do(f"UPDATE lib.names SET a = a || 'y' WHERE a = '{long}'")
    history.settle()
    history.do(f"UPDATE lib.words SET w = w || 'z' WHERE w = '{long}'")
    history.settle()


def test_a_record_that_can_not_be_read(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    good = history.document("author_docs", 1)
    history.do("UPDATE lib.books SET title = 'new'")
    (records,) = [records for (name, _), records in history.log.items() if name == "books"]
    value, records[-1].value = records[-1].value, b'{"op":"u","after":{"id":"x"}}'
    history.batch()
    assert history.document("author_docs", 1) == good
    assert [rejected.topic for rejected in history.rejection.rejected] == ["lib.lib.books"]
    # A later record of the row mends it.
    history.append(history.table("books"), "1", records[-1].key, value)
    history.settle()


def test_no_document_goes_back(history: History) -> None:
    """Random crashes: rows count their versions, and no later document holds an older version."""
    library(history, DEEP)
    chance = random.Random(39)
    crashes = ["before climbed", "after climbed", "before write", "after write", "before sent"]
    history.do(
        "INSERT INTO lib.authors SELECT n, 'A', 0 FROM generate_series(1, 3) n",
        "INSERT INTO lib.books SELECT n, n % 3 + 1, 't', 0 FROM generate_series(1, 6) n",
        "INSERT INTO lib.reviews SELECT n, n % 6 + 1, 0 FROM generate_series(1, 12) n",
    )
    history.settle()
    for _ in range(100 * SCALE):
        history.do(f"UPDATE lib.reviews SET stars = stars + 1 WHERE id = {chance.randint(1, 12)}")
        history.do(f"UPDATE lib.books SET year = year + 1 WHERE id = {chance.randint(1, 6)}")
        tables = chance.sample(["reviews", "books"], chance.randint(1, 2))
        history.apply(*(name for name in tables if chance.random() < 0.9))
        if chance.random() < 0.8 and not _is_clean(history):
            try:
                history.send(chance.choice(crashes))
            except AssertionError as error:
                assert "nothing came to" in str(error)
        elif chance.random() < 0.5:
            history.send()
    history.settle()
    newest: dict[tuple[str, str, int], int] = {}
    for view, row_id, value in history.emitted:
        if view != "review_docs" or value is None:
            continue
        row = json.loads(value)["after"]
        versions = {"stars": row["stars"], "year": json.loads(row["book"])["year"]}
        for place, version in enumerate(versions.values()):
            key = view, row_id, place
            assert newest.get(key, 0) <= version
            newest[key] = version


def _is_clean(history: History) -> bool:
    return history.sink.open_state().is_clean()


def test_compaction_takes_what_a_crashed_batch_applied(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B'), (3, 'C')",
        "INSERT INTO lib.books VALUES (1, 1)",
    )
    history.settle()
    history.do("UPDATE lib.books SET author_id = 2")
    history.apply()
    history.send("before write")
    history.do("UPDATE lib.books SET author_id = 3")
    history.apply()
    history.do("UPDATE lib.books SET title = 'last'")
    history.compact()
    history.settle()
    # All comes, and all goes: no entry of an index is left behind.
    history.do("DELETE FROM lib.books", "DELETE FROM lib.authors")
    history.compact()
    history.settle()
    assert history.index_keys() == []


def test_a_large_fan_out_delays_no_other_document(history: History) -> None:
    library(history, BOOK_DOCS + "  tag_docs: {root: lib.tags, to: [topic]}\n")
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')",
        "INSERT INTO lib.books SELECT n, 1 + n / 5000, 't' FROM generate_series(1, 5000) n",
        "INSERT INTO lib.tags VALUES (1, 'x')",
    )
    history.settle()
    history.do("UPDATE lib.authors SET name = 'renamed' WHERE id = 1")
    history.apply()
    history.send("after sent")
    history.forget_emitted()
    # Meanwhile something else changes, in this view and in another.
    history.do("UPDATE lib.books SET title = 'new' WHERE id = 5000")
    history.do("UPDATE lib.tags SET name = 'y'")
    history.settle()
    order = history.emitted_ids
    assert len(order) > SLICE
    assert order.index("book_docs/5000") < SLICE
    assert order.index("tag_docs/1") <= SLICE


def test_a_round_that_took_long_is_the_last_when_nothing_is_left(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else documents are never noted as current while changes go on, and who waits waits in vain."""
    monkeypatch.setattr(tasks, "ROUND_S", 0.0)
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.books VALUES (1, NULL, 'a', 2000)")
    history.apply()
    assert history.send() == 1
    history.do(f"INSERT INTO lib.books SELECT n FROM generate_series(2, {SLICE + 2}) n")
    history.apply()
    assert history.send() == 2
    history.check()


def test_a_fan_out_is_found_in_pages(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after a crash during it: the changed row is pending until all of them are marked."""
    library(history, REVIEW_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books SELECT n, 1 FROM generate_series(1, 900) n",
        "INSERT INTO lib.reviews SELECT n, n FROM generate_series(1, 900) n",
    )
    history.settle()
    monkeypatch.setattr(tasks, "PAGE", 20)
    monkeypatch.setattr(state_module, "PAGE", 20)
    monkeypatch.setattr(tasks, "SLICE", 50)
    sizes = measured(monkeypatch)
    history.do("UPDATE lib.authors SET name = 'B'")
    history.apply()
    history.send("after mark_rows")
    history.send("before climbed")
    history.forget_emitted()
    history.settle()
    assert len(history.emitted_ids) == 900
    assert min(sizes["scan_members"], sizes["mark_rows"]) > 0
    assert max(sizes.values()) <= 100


def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By method of the state: how many ids it was given or has returned at once at most."""
    sizes: dict[str, int] = {}

    def wrap(name: str, ids: Callable[[Any, Any], Iterable[Collection[str]]]) -> None:
        method = getattr(State, name)

        def call(self: State, *arguments: Any) -> Any:
            answer = method(self, *arguments)
            answer = list(answer) if name == "scan_members" else answer
            sizes[name] = max([sizes.get(name, 0), *map(len, ids(arguments, answer))])
            return answer

        monkeypatch.setattr(State, name, call)

    wrap("rows", lambda arguments, _: [arguments[1]])
    wrap("members", lambda _, answer: answer.values())
    wrap("scan_members", lambda _, answer: answer)
    wrap("mark_rows", lambda arguments, _: [arguments[1]])
    wrap("climbed", lambda arguments, _: arguments[1].values())
    return sizes


def test_a_repair_waits_for_its_own_documents_only(history: History) -> None:
    """While others of the view are dirty, as amid a fan-out; in vain where its own stay so."""
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.books SELECT n FROM generate_series(1, 9) n")
    history.apply()
    opened = history.sink.open_state()
    view = history.views["book_docs"]
    turn, table = opened.take("run"), view_table(history.pipeline, view)
    opened.sent(turn, view.name, {"1": opened.dirty(view.name, 9)["1"]})
    with ThreadPoolExecutor(1) as pool:
        repair = pool.submit(send_documents_again, history.pipeline, table, [b'{"id":1}'], 20.0)
        wait_until(lambda: opened.dirty_among(view.name, ["1"]), 10, "the mark of the repair")
        opened.sent(turn, view.name, {"1": opened.dirty(view.name, 9)["1"]})
        repair.result()
    with pytest.raises(ConnectorError, match="weren't sent again"):
        send_documents_again(history.pipeline, table, [b'{"id":1}'], 0.0)
