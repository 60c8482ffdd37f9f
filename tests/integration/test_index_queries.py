"""What the index finds, sorts and sums is what Postgres does: random queries on every type that can be compared."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.postgres.row_query import row_query
from cdc.sinks.elasticsearch.index import fields
from cdc.sinks.elasticsearch.sink import Elasticsearch
from tests.support import http
from tests.support.pipelines import pipeline

if TYPE_CHECKING:
    from tests.conftest import Stack

ROWS, PROBES, QUERIES = 120, 24, 8
"""Rows of the table; rows beside it whose values are asked for; queries of each kind and type."""
Random = random.Random
Value = Callable[[Random], str]


def integers(low: int, high: int) -> Value:
    return lambda rng: str(
        rng.choice([rng.randint(low, high), rng.randint(max(low, -30), min(high, 30))])
    )


def decimal(digits: int, scale: int) -> Value:
    """Short ones and long ones, of both signs: as text, 9.50 comes after 10.00 and -1 before -2."""

    def value(rng: Random) -> str:
        number = rng.randint(-(10 ** rng.randint(1, digits)) + 1, 10 ** rng.randint(1, digits) - 1)
        return f"{Decimal(number).scaleb(-scale):f}"

    return value


def binary(rng: Random) -> str:
    return rng.choice(
        [f"{rng.uniform(-50, 50):.1f}", f"{rng.uniform(1, 9):.5f}e{rng.randint(-20, 20)}"]
    )


def words(alphabet: str, longest: int) -> Value:
    return lambda rng: "".join(rng.choices(alphabet, k=rng.randint(1, longest)))


def digits(alphabet: str, length: int, between: str = "", size: int = 1) -> Value:
    def value(rng: Random) -> str:
        text = "".join(rng.choices(alphabet, k=length))
        return between.join(text[start : start + size] for start in range(0, length, size))

    return value


def moment(form: str, first: int = 1) -> Value:
    """Milliseconds: what an index compares. Some of them on the same days."""

    def value(rng: Random) -> str:
        year, midnight = (
            rng.choice([first, 1969, 2013, 2024, 9999]),
            timedelta(days=rng.randint(0, 300)),
        )
        day = (
            datetime(year, 1, 1, tzinfo=UTC)
            + midnight
            + timedelta(milliseconds=rng.randint(0, 86_399_999))
        )
        return day.strftime(form.replace("%Y", f"{year:04}"))

    return value


@dataclass(frozen=True)
class Case:
    """A type: its values, and the values that no query of the index' main field finds (`apart`)."""

    type: str
    value: Value
    apart: tuple[str, ...] = ()
    part: str = ""
    """The sub-field that is asked."""
    compared: str = "{0}"
    """The expression that Postgres compares, of a column and of a value."""
    ordered: bool = True
    values: list[str | None] = field(default_factory=list)


