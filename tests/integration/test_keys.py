"""Tables whose rows a unique index tells apart: every change arrives under its key."""

import pytest

from cdc.postgres.snapshot_request import resend
from tests.support.shop import Change, Shop
from tests.support.wait import wait_until

TABLES = """
CREATE TABLE shop.seats (a int NOT NULL, n int, "B" text COLLATE "C" NOT NULL);
CREATE UNIQUE INDEX ON shop.seats ("B", a);
CREATE TABLE shop.places (a int NOT NULL, n int, b int NOT NULL);
CREATE UNIQUE INDEX ON shop.places (a, b);
"""


@pytest.mark.parametrize(
    ("table", "columns", "value"), [("seats", ("B", "a"), "'x'"), ("places", ("a", "b"), "7")]
)
def test_a_table_without_a_primary_key(
    shop: Shop, table: str, columns: tuple[str, str], value: str
) -> None:
    """With either replica identity: FULL for a table that can be TOASTed, the index for one that can't."""
    shop.conn.execute(TABLES)
    name = f"shop.{table}"
    b = next(column for column in columns if column != "a")
    shop.conn.execute(
        f'INSERT INTO {name} (a, n, "{b}") SELECT g, g, {value} FROM generate_series(1, 3) g'.encode()
    )
    shop = shop.capturing({"table": name, "key": list(columns), "partitions": 1})
    shop.migrate()
    shop.register()
    for statement in (
        f'INSERT INTO {name} (a, n, "{b}") VALUES (4, 4, {value})',
        f"UPDATE {name} SET n = 10 WHERE a = 1",
        f"UPDATE {name} SET a = 5 WHERE a = 2",
        f"DELETE FROM {name} WHERE a = 3",
    ):
        shop.conn.execute(statement.encode())

    def changes() -> list[Change]:
        return shop.log(name)

    wait_until(lambda: len(changes()) == 8, 20, "all changes")
    triples = [
        (change.op, change.key["a"], change.after and change.after["n"]) for change in changes()
    ]
    assert triples == [
        *(("r", n, n) for n in (1, 2, 3)),
        ("c", 4, 4),
        ("u", 1, 10),
        ("d", 2, None),
        ("c", 5, 2),
        ("d", 3, None),
    ]
    assert {tuple(sorted(change.key)) for change in changes()} == {tuple(sorted(columns))}
    resend(shop.conn, shop.table(name), reader=shop.pipeline.replication_user, id="again")
    wait_until(lambda: len(changes()) == 11, 20, "the rows again")
    assert {change.key["a"] for change in changes()[8:]} == {1, 4, 5}
    assert {change.op for change in changes()[8:]} == {"r"}
