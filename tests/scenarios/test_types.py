"""Every type through the whole pipeline, from a snapshot and from the log; Postgres says what each value has to be."""

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import redis

from tests.support import http
from tests.support.all_types import (
    EXTENSIONS,
    SETUP,
    TABLES,
    UUID,
    VALUES,
    column_name,
    create,
    insert,
)
from tests.support.server_control import connect_with
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

# What the index and the cache show: type, value, document.
DOCUMENTS: list[tuple[str, str, Any]] = [
    ("date", "'0044-03-15 BC'", "-0043-03-15"),
    ("date", "'12000-01-01'", "+12000-01-01"),
    ("date", "'infinity'", "infinity"),
    ("time", "'24:00:00'", "24:00:00.000000"),
    ("timetz", "'10:00:00+02'", "08:00:00.000000Z"),
    ("timestamp", "'0044-03-15 12:00:00.5 BC'", "-0043-03-15T12:00:00.500000"),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamptz", "'12000-01-01 00:00:00.000001+00'", "+12000-01-01T00:00:00.000001Z"),
    ("timestamptz", "'infinity'", "infinity"),
    ("numeric", "'NaN'", "NaN"),
    ("real", "'Infinity'", "Infinity"),
    ("numeric(10,2)", "1.5", "1.50"),
    ("numeric(5,-2)", "12345", "12300"),
    ("money", "12.34", "12.34"),
    ("bit(10)", "'1000000001'", "1000000001"),
    ("int4multirange", "'{[1,3),[5,7)}'", "{[1,3),[5,7)}"),
    ("tsquery", "'fat & (cat | !rat)'", "'fat' & ( 'cat' | !'rat' )"),
    ("point", "'(1.5,-2)'", [1.5, -2.0]),
    ("box", "'((0,0),(1,1.5))'", [1.0, 1.5, 0.0, 0.0]),
    ("hstore", "''", {}),
    ("interval", "'1 year 2 mons 3 days 04:05:06.7'", "P1Y2M3DT4H5M6.7S"),
    ("interval", "'-1 day +00:00:01'", "P0Y0M-1DT0H0M1S"),
    ("bytea", r"'\x00ff1080'", "AP8QgA=="),
    ("span", "ROW(1, '1-2', '\\xff', '2013-01-02')", r"""(1,"1 year 2 mons","\\xff",2013-01-02)"""),
    ("regconfig", "'simple'", "simple"),
    ("char(5)", "'ab'", "ab   "),
    (
        "jsonb[]",
        """ARRAY['{"a":12345678901234567890.123}'::jsonb, '"x"']""",
        [{"a": "12345678901234567890.123"}, "x"],
    ),
]


def place(type_: str, value: str, first: int) -> tuple[str, int]:
    """The table and the row that hold a value."""
    table = next(table for table, types in TABLES.items() if type_ in types)
    return f"public.{table}", first + VALUES[type_].index(value)


SETTINGS = {
    "intervalstyle": "sql_standard",
    "bytea_output": "escape",
    "quote_all_identifiers": "on",
    "datestyle": "German, DMY",
    "timezone": "Asia/Kolkata",
    "extra_float_digits": "0",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "statement_timeout": "3s",
    "idle_in_transaction_session_timeout": "1s",
    "transaction_timeout": "5s",
    "lock_timeout": "100ms",
}
"""What an owner may have set for all sessions of a database."""


OTHER = (
    "CREATE SCHEMA other",
    "GRANT USAGE ON SCHEMA other TO PUBLIC",
    "CREATE DOMAIN other.date AS timestamp(0)",
    "CREATE FUNCTION other.isfinite(pg_catalog.date) RETURNS boolean RETURN false",
    "CREATE FUNCTION other.clock_timestamp() RETURNS timestamptz RETURN '-infinity'::timestamptz",
)
"""What a path may lead to before Postgres' own, as Orafce's does."""
FOREIGN_WORKER = "-Duser.language=tr -Duser.country=TR -Dfile.encoding=ISO-8859-1"


def test_every_type_from_snapshot_and_log(world: "World") -> None:
    """In a database whose settings would change values and end sessions that take their time."""
    database = world.dsn.rsplit("/", 1)[1]
    world.write_file(*(f"public.{table}" for table in TABLES))
    world.sql(*(f"CREATE EXTENSION {name}" for name in EXTENSIONS), *SETUP)
    world.sql(*create(), *OTHER)
    world.sql(
        *(f"ALTER DATABASE {database} SET {name} = '{value}'" for name, value in SETTINGS.items()),
        f"ALTER DATABASE {database} SET search_path = other, pg_catalog, public",
    )
    world.sql("SET TRANSACTION READ WRITE", *insert(0))
    world.cdc("migrate")
    with connect_with(world.stack.servers, FOREIGN_WORKER):
        world.cdc("register")
        with world.running():
            world.settle(300)
            world.sql("SET TRANSACTION READ WRITE", *insert(1000))
            world.settle(300)
    world.assert_equal()
    for first in (0, 1000):
        assert_documents(world, first)
        assert_columns(world, first)