NEVER = ("infinity", "-infinity", "12000-01-01")
NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
HEX = "0123456789abcdef"
IN_BYTES = '{0} COLLATE "C"'
CASES = [
    Case("smallint", integers(-32768, 32767)),
    Case("integer", integers(-(2**31), 2**31 - 1)),
    Case("bigint", integers(-(2**63), 2**63 - 1)),
    Case("oid", integers(0, 2**32 - 1)),
    Case("xid8", integers(0, 10**15 - 1)),
    Case("numeric", decimal(15, 7), (*NO_NUMBERS, "9" * 400)),
    Case("numeric(10,2)", decimal(10, 2), ("NaN",)),
    Case("numeric(5,-2)", decimal(6, 0), ("NaN",)),
    Case("numeric(2,4)", decimal(2, 4)),
    Case("numeric(18,0)", decimal(18, 0), ("NaN",)),
    Case("numeric(38,20)", decimal(15, 12), ("NaN",)),
    Case("money", decimal(15, 2)),
    Case("price", decimal(10, 2), ("NaN",)),
    Case("real", binary, NO_NUMBERS),
    Case("double precision", binary, NO_NUMBERS),
    Case("boolean", lambda rng: rng.choice(["true", "false"])),
    Case("text", words("abAB zé😀'\"\\", 4), part=".keyword", compared=IN_BYTES),
    Case("varchar(9)", words("abAB é", 3), part=".keyword", compared=IN_BYTES),
    Case("char(5)", words("abAB", 3), part=".keyword", compared=IN_BYTES),
    Case("name", words("abAB", 3), part=".keyword"),
    Case("citext", words("abAB", 2), part=".keyword", compared='lower({0}::text) COLLATE "C"'),
    Case("date", moment("%Y-%m-%d"), NEVER),
    Case("timestamp", moment("%Y-%m-%d %H:%M:%S.%f"), NEVER),
    Case("timestamp(0)", moment("%Y-%m-%d %H:%M:%S"), NEVER),
    Case("timestamptz", moment("%Y-%m-%d %H:%M:%S.%f+00", 1500), NEVER),
    Case("time", moment("%H:%M:%S.%f"), ()),
    Case("uuid", lambda rng: str(UUID(int=rng.getrandbits(128)))),
    Case("macaddr", digits(HEX, 12, ":", 2)),
    Case("bit(10)", digits("01", 10)),
    Case("numeric(10,2)[]", lambda rng: f"{{{decimal(4, 2)(rng)},NULL,{decimal(3, 2)(rng)}}}", ordered=False),
    # By their texts, which Postgres orders otherwise.
    Case("mood", lambda rng: rng.choice(["sad", "ok", "happy"]), ordered=False),
    Case("inet", lambda rng: f"10.0.0.{rng.randint(0, 30)}", ordered=False),
    Case("int4range", lambda rng: f"[{rng.randint(0, 3)},{rng.randint(4, 6)})", ordered=False),
    Case("pg_lsn", digits("0123456789ABCDEF", 4, "/", 2), ordered=False),
]  # fmt: skip
SUMMED = ("bigint", "numeric", "numeric(10,2)", "numeric(18,0)", "money", "price")
SETUP = """
CREATE EXTENSION citext;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN price AS numeric(10,2);
"""


LINES = {"content-type": "application/x-ndjson"}


def fill(sink: Elasticsearch, table: Table, documents: Mapping[int, str]) -> None:
    """Make the index, and put documents into it."""
    sink.prepare(table)
    lines = "".join(f'{{"index":{{"_id":"{key}"}}}}\n{text}\n' for key, text in documents.items())
    url = f"{sink.url}/{sink.alias(table)}/_bulk?refresh=true"
    answer = http.post(url, content=lines.encode(), headers=LINES)
    assert not answer.raise_for_status().json()["errors"], answer.text[:1000]


