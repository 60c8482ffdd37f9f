"""Views in the pipeline file: what is accepted, and how mistakes are named."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cdc.config import settings
from cdc.config.view_settings import Order
from cdc.documents.plan import Aggregate, Node, View
from cdc.documents.resolve import resolve_views
from cdc.errors import SettingsError
from cdc.model.mask import Mask
from cdc.model.table import Column, Table

GOOD = """\
pipeline: airport
kafka: localhost:9092
connect: http://localhost:8083
source:
  dsn: postgresql://localhost/airport
  tables: [public.flights, public.air*, {table: public.planes, exclude: [speed]}]
sinks:
  search: {type: elasticsearch, url: "http://localhost:9200"}
  cache: {type: redis, url: "redis://localhost/0", prefix: airport}
state: {type: redis, url: "redis://localhost/2", prefix: airport}
views:
  flight_docs:
    root: public.flights
    columns: [flight, delay]
    where: is_active
    include:
      airline: {table: public.airlines, on: {carrier: carrier}, columns: [name]}
      aircraft:
        table: public.planes
        on: {tailnum: tailnum}
        include:
          owner: {table: public.airlines, on: {on: carrier}}
    to: [search, cache]
  airport_docs:
    root: public.airports
    include:
      departures:
        table: public.flights
        on: {faa: origin}
        many: true
        order_by: [-day, flight desc, tailnum]
        limit: 50
        flatten: flight
        aggregates: {departures_count: count(*), late: " MAX( delay ) "}
      arrivals:
        {table: public.flights, on: {faa: dest}, many: true, show: false, aggregates: {n: count(delay)}}
    to: [topic]