def assert_documents(world: "World", first: int) -> None:
    cache = redis.Redis.from_url(world.cache, decode_responses=True)
    for type_, value, document in DOCUMENTS:
        table, row = place(type_, value, first)
        cached_row = json.loads(str(cache.get(f"{world.name}:{table}:{row}")), parse_float=exactly)
        assert (type_, cached_row[column_name(type_)]) == (type_, document)
        url = f"{world.stack.endpoints.elasticsearch}/{world.name}-{table}/_doc/{row}"
        index_row = json.loads(http.get(url).text, parse_float=exactly)["_source"]
        assert (type_, index_row[column_name(type_)]) == (type_, document)


def exactly(number: str) -> float | str:
    """A number that a double rounds, as the text that it is."""
    return float(number) if len(number) < 18 else number


def assert_columns(world: "World", first: int) -> None:
    """Compare columns as an implementation of Delta that isn't Spark reads them."""
    cases = {
        ("date", "'0044-03-15 BC'"): -735160,
        ("date", "'infinity'"): 2**31 - 1,
        ("date", "'-infinity'"): -(2**31),
        ("timestamp", "'infinity'"): 2**63 - 1,
        ("timestamp", "'-infinity'"): -(2**63),
        ("timestamptz", "'infinity'"): 2**63 - 1,
        ("timestamptz", "'0044-03-15 12:00:00.5+00 BC'"): -63517780799500000,
        ("bigint", "9223372036854775807"): 2**63 - 1,
    }
    for (type_, value), number in cases.items():
        table, row = place(type_, value, first)
        column = column_name(type_)
        opened = deltalake.DeltaTable(str(world.warehouse / table / "mirror"))
        rows = pa.table(
            deltalake.QueryBuilder()
            .register("t", opened)
            .execute(f"SELECT id, {column} FROM t")
            .read_all()
        )
        numbers = rows.column(column).cast("int32" if type_ == "date" else "int64").to_pylist()
        assert (type_, value, numbers[rows.column("id").to_pylist().index(row)]) == (
            type_,
            value,
            number,
        )


KEYS: dict[str, tuple[str, ...]] = {
    "text": ("'a'", "'é 😀/?#%'", """E'q"\\\\,[]:{}'""", "'_cdc'"),
    "uuid": (f"'{UUID}'",),
    "bigint": ("9007199254740993", "-9223372036854775808"),
    "numeric": ("1.50", "'NaN'", "12345678901234567890.123"),
    "date": ("'2013-01-02'", "'0044-03-15 BC'", "'infinity'"),
    "timestamp": ("'2013-01-01 10:00:00.5'", "'-infinity'"),
    "timestamptz(3)": ("'2013-01-01 10:00+02'", "'infinity'"),
    "bytea": (r"'\x00ff'", "decode(repeat('ab', 90), 'hex')"),
    "one.mood": ("'sad'", """'ha"p,py'"""),
    "char(4)": ("'a'", "'abcd'"),
    "citext": ("'AbC'",),
    "boolean": ("true", "false"),
    "interval": ("'1 day'",),
    "inet": ("'10.0.0.1/8'",),
}


def test_every_type_as_a_key(world: "World") -> None:
    """Alone and as a part of a composite key; each row is inserted, changed, and one is deleted."""
    names = {type_: f"k{number}" for number, type_ in enumerate(KEYS)}
    world.sql("CREATE EXTENSION citext", *SETUP)
    for type_, values in KEYS.items():
        world.sql(f"CREATE TABLE {names[type_]} (k {type_} PRIMARY KEY, v int)")
        world.sql(f"INSERT INTO {names[type_]} SELECT {values[0]}, 1")
    parts = ", ".join(f"{name} {type_}" for type_, name in names.items())
    world.sql(f"CREATE TABLE many ({parts}, v int, PRIMARY KEY ({', '.join(names.values())}))")
    world.begin(*(f"public.{name}" for name in names.values()), "public.many")
    with world.running():
        world.settle()
        for type_, values in KEYS.items():
            world.sql(
                *(
                    f"INSERT INTO {names[type_]} SELECT {value}, 1 ON CONFLICT DO NOTHING"
                    for value in values
                )
            )
            world.sql(
                f"UPDATE {names[type_]} SET v = 2",
                f"DELETE FROM {names[type_]} WHERE k = {values[-1]}",
            )
        for row in range(max(map(len, KEYS.values()))):
            world.sql(
                f"INSERT INTO many SELECT {', '.join(v[row % len(v)] for v in KEYS.values())}, 1"
            )
        world.sql("UPDATE many SET v = 2")
        world.settle()
    world.assert_equal()


