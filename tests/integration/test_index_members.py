"""What the index finds in the members of a document is what Postgres finds in the rows that they are made of."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from cdc.config import settings
from cdc.documents.tables import view_tables
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.postgres.row_query import row_query
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.elasticsearch.sink import Elasticsearch
from tests.integration.test_index_queries import fill, search

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Stack

ORDERS = 80
SETUP = """
CREATE TABLE customers (id int PRIMARY KEY, name text, balance numeric(12,2), since date);
CREATE TABLE orders (id int PRIMARY KEY, customer_id int);
CREATE TABLE products (id int PRIMARY KEY, name text, weight double precision);
CREATE TABLE items (
    order_id int, line int, product_id int, quantity int, price numeric(10,2), PRIMARY KEY (order_id, line)
);
CREATE TABLE tags (order_id int, tag text, PRIMARY KEY (order_id, tag));
"""
FILE = """
pipeline: {name}
source:
  dsn: "{dsn}"
  tables: [public.customers, public.orders, public.products, public.items, public.tags]
kafka: 127.0.0.1:1
connect: http://127.0.0.1:1
sinks:
  search: {{type: elasticsearch, url: "{url}"}}
state: {{type: redis, url: "redis://127.0.0.1:1/4", prefix: x}}
views:
  order_docs:
    root: public.orders
    include:
      customer: {{table: public.customers, on: {{customer_id: id}}}}
      items:
        table: public.items
        on: {{id: order_id}}
        many: true
        include:
          product: {{table: public.products, on: {{product_id: id}}}}
      labels: {{table: public.tags, on: {{id: order_id}}, many: true, flatten: tag}}
    to: [search]