"""


def table(name: str, key: str, /, **types: str) -> Table:
    masks = {"secret": Mask(hash="salt"), "short": Mask(cut=5)}
    columns = tuple(
        Column(column, type_, mask=masks.get(column)) for column, type_ in types.items()
    )
    return Table("public", name, columns, (key,), f"airport.public.{name}")


TABLES = (
    table(
        "flights", "id", id="integer", flight="integer", carrier="text", tailnum="text",
        origin="character varying(3)", dest="text", gate="character(3)", day="date", delay="integer",
        is_active="boolean", fuel="double precision", price="numeric", note="json", word="citext",
        secret="text", short="text",
    ),
    table("airlines", "carrier", carrier="text", name="text"),
    table("airports", "faa", faa="text", name="text", flight="integer"),
    table("planes", "tailnum", tailnum="text", on="text", seats="integer"),
)  # fmt: skip


def load(tmp_path: Path, text: str) -> settings.Pipeline:
    path = tmp_path / "airport.yaml"
    path.write_text(text)
    return settings.load(path, {})


def resolve(tmp_path: Path, text: str, tables: Sequence[Table] = TABLES) -> tuple[View, ...]:
    pipeline = load(tmp_path, text).with_tables([table.qualified for table in tables])
    return resolve_views(pipeline, tables)


def texts(node: Node) -> list[tuple[str, str]]:
    assert node.join is not None
    sides = zip(node.join.parent, node.join.child, strict=True)
    return [(left.text, right.text) for left, right in sides]


def test_a_declared_view_is_resolved(tmp_path: Path) -> None:
    flight_docs, airport_docs = resolve(tmp_path, GOOD)
    root = flight_docs.root
    assert (flight_docs.name, flight_docs.sinks) == ("flight_docs", ("search", "cache"))
    assert (root.table, root.columns) == (TABLES[0], ("flight", "delay"))
    assert root.where is not None
    assert root.where.columns == ("is_active",)
    airline, aircraft = root.children
    assert (airline.field, airline.columns, airline.many) == ("airline", ("name",), False)
    assert texts(airline) == [("carrier", "carrier")]
    assert aircraft.columns == ("tailnum", "on", "seats")
    # YAML 1.1 would take the key `on` for true.
    assert texts(aircraft.children[0]) == [("on", "carrier")]
    departures, arrivals = airport_docs.root.children
    assert airport_docs.sinks == ()
    assert (departures.many, departures.limit, departures.flatten) == (True, 50, "flight")
    assert departures.columns == ("flight",)
    assert departures.order_by == (Order("day", True), Order("flight", True), Order("tailnum"))
    assert departures.aggregates == (
        Aggregate("departures_count", "count"),
        Aggregate("late", "max", "delay"),
    )
    assert (arrivals.shows, arrivals.columns) == (False, ())
    assert arrivals.aggregates == (Aggregate("n", "count", "delay"),)


def test_expressions_join_and_select(tmp_path: Path) -> None:
    on = """{"Carrier || '/' || delay": carrier, flight + 1: length(name)}"""
    text = GOOD.replace("{carrier: carrier}", on).replace(
        "where: is_active", "where: is_active AND delay > 15"
    )
    root = resolve(tmp_path, text)[0].root
    row = {"carrier": "UA", "delay": 20, "flight": 3, "is_active": None}
    assert root.where is not None
    assert root.where.columns == ("is_active", "delay")
    assert root.where.evaluate(row) is None
    join = root.children[0].join
    assert join is not None
    assert [part.evaluate(row) for part in join.parent] == ["UA/20", 4]
    assert join.child[0].text == "carrier"
    assert join.child[1].evaluate({"name": "12345"}) == 5


def test_a_view_has_a_topic_of_its_own(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).view_topic("flight_docs") == "airport.view.flight_docs"


MISTAKES: list[tuple[Any, ...]] = [
    *((load, old, new, f"{line}: ", *words) for old, new, line, *words in [
        ("root: public.flights", "root: flights", 13, "flight_docs.root: takes schema.table", ""),
        ("root: public.flights", "roots: public.flights", 13, "no such setting", "did you mean root"),
        ("root: public.flights", "root: public.trains", 13, "the table isn't captured", "add public"),
        ("table: public.planes\n", "table: public.cars\n", 19, "aircraft.table: the table isn't", ""),
        ("to: [search, cache]", "to: [search, cash]", 23, "to.1: there is no such sink", "cache"),
        ("to: [search, cache]", "to: []", 23, "at least one is needed", "to: [search, cache]"),
        ("flight_docs:", "Flights:", 12, "a view's name is", "flight_docs"),
        ("      airline:", "      _cdc:", 17, "a member's name", "airline"),
        ("on: {carrier: carrier}", "on: {}", 17, "airline.on: at least one", "on: {carrier"),
        ("on: {carrier: carrier}", "on: {carrier: yes}", 17, "a text is needed (in quotes", ""),
        ("limit: 50", "limit: 0", 32, "departures.limit: must be 1 or more", ""),
        ("many: true\n", "many: false\n", 27, "order_by is a list's", "add many: true"),
        ("columns: [name]}", "limit: 3}", 17, "limit is a list's", "add many: true"),
        ("count(*)", "sum(*)", 34, "aggregates: an aggregate is one of", "count(*)"),
        ("count(*)", "median(delay)", 34, "aggregates: an aggregate is one of", "count(*)"),
        ("flatten: flight", "flatten: flight\n        columns: [day]", 27, "flatten leaves one value", ""),
        ("show: false, ", "show: false, limit: 3, ", 35, "limit says how the member looks", ""),
        (", aggregates: {n: count(delay)}", "", 35, "shows nothing", "aggregates"),
        (
            "    root: public.flights",
            "    root: public.flights\n    window: {size: 1 hour}",
            12, "flight_docs: window is of a view that begins with from", "select: {flights: count(*)}",
        ),
        ("    root: public.flights", "    from: public.flights", 14, "columns: no such setting", "clock, from"),
        ("    root: public.flights\n", "", 12, "root: required, but missing", "root: public.flights"),
        ("    root: public.flights", "    event: {}", 12, "event isn't supported", ""),
        ("state:", "# state:", 11, "views need a state", "state: {type: redis"),
        ("localhost/2", "localhost/0", 10, "state: the state is where cache has", "another database"),
        ("localhost/2", "127.0.0.1:6379/1", 10, "state: the state is where cache has", ""),
        ("localhost/2", "localhost/7?db=1", 10, "state: the state is where cache has", ""),
        ("{type: redis, url: \"redis://localhost/2\"", "{type: delta, url: \"x\"", 10, "state.type", ""),
        ("public.air*,", "public.air*, view.flight_docs,", 12, "view.flight_docs has the same", "another"),
    ]),
    # What only the tables show to be wrong.
    *((resolve, old, new, f"{line}: views.", *words) for old, new, line, *words in [
        ("[flight, delay]", "[flight, dellay]", 14, "columns.1: public.flights has no column dellay", "mean delay?"),
        ("columns: [name]", "columns: [nam]", 17, "public.airlines has no column nam", "mean name?"),
        ("{tailnum: tailnum}", "{tailnun: tailnum}", 20, "on.tailnun: public.flights has no column", ""),
        ("{tailnum: tailnum}", "{tailnum: tailnun}", 20, "on.tailnum: public.planes has no", ""),
        ("{tailnum: tailnum}", "{tailnum: speed}", 20, "public.planes excludes speed", "take speed"),
        ("{carrier: carrier}", "{secret: carrier}", 17, "only one side is hashed", "with the same salt, each of"),
        ("{carrier: carrier}", "{short: carrier}", 17, "public.flights.short is masked", "join on another column, or"),
        ("{carrier: carrier}", "{secret || dest: carrier}", 17, "public.flights.secret is masked", ""),
        ("{carrier: carrier}", "{delay: carrier}", 17, "integer can't be compared with text", ""),
        ("{carrier: carrier}", "{fuel: carrier}", 17, "type double precision can't be", ""),
        ("{carrier: carrier}", "{price: carrier}", 17, "type numeric can't be", "of one scale"),
        ("{carrier: carrier}", "{word: carrier}", 17, "on.word: values of type citext can't be", "both sides have"),
        ("{faa: dest}", "{faa: gate}", 36, "text can't be compared with character(3)", ""),
        ("where: is_active", "where: delay", 15, "where: isn't a condition", ""),
        ("where: is_active", "where: random() < delay", 15, "where: RAND isn't supported", "accepted"),
        ("where: is_active", "where: dellay > 1", 15, "has no column dellay", "did you mean delay?"),
        ("table: public.planes\n", "table: public.planes\n        where: speed > 1\n", 20, "excludes speed", ""),
        ("{carrier: carrier}", "{delay + 1: carrier}", 17, "integers can't be compared with text", ""),
        ("{carrier: carrier}", "{price: carrier || name}", 17, "type numeric can't be", ""),
        ("-day", "-fuel", 31, "order_by.0: values of type double precision can't be ordered", ""),
        ("flight desc", "flight * delay desc", 31, "order_by.1: order_by takes columns, not expressions", "STORED"),
        ("flight desc", "-length(dest)", 31, "public.flights has no column length(dest)", "GENERATED"),
        ("flight desc", "fligt desc", 31, "order_by.1: public.flights has no column fligt", ""),
        ("MAX( delay )", "max(fuel)", 34, "late: max of a double precision can't", "sum and avg"),
        ("MAX( delay )", "sum(day)", 34, "late: sum of a date can't", "sum and avg"),
        ("MAX( delay )", "max(is_active)", 34, "late: max of a boolean can't", ""),
        ("MAX( delay )", "min(day)", 34, "late: min of a date can't", "timestamptz"),
        ("MAX( delay )", "sum(delay * flight)", 34, "late: sum takes columns, not expressions", "GENERATED"),
        ("MAX( delay )", "max(delay) - min(delay)", 34, "late: max takes columns, not", "STORED"),
        ("MAX( delay )", "max(delai)", 34, "has no column delai", ""),
        ("departures_count:", "departures:", 34, "airport_docs has another member departures", ""),
        ("departures_count:", "name:", 34, "airport_docs has another member name", "another name"),
        ("flatten: flight", "flatten: fligt", 33, "departures has no member fligt", "one of: id"),
        ("      airline:", "      flight:", 17, "flight_docs has another member flight", ""),
        ("      airline:", "      id:", 17, "flight_docs has another member id", ""),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "old_text", "new_text", "place", "message", "hint"),
    MISTAKES,
    ids=[message for *_, message, _ in MISTAKES],
)
def test_mistakes_are_named_with_their_line(
    tmp_path: Path,
    read: Callable[[Path, str], object],
    old_text: str,
    new_text: str,
    place: str,
    message: str,
    hint: str,
) -> None:
    assert old_text in GOOD
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, GOOD.replace(old_text, new_text, 1))
    assert f"airport.yaml:{place}" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_the_spare_database_of_a_sink_counts(tmp_path: Path) -> None:
    text = GOOD.replace("prefix: airport}\nstate", "prefix: airport, spare: 5}\nstate")
    load(tmp_path, text.replace("localhost/2", "localhost/1"))
    with pytest.raises(SettingsError, match="where cache has its views or makes the next ones"):
        load(tmp_path, text.replace("localhost/2", "localhost/4"))


def test_a_table_that_a_pattern_leaves_out_is_named(tmp_path: Path) -> None:
    tables = [table for table in TABLES if table.name != "airlines"]
    with pytest.raises(SettingsError, match=r":17: views\..*public.airlines isn't captured"):
        resolve(tmp_path, GOOD, tables)