def plant(world: "World") -> None:
    """Change one value of each row in the cache, and nowhere else."""
    cache = redis.Redis.from_url(world.cache, decode_responses=True)
    for number, (_, change) in enumerate(PLANTED, 1):
        key = f"{world.name}:public.p:{number}"
        good = str(cache.get(key))
        old_text, new_text = change.split(" -> ")
        assert good.count(old_text) == 1, good
        cache.set(key, good.replace(old_text, new_text))


PLANTED = [
    ("n", '"1.10" -> 1.1'),
    ("n", '"1.10" -> "1.1"'),
    ("b", "9007199254740993 -> 9007199254740992"),
    ("j", "12345678901234567890.123 -> 12345678901234567000"),
    ("j", '"u": 1 -> "u": "1"'),
    ("a", "[1,null,3] -> [1,3]"),
    ("z", "T08:00:00 -> T10:00:00"),
    ("t", '"x " -> "x"'),
    ("f", '"f":0.1 -> "f":0.10000001'),
    ("e", '"e":null -> "e":""'),
]


def test_verify_finds_every_planted_loss(world: "World") -> None:
    """A row each, whose column it names. And it takes for equal what is: another order of members,
    other spaces, a number's other way of writing.
    """
    world.sql(
        """CREATE TABLE p (id int PRIMARY KEY, n numeric, b bigint, j jsonb, a int[], z timestamptz, t text, f float8,
           e text)""",
        f"""INSERT INTO p SELECT id, 1.10, 9007199254740993, '{{"n":[12345678901234567890.123],"u":1}}', '{{1,NULL,3}}',
           '2013-01-01 10:00+02', 'x ', 0.1, NULL FROM generate_series(1, {len(PLANTED)}) id""",
    )
    world.begin("public.p")
    with world.running():
        world.settle()
    cache = redis.Redis.from_url(world.cache, decode_responses=True)
    key = f"{world.name}:public.p:1"
    keys = [f"{world.name}:public.p:{number}" for number in range(1, len(PLANTED) + 1)]
    documents = dict(zip(keys, cache.mget(keys), strict=True))
    plant(world)
    comparisons = {comparison.sink: comparison for comparison in world.compare()}
    assert comparisons["search"].equal
    assert comparisons["warehouse"].equal
    differences = comparisons["cache"].differences
    assert sorted((int(row.id), row.kind, row.column) for row in differences) == [
        (number, "different", column) for number, (column, _) in enumerate(PLANTED, 1)
    ]
    cache.mset(documents)  # type: ignore[arg-type]
    document = json.loads(str(cache.get(key)), parse_float=exactly)
    raw = {"f": "1.0E-1", "j": '{ "u":1,"n": [12345678901234567890.123]}'}
    texts = {
        name: raw.get(name) or json.dumps(value)
        for name, value in reversed(document.items())
        if name != "e"
    }
    members = ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items())
    cache.set(key, f'{{{members}, "_cdc_offset": 7, "gone": 1}}')
    world.assert_equal()


LOST = {"int[]": "'{{1,2},{3,4}}'", "text[]": "'{{a,b},{c,d}}'", "timestamp[]": "'{0044-03-15 BC}'"}


def test_what_the_connector_damages_reaches_no_view(world: "World") -> None:
    """What it can't convert stops it: by default it would send null in its place."""
    columns = ", ".join(f"{column_name(type_)} {type_}" for type_ in LOST)
    world.sql(f"CREATE TABLE d (id int PRIMARY KEY, {columns})", "INSERT INTO d VALUES (0)")
    world.sql(
        *(
            f"INSERT INTO d (id, {column_name(type_)}) VALUES ({number}, {LOST[type_]})"
            for number, type_ in enumerate(LOST, 1)
        )
    )
    world.sql("CREATE TABLE unconverted (id int PRIMARY KEY, v numeric[])")
    world.begin("public.d", "public.unconverted")
    with world.running():
        world.settle()
    listed = world.quarantine()
    expected = {
        (str(number), f"the connector has damaged its {column_name(type_)}")
        for number, type_ in enumerate(LOST, 1)
    }
    assert len(listed) == 3 * len(LOST)
    assert {(entry["id"], entry["reason"]) for entry in listed} == expected
    for comparison in world.compare():
        missing = len(LOST) if comparison.table == "public.d" else 0
        assert (comparison.missing, comparison.extra, comparison.different) == (missing, 0, 0)
    world.sql("INSERT INTO unconverted VALUES (1, '{NaN}')")
    wait_until(
        lambda: world.json("status")["connector"]["tasks"] == ["FAILED"],
        60,
        "the connector to stop",
    )