"""
QUERIES: dict[str, tuple[dict[str, Any], str]] = {
    "a number and a decimal of one item": (
        {
            "nested": {
                "path": "items",
                "query": {
                    "bool": {
                        "filter": [
                            {"range": {"items.quantity": {"gte": 7}}},
                            {"range": {"items.price": {"lt": 20}}},
                        ]
                    }
                },
            }
        },
        "EXISTS (SELECT FROM items i WHERE i.order_id = o.id AND quantity >= 7 AND price < 20)",
    ),
    "words of an object in a list": (
        {"nested": {"path": "items", "query": {"match": {"items.product.name": "WIDE"}}}},
        "EXISTS (SELECT FROM items i JOIN products p ON p.id = i.product_id"
        " WHERE i.order_id = o.id AND p.name ~ '\\mwide\\M')",
    ),
    "a real of an object in a list": (
        {"nested": {"path": "items", "query": {"range": {"items.product.weight": {"gt": 9.5}}}}},
        "EXISTS (SELECT FROM items i JOIN products p ON p.id = i.product_id"
        " WHERE i.order_id = o.id AND p.weight > 9.5)",
    ),
    "the exact text of an object": (
        {"term": {"customer.name.keyword": "Bo Li"}},
        "EXISTS (SELECT FROM customers c WHERE c.id = o.customer_id AND c.name = 'Bo Li')",
    ),
    "a decimal of an object, not as text": (
        {"range": {"customer.balance": {"gte": 9.5, "lt": 100}}},
        "EXISTS (SELECT FROM customers c WHERE c.id = o.customer_id"
        " AND balance >= 9.5 AND balance < 100)",
    ),
    "a day of an object": (
        {"range": {"customer.since": {"gte": "2013-06-01"}}},
        "EXISTS (SELECT FROM customers c WHERE c.id = o.customer_id AND since >= '2013-06-01')",
    ),
    "no object": (
        {"bool": {"must_not": {"exists": {"field": "customer.id"}}}},
        "NOT EXISTS (SELECT FROM customers c WHERE c.id = o.customer_id)",
    ),
    "a flattened list": (
        {"terms": {"labels.keyword": ["red", "blue"]}},
        "EXISTS (SELECT FROM tags t WHERE t.order_id = o.id AND tag IN ('red', 'blue'))",
    ),
}


@dataclass
class Shop:
    """The tables in Postgres, and an index of the documents that are made of them."""

    conn: source.Connection
    sink: Elasticsearch
    pipeline: settings.Pipeline

    def index_documents(self) -> None:
        """Prepare the index for the view as it is now, and write what Postgres says."""
        fill(self.sink, self.view, dict(self.conn.execute(row_query(self.view)).fetchall()))

    @property
    def view(self) -> Table:
        (view,) = view_tables(self.pipeline, table_survey.describe(self.conn, self.pipeline))
        return view

    def search(self, query: dict[str, Any]) -> set[int]:
        """Return the ids of the orders that a query finds."""
        (ids,) = search(self.sink, self.view, [{"query": query}])
        return set(ids)


@pytest.fixture
def shop(stack: "Stack", postgres_dsn: str, unique: str, tmp_path: "Path") -> "Iterator[Shop]":
    file = tmp_path / "shop.yaml"
    url = stack.endpoints.elasticsearch
    file.write_text(FILE.format(name=unique, dsn=postgres_dsn, url=url))
    sink = Elasticsearch("search", url, unique)
    with source.connect(postgres_dsn) as conn:
        # A session of ours begins with pg_catalog, where nothing can be made.
        conn.execute("SET search_path = public")
        conn.execute(SETUP)
        write_rows(conn, random.Random(5))
        result = Shop(conn, sink, settings.load(file, {}))
        result.index_documents()
        yield result
    sink.close()


def write_rows(conn: source.Connection, chance: random.Random) -> None:
    def insert(table: str, rows: list[tuple[Any, ...]]) -> None:
        places = ", ".join(["%s"] * len(rows[0]))
        conn.cursor().executemany(
            f"INSERT INTO {table} VALUES ({places}) ON CONFLICT DO NOTHING", rows
        )

    names, words = ["Ann", "Bo Li", "Bo", None], ["wide", "Wide", "widely", "a wide table", ""]
    insert(
        "customers",
        [
            (
                key,
                chance.choice(names),
                chance.choice([9, 10, 99.5, 100, -1]),
                f"2013-0{key + 1}-01",
            )
            for key in range(8)
        ],
    )
    insert("products", [(key, words[key % 5].lower(), chance.uniform(8, 11)) for key in range(9)])
    insert("orders", [(key, chance.choice([*range(10), None])) for key in range(ORDERS)])
    insert(
        "items",
        [
            (
                chance.randrange(ORDERS),
                line,
                chance.choice([*range(10), None]),
                chance.randrange(10),
                chance.choice([5, 9.5, 19.99, 20, 100]),
            )
            for line in range(200)
        ],
    )
    insert("tags", [(chance.randrange(ORDERS), tag) for tag in ("red", "blue", "green") * 15])


def test_members_are_found_as_their_rows_are(shop: Shop) -> None:
    for name, (query, condition) in QUERIES.items():
        rows = shop.conn.execute(f"SELECT id FROM orders o WHERE {condition}")
        expected = {key for (key,) in rows}
        assert 0 < len(expected) < ORDERS, name
        assert shop.search(query) == expected, name


def test_an_index_takes_members_that_are_added(shop: Shop) -> None:
    """A column that a table gets reaches the objects in documents, in the index that is there."""
    shop.conn.execute("ALTER TABLE products ADD COLUMN colour text DEFAULT 'dark red'")
    shop.index_documents()
    query = {"nested": {"path": "items", "query": {"match": {"items.product.colour": "red"}}}}
    condition = (
        "EXISTS (SELECT FROM items i JOIN products p ON p.id = product_id WHERE order_id = o.id)"
    )
    rows = shop.conn.execute(f"SELECT id FROM orders o WHERE {condition}")
    assert shop.search(query) == {key for (key,) in rows} != set()


def test_an_index_refuses_members_of_another_type(shop: Shop) -> None:
    shop.conn.execute("ALTER TABLE products ALTER COLUMN weight TYPE text")
    with pytest.raises(SchemaMismatch, match=r"made with other fields .*: items"):
        shop.index_documents()