def search(sink: Elasticsearch, table: Table, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """The ids that each query finds, in the order of the answer."""
    lines = "".join(
        json.dumps(line) + "\n"
        for body in bodies
        for line in ({}, {"size": ROWS, "_source": False, **body})
    )
    answer = http.post(f"{sink.url}/{sink.alias(table)}/_msearch", content=lines, headers=LINES)
    parts = answer.raise_for_status().json()["responses"]
    assert [part["error"] for part in parts if "error" in part] == []
    return [[int(hit["_id"]) for hit in part["hits"]["hits"]] for part in parts]


@dataclass
class Pair:
    """The same rows in Postgres and in an index; `probes` are the documents of values that are asked for."""

    conn: source.Connection
    sink: Elasticsearch
    table: Table
    documents: dict[int, dict[str, Any]]
    differing: list[str] = field(default_factory=list)

    def ids(self, wheres: list[str]) -> list[set[int]]:
        """The ids that meet each condition, read in one go."""
        rows = self.conn.execute(
            f"SELECT id, ARRAY[{', '.join(wheres)}] FROM t WHERE id < {ROWS}"
        ).fetchall()
        return [{key for key, flags in rows if flags[index]} for index in range(len(wheres))]

    def search(self, bodies: list[dict[str, Any]]) -> list[list[int]]:
        return search(self.sink, self.table, bodies)


@pytest.fixture
def make_pair(
    stack: "Stack", postgres_dsn: str, unique: str
) -> "Iterator[Callable[[list[Case]], Pair]]":
    sink = Elasticsearch("search", stack.endpoints.elasticsearch, unique)
    with source.connect(postgres_dsn) as conn:
        # A session of ours begins with pg_catalog, where nothing can be made.
        conn.execute("SET search_path = public")

        def make(cases: list[Case]) -> Pair:
            columns = ", ".join(f"c{index} {case.type}" for index, case in enumerate(cases))
            conn.execute(f"{SETUP} CREATE TABLE t (id int PRIMARY KEY, {columns})")
            row = ", ".join(f"%s::text::{case.type}" for case in cases)
            values = [[key, *(case.values[key] for case in cases)] for key in range(ROWS + PROBES)]
            conn.cursor().executemany(f"INSERT INTO t VALUES (%s, {row})", values)
            (table,) = table_survey.describe(conn, pipeline(unique, "", "public.t"))
            documents = {int(key): text for key, text in conn.execute(row_query(table))}
            fill(sink, table, {key: documents[key] for key in range(ROWS)})
            return Pair(
                conn, sink, table, {key: json.loads(text) for key, text in documents.items()}
            )

        yield make
    sink.close()


def filled(rng: Random, cases: list[Case]) -> list[Case]:
    """Fill the cases: each value that no query finds is in some rows, and in no probe."""
    for case in cases:
        rows = [case.value(rng) for _ in range(ROWS - 10)] + [None] * 10
        for index, value in enumerate(case.apart * 2):
            rows[index] = value
        rng.shuffle(rows)
        case.values[:] = [*rows, *(case.value(rng) for _ in range(PROBES))]
    return cases


def value_of(pair: Pair, name: str, probe: int) -> Any:
    document = pair.documents[probe][name]
    return document[0] if isinstance(document, list) else document


def check_queries(pair: Pair, rng: Random, index: int, case: Case) -> None:
    """Ranges and terms."""
    name = f"c{index}"
    elements = f"unnest({name})" if case.type.endswith("[]") else f"(VALUES ({name}))"
    compared = case.compared.format("v")
    missed = {key for key in range(ROWS) if case.values[key] in (None, *case.apart)}
    bodies, wheres = [], []
    for number in range(QUERIES):
        probes = [
            rng.randrange(ROWS, ROWS + PROBES) if number % 2 else anywhere(rng, missed)
            for _ in range(2)
        ]
        low, high = (value_of(pair, name, probe) for probe in probes)
        rows = f"t p CROSS JOIN LATERAL {elements.replace(name, f'p.{name}')} w(v)"
        texts = [f"(SELECT {compared} FROM {rows} WHERE p.id = {key} LIMIT 1)" for key in probes]
        queries: list[tuple[str, dict[str, Any]]] = [
            (
                f"{compared} IN ({texts[0]}, {texts[1]})",
                {"terms": {f"{name}{case.part}": [low, high]}},
            )
        ]
        if case.ordered or case.type.endswith("[]"):
            sides = rng.choice([(">=", "gte", "<", "lt"), (">", "gt", "<=", "lte")])
            bounds = {f"{name}{case.part}": {sides[1]: low, sides[3]: high}}
            queries.append(
                (
                    f"{compared} {sides[0]} {texts[0]} AND {compared} {sides[2]} {texts[1]}",
                    {"range": bounds},
                )
            )
        for condition, query in queries:
            bodies.append({"query": query})
            wheres.append(f"EXISTS (SELECT FROM {elements} w(v) WHERE {condition})")
    for body, ids, hits in zip(bodies, pair.ids(wheres), pair.search(bodies), strict=True):
        if set(hits) != ids - missed:
            pair.differing.append(
                f"{case.type}: {body['query']}: {len(hits)} for {len(ids - missed)}"
            )


def anywhere(rng: Random, missed: set[int]) -> int:
    return rng.choice(sorted(set(range(ROWS)) - missed))


def check_sorts(pair: Pair, index: int, case: Case) -> None:
    """Compare both sort directions; values without a number come last."""
    name, compared = f"c{index}", case.compared.format(f"c{index}")
    missed = {key for key in range(ROWS) if case.values[key] in (None, *case.apart)}
    bodies, expected = [], []
    for direction in ("asc", "desc"):
        keys = [
            k
            for (k,) in pair.conn.execute(
                f"SELECT id FROM t WHERE id < {ROWS} ORDER BY {compared} {direction}, id"
            )
        ]
        expected.append([key for key in keys if key not in missed] + sorted(missed))
        bodies.append(
            {
                "sort": [
                    {f"{name}{case.part}": {"order": direction, "missing": "_last"}},
                    {"id": "asc"},
                ]
            }
        )
    for direction, order, hits in zip(("asc", "desc"), expected, pair.search(bodies), strict=True):
        if order != hits:
            pair.differing.append(f"{case.type}: sorted {direction}")


def check_sums(pair: Pair, index: int, case: Case) -> None:
    """Compare count, least, greatest and sum of values that have a number."""
    missed = [key for key in range(ROWS) if case.values[key] in (None, *case.apart)]
    cast = f"c{index}::numeric"
    query = f"SELECT count({cast}), min({cast}), max({cast}), sum({cast}) FROM t WHERE id < {ROWS} AND id <> ALL (%s)"
    totals = pair.conn.execute(query, [missed]).fetchone()
    assert totals is not None
    url = f"{pair.sink.url}/{pair.sink.alias(pair.table)}/_search"
    request = {"size": 0, "aggs": {"all": {"stats": {"field": f"c{index}"}}}}
    stats = http.post(url, json=request).json().get("aggregations", {}).get("all", {})
    numbers = [stats.get(name, 0) for name in ("count", "min", "max", "sum")]
    if numbers != pytest.approx([float(total) for total in totals], rel=1e-12):
        pair.differing.append(f"{case.type}: sums {numbers} for {totals}")


def check(pair: Pair, rng: Random, cases: list[Case]) -> list[str]:
    for index, case in enumerate(cases):
        check_queries(pair, rng, index, case)
        if case.ordered:
            check_sorts(pair, index, case)
        if case.type in SUMMED:
            check_sums(pair, index, case)
    return pair.differing


def test_the_index_finds_what_postgres_finds(
    make_pair: Callable[[list[Case]], Pair], record_property: Any
) -> None:
    rng = Random(26)
    record_property("seed", 26)
    pair = make_pair(filled(rng, CASES))
    assert check(pair, rng, CASES) == []


ROUNDED = [
    Case("numeric(38,18)", lambda rng: f"1.{rng.randint(0, 999):018}"),
    Case("numeric(25,0)", lambda rng: str(10**24 + rng.randint(0, 10**9))),
    Case("timestamp", lambda rng: f"2013-01-01 10:00:00.{rng.randint(0, 9999):06}"),
]


def test_what_the_index_rounds_is_not_lost(make_pair: Callable[[list[Case]], Pair]) -> None:
    """Decimals of more than 15 digits, and parts of a millisecond: a range that takes its ends in has all of them."""
    rng = Random(26)
    pair = make_pair(filled(rng, ROUNDED))
    for index, case in enumerate(ROUNDED):
        name = f"c{index}"
        # As texts of one length they are in order.
        low, high = sorted(pair.documents[probe][name] for probe in (ROWS, ROWS + 1))
        some = [text for key in range(5) if (text := pair.documents[key][name])]
        listed = ", ".join(f"'{text}'" for text in some)
        ranged, equal = pair.ids([f"{name} BETWEEN '{low}' AND '{high}'", f"{name} IN ({listed})"])
        field = f"{name}.exact" if case.type.startswith("numeric") else name
        hits = pair.search(
            [
                {"query": {"range": {name: {"gte": low, "lte": high}}}},
                {"query": {"terms": {field: some}}},
            ]
        )
        assert ranged <= set(hits[0])
        assert equal <= set(hits[1]) if field == name else equal == set(hits[1])


def test_planted_decimals_as_text(
    make_pair: Callable[[list[Case]], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100.98 lies between 10 and 20."""
    for type_ in ("numeric", "money"):
        monkeypatch.setitem(fields.FIELDS_OF_TYPES, type_, fields.KEYWORD)
    cases = [case for case in CASES if case.type in ("numeric(10,2)", "money")]
    rng = Random(26)
    differing = check(make_pair(filled(rng, cases)), rng, cases)
    for case in cases:
        assert {f"{case.type}: sorted asc", f"{case.type}: sorted desc"} <= set(differing)
        assert any(difference.startswith(f"{case.type}: {{'range'") for difference in differing)
