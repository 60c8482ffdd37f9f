"""Documents case by case: a short history each, compared with Postgres' own query.

The cases have the numbers of the list that views were designed by. Each is found by its number in a
name, `case_NN`. What a case needs of the connector, of Spark or of sinks is in another module:

  1-20, 22-35, 39, 43, 47   here
  14       a unique column that is deferrable; such a primary key is refused (test_source.py)
  21       test_view_checks.py
  28, 30   also through the connector: tests/scenarios/test_documents.py
  31       a joined column that the log may lack is refused: test_view_checks.py
  33       floats, citext, numerics without a scale are refused: tests/unit/test_view_settings.py
  35       the quarantine itself is the stream's, as for any table: tests/scenarios/test_failures.py
  36, 37, 44, 45   tests/scenarios/test_document_cases_of_sinks.py
  38, 40, 41, 42   tests/scenarios/test_document_engine.py
  46       a changed view, a rebuild, a rollback: tests/scenarios/test_documents.py
  47       also what others wait for, and kills on the way: tests/scenarios/test_document_engine.py;
           kills of Spark's workers and of the broker under a run: test_document_failures.py

Below are also the cases of patterns, which have no numbers.
"""

import json
import random
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.errors import ConnectorError, SettingsError
from cdc.sinks.redis.documents import state as redis_state
from cdc.sinks.redis.documents.state import RedisState
from cdc.verify.documents import send_documents_again
from cdc.views import climb, tasks
from cdc.views.tables import view_table
from cdc.views.tasks import SLICE
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
Case = Callable[[History], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def library(history: History, views: str) -> None:
    history.connection.execute(LIBRARY.encode())
    history.declare(views)


@case
def case_01_root_rows(history: History) -> None:
    library(history, BOOK_DOCS)
    for crash in (None, "before climbed", "before write", "after write", "before sent"):
        for statement in (
            "INSERT INTO lib.books VALUES (1, NULL, 'a', 2000)",
            "UPDATE lib.books SET title = 'b' WHERE id = 1",
            "DELETE FROM lib.books",
            "INSERT INTO lib.books VALUES (1, NULL, 'c', 2001)",
            "DELETE FROM lib.books",
        ):
            history.do(statement)
            history.apply()
            if crash and crash != "before climbed":
                history.send(crash)
            history.settle()


@case
def case_01_the_first_documents(history: History) -> None:
    """None is looked for by what it includes: all of them are dirty."""
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
    history.do("UPDATE lib.authors SET name = 'y' WHERE id = 2")
    history.settle()


@case
def case_02_orders_of_arrival(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.books VALUES (1, 1, 'a')")
    history.settle()
    history.do("INSERT INTO lib.authors VALUES (1, 'Ann')")
    history.settle()
    history.do("INSERT INTO lib.authors VALUES (2, 'Bob')")
    history.settle()
    history.do("INSERT INTO lib.books VALUES (2, 2, 'b')")
    history.settle()
    history.do(
        "INSERT INTO lib.books SELECT n, n, 't' FROM generate_series(3, 9) n",
        "INSERT INTO lib.authors SELECT n, 'x' FROM generate_series(3, 9) n",
    )
    for part in (("books", 1), ("authors", 0), ("books", 0), ("authors", 1)):
        history.batch(part)
    history.check()


@case
def case_03_a_parents_documents_and_no_other(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do(
        "INSERT INTO lib.authors SELECT n, 'x' FROM generate_series(1, 3) n",
        "INSERT INTO lib.books SELECT n, n % 3 + 1, 't' FROM generate_series(1, 30) n",
    )
    history.settle()
    history.forget_emitted()
    history.do("UPDATE lib.authors SET name = 'y' WHERE id = 2")
    history.settle()
    assert sorted(history.emitted_ids) == sorted(f"book_docs/{n}" for n in range(1, 31, 3))


@case
def case_04_a_parent_goes_and_comes_back(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    history.do("DELETE FROM lib.authors")
    history.settle()
    assert history.document("book_docs", 1)["author"] is None
    history.do("INSERT INTO lib.authors VALUES (1, 'B')")
    history.settle()
    assert history.document("book_docs", 1)["author"] == {"name": "B"}


@case
def case_05_a_child_moves(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')",
        "INSERT INTO lib.books VALUES (1, 1, 'a'), (2, 1, 'b')",
    )
    history.settle()
    for crash in ("before climbed", "after climbed", "before write", "after write", "after sent"):
        history.do("UPDATE lib.books SET author_id = 3 - author_id")
        history.apply(("books", 0))
        history.send(crash)
        history.apply(("books", 1))
        history.settle()


@case
def case_06_there_and_back_within_a_batch(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')", "INSERT INTO lib.books VALUES (1, 1)"
    )
    history.settle()
    history.forget_emitted()
    history.do("UPDATE lib.books SET author_id = 2")
    history.do("UPDATE lib.books SET author_id = 1")
    history.settle()
    assert history.emitted_ids == []


@case
def case_07_two_moves_with_a_crash_between(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B'), (3, 'C')",
        "INSERT INTO lib.books VALUES (1, 1)",
    )
    history.settle()
    history.do("UPDATE lib.books SET author_id = 2")
    history.apply()
    history.do("UPDATE lib.books SET author_id = 3")
    history.apply()
    history.settle()


@case
def case_08_null_foreign_key(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.seats (a int, b int, name text, PRIMARY KEY (a, b));
        CREATE TABLE lib.guests (id int PRIMARY KEY, a int, b int)""")
    history.declare("""
  guest_docs:
    root: lib.guests
    include: {seat: {table: lib.seats, on: {a: a, b: b}, columns: [name]}}
    to: [topic]
  seat_docs:
    root: lib.seats
    include: {guests: {table: lib.guests, on: {b: b, a: a}, many: true}}
    to: [topic]
""")
    history.do("INSERT INTO lib.seats VALUES (1, 1, 'x'), (1, 2, 'y')")
    history.do(
        "INSERT INTO lib.guests VALUES (1, 1, 1), (2, NULL, 1), (3, 1, NULL), (4, NULL, NULL)"
    )
    history.settle()
    assert [history.document("guest_docs", n)["seat"] for n in (2, 3, 4)] == [None] * 3
    history.do("UPDATE lib.guests SET a = NULL WHERE id = 1")
    history.settle()
    history.do("UPDATE lib.guests SET a = 1, b = 2")
    history.settle()
    assert len(history.document("seat_docs", "[1,2]")["guests"]) == 4


@case
def case_09_dangling_foreign_key(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.books VALUES (1, 7), (2, 8)")
    history.settle()
    history.do("INSERT INTO lib.authors VALUES (7, 'late')")
    history.settle()
    assert history.document("book_docs", 1)["author"] == {"name": "late"}
    assert history.document("book_docs", 2)["author"] is None


@case
def case_10_an_empty_text_is_not_null(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.carriers (code text PRIMARY KEY, name text);
        CREATE TABLE lib.flights (id int PRIMARY KEY, code text)""")
    history.declare("""
  flight_docs:
    root: lib.flights
    include: {carrier: {table: lib.carriers, on: {code: code}}}
    to: [topic]
  carrier_docs:
    root: lib.carriers
    include: {flights: {table: lib.flights, on: {code: code}, many: true}}
    to: [topic]
""")
    history.do("INSERT INTO lib.carriers VALUES ('', 'none'), (' ', 'blank'), ('null', 'word')")
    history.do("INSERT INTO lib.flights VALUES (1, ''), (2, NULL), (3, ' '), (4, 'null')")
    history.settle()
    assert history.document("flight_docs", 1)["carrier"]["name"] == "none"
    history.do("UPDATE lib.flights SET code = CASE WHEN code = '' THEN NULL ELSE '' END")
    history.settle()


@case
def case_11_a_childs_key_changes(history: History) -> None:
    library(history, DEEP)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')")
    for former, latter, first in ((1, 2, 0), (2, 3, 1), (3, 5, 0), (5, 6, 1)):
        history.do(
            f"INSERT INTO lib.books VALUES ({former}, 1, 't') ON CONFLICT DO NOTHING",
            f"INSERT INTO lib.reviews VALUES (1, {former}, 5)"
            f" ON CONFLICT (id) DO UPDATE SET book_id = {former}",
        )
        history.settle()
        history.do(f"UPDATE lib.books SET id = {latter}")
        history.batch(("books", first))
        history.batch(("books", 1 - first))
        history.check()


@case
def case_12_the_roots_key_changes(history: History) -> None:
    library(history, AUTHOR_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    for former, latter, first in ((1, 2, 0), (2, 1, 0), (1, 3, 1)):
        history.do(f"UPDATE lib.authors SET id = {latter}")
        history.batch(("authors", first))
        history.batch(("authors", 1 - first))
        history.check()
        assert history.document("author_docs", former) is None


@case
def case_13_a_key_change_cascades(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.carriers (code text PRIMARY KEY, name text);
        CREATE TABLE lib.flights (
            id int PRIMARY KEY, code text REFERENCES lib.carriers ON UPDATE CASCADE)""")
    history.declare("""
  flight_docs:
    root: lib.flights
    include: {carrier: {table: lib.carriers, on: {code: code}}}
    to: [topic]
  carrier_docs:
    root: lib.carriers
    include: {flights: {table: lib.flights, on: {code: code}, many: true}}
    to: [topic]
""")
    history.do("INSERT INTO lib.carriers VALUES ('a'), ('b')")
    history.do("INSERT INTO lib.flights SELECT n, 'a' FROM generate_series(1, 9) n")
    history.settle()
    for order in (("carriers", "flights"), ("flights", "carriers")):
        history.do("UPDATE lib.carriers SET code = code || 'x' WHERE code LIKE 'a%'")
        for name in order:
            history.batch((name, 1))
            history.batch((name, 0))
        history.check()


@case
def case_14_two_rows_swap_a_unique_value(history: History) -> None:
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


@case
def case_15_middle_row_moves_while_a_grandchild_changes(history: History) -> None:
    library(history, DEEP)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B'), (3, 'C')",
        "INSERT INTO lib.books VALUES (1, 1, 't'), (2, 2, 'u')",
        "INSERT INTO lib.reviews VALUES (1, 1, 5), (2, 1, 4)",
        "INSERT INTO lib.tags VALUES (1, 'x')",
        "INSERT INTO lib.book_tags VALUES (1, 1), (2, 1)",
    )
    history.settle()
    history.do("UPDATE lib.reviews SET stars = 1 WHERE id = 1")
    history.settle()
    for order in (("reviews", "books"), ("books", "reviews"), ()):
        history.do(
            "UPDATE lib.books SET author_id = author_id % 3 + 1 WHERE id = 1",
            "UPDATE lib.reviews SET stars = stars + 1, book_id = 3 - book_id WHERE id = 1",
            "UPDATE lib.tags SET name = name || 'x'",
        )
        for name in order:
            history.apply(name)
        history.settle()


@case
def case_16_middle_row_deleted(history: History) -> None:
    library(history, DEEP)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books VALUES (1, 1, 't')",
        "INSERT INTO lib.reviews VALUES (1, 1, 5)",
    )
    history.settle()
    history.do("DELETE FROM lib.books")
    history.settle()
    history.do("UPDATE lib.reviews SET stars = 3", "UPDATE lib.authors SET name = 'Z'")
    history.settle()
    history.do("INSERT INTO lib.books VALUES (1, 1, 'again')")
    history.settle()
    assert history.document("author_docs", 1)["books"][0]["reviews"][0]["stars"] == 3


@case
def case_17_many_to_many(history: History) -> None:
    library(history, DEEP)
    # A link before either end.
    history.do("INSERT INTO lib.book_tags VALUES (1, 1), (2, 1)")
    history.settle()
    history.do("INSERT INTO lib.tags VALUES (1, 'one'), (2, 'two')")
    history.settle()
    history.do(
        "INSERT INTO lib.books VALUES (1, 1), (2, 2)", "INSERT INTO lib.authors VALUES (1), (2)"
    )
    history.settle()
    history.do("UPDATE lib.book_tags SET tag_id = 2 WHERE book_id = 2")
    history.settle()
    history.forget_emitted()
    history.do("UPDATE lib.tags SET name = 'ONE' WHERE id = 1")
    history.settle()
    assert history.emitted_ids == ["author_docs/1"]
    history.do("DELETE FROM lib.book_tags WHERE book_id = 1")
    history.settle()
    assert history.document("author_docs", 1)["books"][0]["tags"] == []


@case
def case_18_the_same_table_twice(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.airports (faa text PRIMARY KEY, name text);
        CREATE TABLE lib.flights (id int PRIMARY KEY, origin text, dest text)""")
    history.declare("""
  flight_docs:
    root: lib.flights
    include:
      origin_airport: {table: lib.airports, on: {origin: faa}}
      dest_airport: {table: lib.airports, on: {dest: faa}}
    to: [topic]
""")
    history.do("INSERT INTO lib.airports VALUES ('JFK', 'Kennedy'), ('LGA', 'La Guardia')")
    history.do("INSERT INTO lib.flights VALUES (1, 'JFK', 'LGA'), (2, 'JFK', 'JFK')")
    history.settle()
    history.forget_emitted()
    history.do("UPDATE lib.airports SET name = 'X' WHERE faa = 'JFK'")
    history.settle()
    assert sorted(history.emitted_ids) == ["flight_docs/1", "flight_docs/2"]
    history.do("UPDATE lib.flights SET origin = dest, dest = origin")
    history.settle()
    history.do("DELETE FROM lib.airports WHERE faa = 'LGA'")
    history.settle()


@case
def case_19_a_row_that_is_its_own_parent(history: History) -> None:
    library(
        history,
        """
  tag_docs:
    root: lib.tags
    include:
      parent: {table: lib.tags, on: {parent_id: id}, include: {
        parent: {table: lib.tags, on: {parent_id: id}}}}
      children: {table: lib.tags, on: {id: parent_id}, many: true}
    to: [topic]
""".replace("include: {\n        parent:", "include: {\n        above:"),
    )
    history.do("INSERT INTO lib.tags VALUES (1, 'a', 1), (2, 'b', 1), (3, 'c', 2)")
    history.settle()
    history.do("UPDATE lib.tags SET name = 'A' WHERE id = 1")
    history.settle()
    history.do("UPDATE lib.tags SET parent_id = 3 WHERE id = 1")
    history.settle()
    history.do("UPDATE lib.tags SET id = 4 WHERE id = 2")
    history.settle()
    history.do("DELETE FROM lib.tags WHERE id = 1")
    history.settle()


@case
def case_20_columns_that_are_no_key_on_either_side(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.users (id int PRIMARY KEY, city text);
        CREATE TABLE lib.shops (id int PRIMARY KEY, town text)""")
    history.declare("""
  user_docs:
    root: lib.users
    include: {shops: {table: lib.shops, on: {city: town}, many: true}}
    to: [topic]
""")
    history.do("INSERT INTO lib.users VALUES (1, 'a'), (2, 'a'), (3, NULL), (4, '')")
    history.do("INSERT INTO lib.shops VALUES (1, 'a'), (2, 'b'), (3, NULL), (4, '')")
    history.settle()
    history.do("UPDATE lib.shops SET town = CASE town WHEN 'a' THEN 'b' ELSE 'a' END")
    history.settle()
    history.do("UPDATE lib.users SET city = CASE WHEN city IS NULL THEN 'b' END")
    history.settle()


@case
def case_22_order_and_limit(history: History) -> None:
    library(
        history,
        """
  author_docs:
    root: lib.authors
    columns: [name]
    include:
      books:
        {table: lib.books, on: {id: author_id}, many: true, order_by: [-year, title], limit: 3}
    to: [topic]
""",
    )
    history.do("INSERT INTO lib.authors VALUES (1, 'A')")
    history.do("INSERT INTO lib.books SELECT n, 1, 't' || n, 1990 + n FROM generate_series(1, 5) n")
    history.settle()
    for statement in (
        "INSERT INTO lib.books VALUES (6, 1, 'enters', 2020)",
        "DELETE FROM lib.books WHERE id = 6",
        "UPDATE lib.books SET year = 2000",
        "UPDATE lib.books SET title = NULL WHERE id IN (3, 4)",
        "UPDATE lib.books SET year = NULL WHERE id IN (1, 2)",
        "UPDATE lib.books SET year = NULL, title = ''",
        "UPDATE lib.books SET id = id + 10, title = 'Z' WHERE id < 3",
        "UPDATE lib.books SET title = 'a' WHERE id > 3",
        "DELETE FROM lib.books WHERE id > 10",
    ):
        history.do(statement)
        history.settle()


@case
def case_23_many_children(history: History) -> None:
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
        "INSERT INTO lib.books SELECT n, 1, 't' || n, 1990 + n % 20 FROM generate_series(1, 20000) n"
    )
    history.settle()
    assert history.document("author_docs", 1) == {
        "id": 1,
        "name": "A",
        "n": 20000,
        "years": 39990000,
        "mean": "1999.5000000000000000",
        "first": 1990,
        "last": 2009,
        "cheapest": None,
        "cost": None,
        "price": None,
        "late": 9000,
        "books": [{"title": "t20000"}, {"title": "t19999"}],
    }
    # The author, the book that has changed, and those that are shown: whatever there are besides.
    for statement in (
        "UPDATE lib.books SET year = 2030 WHERE id = 20000",
        "UPDATE lib.books SET title = 'x', year = NULL WHERE id = 5",
        "DELETE FROM lib.books WHERE id = 20000",
        "INSERT INTO lib.books VALUES (30000, 1, 'new', 2031)",
        "UPDATE lib.books SET price = 1.50 WHERE id = 7",
    ):
        history.do(statement)
        history.apply()
        history.rows_read = 0
        history.send()
        assert history.rows_read <= 8
        history.check()
    assert history.document("author_docs", 1)["late"] == 9001


@case
def case_23_a_parent_of_many_changes(history: History) -> None:
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


@case
def case_24_aggregates(history: History) -> None:
    library(
        history,
        """
  author_docs:
    root: lib.authors
    columns: [name]
    include:
      books:
        table: lib.books
        on: {id: author_id}
        many: true
        show: false
        aggregates:
          n: count(*)
          years: sum(year)
          dated: count(year)
          cost: sum(price)
          mean: avg(price)
          least: min(price)
          first: min(title)
      extremes:
        table: lib.books
        on: {id: author_id}
        many: true
        show: false
        where: id <> 4 OR year IS NOT NULL
        aggregates: {cheap: min(price), dear: max(price), a: min(title), z: max(title), late: max(year)}
    to: [topic]
""",
    )
    history.do("INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')")
    history.settle()
    history.do(
        "INSERT INTO lib.books VALUES (1, 1, 'a', 2000, 1.50), (2, 1, NULL, NULL, NULL),"
        " (3, 2, 'B', 2147483647, 12345678901234567890.123), (4, 2, '', 2147483647, 'NaN')"
    )
    history.settle()
    history.do("UPDATE lib.books SET author_id = 3 - author_id WHERE id IN (1, 3)")
    history.settle()
    history.do("UPDATE lib.books SET year = NULL, price = NULL, author_id = NULL WHERE id < 3")
    history.settle()
    history.do("DELETE FROM lib.books")
    history.settle()
    history.do("DELETE FROM lib.authors")
    history.settle()
    # Whatever was added was taken away again.
    assert history.index_keys() == []


@case
def case_24_a_sum_of_what_was_only_counted(history: History) -> None:
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


@case
def case_25_conditions(history: History) -> None:
    library(
        history,
        """
  author_docs:
    root: lib.authors
    where: name <> 'hidden'
    include:
      books: {table: lib.books, on: {id: author_id}, many: true, where: year > 2000, include: {
        reviews: {table: lib.reviews, on: {id: book_id}, many: true, where: stars = 5}}}
    to: [topic]
""",
    )
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, NULL), (3, 'hidden')",
        "INSERT INTO lib.books VALUES (1, 1, 'a', 2001), (2, 1, 'b', NULL), (3, 3, 'c', 2002)",
        "INSERT INTO lib.reviews VALUES (1, 1, 5), (2, 2, 5), (3, 3, 4)",
    )
    history.settle()
    assert list(history.topics["author_docs"]) == ["1"]
    for statement in (
        "UPDATE lib.authors SET name = CASE name WHEN 'hidden' THEN 'seen' ELSE 'hidden' END",
        "UPDATE lib.books SET year = 4003 - year",
        "UPDATE lib.authors SET name = NULL",
        "UPDATE lib.reviews SET stars = 9 - stars",
        "UPDATE lib.authors SET name = 'all'",
        "UPDATE lib.books SET year = 2002",
    ):
        history.do(statement)
        history.settle()


@case
def case_26_a_column_that_no_view_uses(history: History) -> None:
    library(history, BOOK_DOCS)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    history.forget_emitted()
    history.do("UPDATE lib.authors SET unused = 'x', agent_id = 3")
    history.settle()
    assert history.emitted_ids == []


@case
def case_27_the_same_range_again(history: History) -> None:
    library(history, DEEP)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    history.settle()
    history.forget_emitted()
    for place in list(history.log):
        for record in list(history.log[place]):
            history.log[place].append(type(record)(history.ends[place], record.key, record.value))
            history.ends[place] += 1
    history.settle()
    assert history.emitted_ids == []


@case
def case_28_truncate(history: History) -> None:
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


@case
def case_29_records_before_a_floor(history: History) -> None:
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


@case
def case_30_columns_come_and_go(history: History) -> None:
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


@case
def case_31_a_value_that_the_log_does_not_carry(history: History) -> None:
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


@case
def case_32_values_survive_splicing(history: History) -> None:
    history.connection.execute(b"""
        CREATE TABLE lib.papers (
            id int PRIMARY KEY, raw json, parsed jsonb, amount numeric, stamp timestamptz, body text);
        CREATE TABLE lib.folders (id int PRIMARY KEY, paper_id int)""")
    history.declare("""
  folder_docs:
    root: lib.folders
    include: {paper: {table: lib.papers, on: {paper_id: id}}}
    to: [topic]
  paper_docs:
    root: lib.papers
    include: {folders: {table: lib.folders, on: {id: paper_id}, many: true}}
    to: [topic]
""")
    texts = ["sep\\x1e\\x1f\\x1d\\x1b", 'q"uo\\\\te', "\\n\\t", "\U0001f388", "{%b}%s", "null", ""]
    for number, text in enumerate(texts, start=1):
        escaped = text.replace("'", "''")
        history.do(
            f"INSERT INTO lib.papers VALUES ({number},"
            ' \'{"n": 123456789012345678901234567890.123456789, "z": 1.00, "e": 1e400}\','
            ' \'{"b": [1.10, null, "\\u00fc"], "a": {}}\','
            f" {['12345678901234567890.1230', 'NULL', chr(39) + 'NaN' + chr(39)][number % 3]},"
            f" {['now()', chr(39) + '0044-03-15 12:00:00+01 BC' + chr(39)][number % 2]},"
            f" E'{escaped}')",
            f"INSERT INTO lib.folders VALUES ({number}, {number})",
        )
    history.settle()
    nested = history.document("folder_docs", 1)["paper"]
    assert nested["body"] == "sep\x1e\x1f\x1d\x1b"
    assert str(nested["raw"]["n"]) == "123456789012345678901234567890.123456789"


JOINED = {
    "case_33_int_and_bigint": ("int", "bigint", ["1", "-2147483648"]),
    "case_33_smallint_and_int": ("smallint", "int", ["1"]),
    "case_33_text_and_varchar": ("text", "varchar(9)", ["'a'", "' a '", "E'\\x1e\\x1f\\x1b1'"]),
    "case_33_char": ("char(3)", "char(3)", ["'a'", "'ab '", "'abc'"]),
    "case_33_uuid": ("uuid", "uuid", ["'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"]),
    "case_33_timestamptz": (
        "timestamptz",
        "timestamptz(0)",
        ["'2013-01-01 00:00+00'", "'2013-01-01 02:00+02'"],
    ),
    "case_33_timestamp": ("timestamp", "timestamp(3)", ["'2013-01-01 00:00:00.120'"]),
    "case_33_numeric": ("numeric(9,2)", "numeric(5,2)", ["1.0", "1.00", "'NaN'", "-0.00"]),
    "case_33_boolean": ("boolean", "boolean", ["true", "false"]),
    "case_33_date": ("date", "date", ["'2013-01-01'"]),
}


@pytest.mark.parametrize("name", JOINED)
def test_equal_values_join(history: History, name: str) -> None:
    left, right, values = JOINED[name]
    history.connection.execute(
        f"CREATE TABLE lib.a (id int PRIMARY KEY, v {left});"
        f" CREATE TABLE lib.b (id int PRIMARY KEY, w {right})".encode()
    )
    history.declare("""
  a_docs:
    root: lib.a
    columns: [id]
    include: {bs: {table: lib.b, on: {v: w}, many: true, columns: [id]}}
    to: [topic]
""")
    for number, value in enumerate(values):
        history.do(f"INSERT INTO lib.a VALUES ({number}, {value})")
        history.do(f"INSERT INTO lib.b VALUES ({number}, {value})")
    history.settle()
    assert all(history.document("a_docs", number)["bs"] for number in range(len(values)))


@case
def case_34_long_ids_and_ids_alike(history: History) -> None:
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


@case
def case_35_a_record_that_can_not_be_read(history: History) -> None:
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


@case
def case_39_no_document_goes_back(history: History) -> None:
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
    return history.sink.open_state()().is_clean()


@case
def case_43_compaction_takes_what_a_crashed_batch_applied(history: History) -> None:
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


@case
def case_47_a_large_fan_out_delays_no_other_document(history: History) -> None:
    library(history, BOOK_DOCS + "  tag_docs: {root: lib.tags, to: [topic]}\n")
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A'), (2, 'B')",
        "INSERT INTO lib.books SELECT n, 1 + n / 9000, 't' FROM generate_series(1, 9000) n",
        "INSERT INTO lib.tags VALUES (1, 'x')",
    )
    history.settle()
    history.do("UPDATE lib.authors SET name = 'renamed' WHERE id = 1")
    history.apply()
    history.send("after sent")
    history.forget_emitted()
    # Meanwhile something else changes, in this view and in another.
    history.do("UPDATE lib.books SET title = 'new' WHERE id = 9000")
    history.do("UPDATE lib.tags SET name = 'y'")
    history.settle()
    order = history.emitted_ids
    assert len(order) > 6000
    assert order.index("book_docs/9000") < SLICE
    assert order.index("tag_docs/1") <= 2 * SLICE


def test_each_case_has_its_number_in_a_name() -> None:
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")]
    names = re.compile(r"(?:def |_and_|[\"'])(?:test_)?case_(\d\d)_")
    assert {int(number) for text in texts for number in names.findall(text)} == {*range(1, 48)}


@pytest.mark.parametrize("name", CASES)
def test_case(history: History, name: str) -> None:
    CASES[name](history)


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


PATTERNS = """
  thrice:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, steps: {late: {where: delay > 30, times: 3}}, within: 24 hours}
    columns: [dep]
    to: [topic]
  thrice_in_all:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, rows: any, steps: {late: {where: delay > 30, times: 3}}, within: 24 hours}
    columns: [dep]
    to: [topic]
  lost:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, steps: {out: delay = 0}, unless: delay = -1, within: 12 hours}
    columns: [dep]
    to: [topic]
"""
DAY = 1_357_084_800_000_000
"""2013-01-02 in microseconds since 1970."""


def flight(row_id: int, dep: str, delay: int = 40) -> str:
    return f"INSERT INTO lib.flights VALUES ({row_id}, 'a', '2013-01-{dep}Z', {delay})"


@pytest.fixture
def flights(history: History) -> History:
    history.connection.execute(
        b"CREATE TABLE lib.flights (id int PRIMARY KEY, tail text, dep timestamptz, delay int)"
    )
    history.declare(PATTERNS)
    history.clocks = {"lost": DAY}
    return history


def raised(history: History, view: str) -> dict[str, list[int]]:
    """The earlier late flights of each document, by its id."""
    history.settle()
    return {
        row_id: [earlier["id"] for earlier in history.document(view, row_id)["late"]]
        for row_id in sorted(history.topics[view])
    }


def test_a_row_between_those_of_a_pattern_withdraws_the_match(flights: History) -> None:
    flights.do(flight(1, "01 08:00"), flight(2, "01 10:00"), flight(3, "01 12:00"))
    assert raised(flights, "thrice") == {"3": [1, 2]}
    flights.do(flight(4, "01 11:00", 0))
    assert raised(flights, "thrice") == {}
    flights.do("DELETE FROM lib.flights WHERE id = 4")
    assert raised(flights, "thrice") == {"3": [1, 2]}
    ops = [
        value and json.loads(value)["op"] for view, _, value in flights.emitted if view == "thrice"
    ]
    assert ops == ["c", None, "c"]


def test_other_rows_may_lie_between_those_of_a_pattern_of_any_rows(flights: History) -> None:
    flights.do(flight(1, "01 08:00"), flight(2, "01 10:00"), flight(3, "01 12:00"))
    assert raised(flights, "thrice_in_all") == {"3": [1, 2]}
    flights.forget_emitted()
    flights.do(flight(4, "01 11:00", 0))
    assert raised(flights, "thrice_in_all") == {"3": [1, 2]}
    assert "thrice_in_all/3" not in flights.emitted_ids


def test_exactly_within_is_a_match_and_a_microsecond_more_is_none(flights: History) -> None:
    flights.do(flight(1, "01 08:00"), flight(2, "01 21:00"), flight(3, "02 08:00"))
    assert raised(flights, "thrice") == raised(flights, "thrice_in_all") == {"3": [1, 2]}
    flights.do("UPDATE lib.flights SET dep = dep + interval '1 microsecond' WHERE id = 3")
    assert raised(flights, "thrice") == raised(flights, "thrice_in_all") == {}


def test_each_row_that_completes_a_pattern_is_a_match(flights: History) -> None:
    flights.do(*(flight(number, f"01 0{number}:00") for number in (1, 2, 3)))
    assert raised(flights, "thrice") == {"3": [1, 2]}
    flights.forget_emitted()
    flights.do(flight(4, "01 04:00"))
    assert raised(flights, "thrice") == {"3": [1, 2], "4": [2, 3]}
    assert "thrice/3" not in flights.emitted_ids


def test_a_fact_at_the_end_satisfies_unless_and_a_later_one_does_not(flights: History) -> None:
    flights.clocks = {"lost": DAY - 1}
    flights.do(flight(1, "01 08:00", 0), flight(2, "01 20:00", -1), flight(3, "01 12:00", 0))
    flights.settle()
    assert flights.topics["lost"] == {}
    flights.clocks = {"lost": DAY}
    flights.settle()
    # What ends a wait hasn't passed at its last instant.
    assert flights.topics["lost"] == {}
    flights.do("UPDATE lib.flights SET dep = dep + interval '1 microsecond' WHERE id = 2")
    flights.settle()
    assert [*flights.topics["lost"]] == ["1"]
    flights.do("DELETE FROM lib.flights WHERE id = 2")
    flights.clocks = {"lost": DAY + 1}
    flights.settle()
    assert [*flights.topics["lost"]] == ["1", "3"]


def test_a_fact_in_time_that_is_committed_late_withdraws_the_alert(flights: History) -> None:
    flights.do(flight(1, "01 08:00", 0))
    flights.settle()
    flights.do(flight(2, "01 19:00", -1))
    flights.settle()
    ops = [
        value and json.loads(value)["op"] for view, _, value in flights.emitted if view == "lost"
    ]
    assert ops == ["c", None]


def test_a_fan_out_is_found_in_pages(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew after a crash amid it: the changed row is pending until all of them are marked."""
    library(history, REVIEW_DOCS)
    history.do(
        "INSERT INTO lib.authors VALUES (1, 'A')",
        "INSERT INTO lib.books SELECT n, 1 FROM generate_series(1, 900) n",
        "INSERT INTO lib.reviews SELECT n, n FROM generate_series(1, 900) n",
    )
    history.settle()
    monkeypatch.setattr(climb, "PAGE", 20)
    monkeypatch.setattr(redis_state, "PAGE", 20)
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
        method = getattr(RedisState, name)

        def call(self: RedisState, *arguments: Any) -> Any:
            answer = method(self, *arguments)
            answer = list(answer) if name == "scan_members" else answer
            sizes[name] = max([sizes.get(name, 0), *map(len, ids(arguments, answer))])
            return answer

        monkeypatch.setattr(RedisState, name, call)

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
    opened, view = history.sink.open_state()(), history.views["book_docs"]
    turn, table = opened.take("run"), view_table(history.pipeline, view)
    opened.sent(turn, view.name, {"1": opened.dirty(view.name, 9)["1"]})
    with ThreadPoolExecutor(1) as pool:
        repair = pool.submit(send_documents_again, history.pipeline, table, [b'{"id":1}'], 20.0)
        wait_until(lambda: opened.dirty_among(view.name, ["1"]), 10, "the mark of the repair")
        opened.sent(turn, view.name, {"1": opened.dirty(view.name, 9)["1"]})
        repair.result()
    with pytest.raises(ConnectorError, match="weren't sent again"):
        send_documents_again(history.pipeline, table, [b'{"id":1}'], 0.0)
