"""Another `key`, `events` or `mask` in the pipeline file: what rows are changes without an event, so they
are sent again.
"""

import json
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from typing import Any

import psycopg
import pytest

from cdc.capture.configuration import placeholder
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.log_rows import RecordClassifier
from cdc.codec.record import RecordDecoder, Unreadable
from cdc.codec.table import codec
from cdc.control import registrations
from cdc.documents.tables import view_tables
from cdc.errors import SourceError
from cdc.kafka.topics import Topics
from cdc.model import mask
from cdc.model.mask import Mask
from cdc.model.table import Table
from cdc.postgres import table_survey
from cdc.postgres.row_query import row_query
from cdc.postgres.snapshot_request import resend
from cdc.verify.row_equality import comparable
from tests.support.envelopes import PLACEHOLDER
from tests.support.pipelines import NO_SOURCE, pipeline
from tests.support.shop import Shop, read_records
from tests.support.wait import wait_until

ALL_OF_ORDERS = {"table": "shop.orders", "partitions": 2}
ORDERS = {**ALL_OF_ORDERS, "exclude": ["hidden"]}
COUNTERS = {"table": "shop.counters", "partitions": 1}
FORMS = {"r": "redact", "h": {"hash": "shop-2026"}, "c": {"cut": 20}}
PEOPLE = ("ta text", "va varchar(20)", "vb varchar(100)", "ca char(30)")
PEOPLE_COLUMNS = [f"{form}{column}" for form in FORMS for column in PEOPLE]
MASKS = {column.split()[0]: FORMS[column[0]] for column in PEOPLE_COLUMNS}
SMILE = "\U0001f600"
# The edge of the cut is before, within and behind a character that counts as two.
TEXTS = (
    *(
        "abc",
        None,
        "",
        " ",
        "ends ",
        "äöü" * 30,
        "x" * 21,
        "back\\slash \\uD83D",
        SMILE,
        SMILE * 30,
    ),
    *(f"{'x' * length}{SMILE}{SMILE}y" for length in (16, 17, 18, 19, 20)),
    f"{'x' * 13}\\uD83D{SMILE}",
)
HASHED = sha256(b"shop-2026abc").hexdigest()
SINK_ENTRIES: list[tuple[dict[str, Any], int]] = [
    ({"exclude": [name for name in MASKS if name[0] == "c"]}, len(TEXTS)),
    ({"where": "rta = '********' AND rca = '********'"}, len(TEXTS)),
    ({"where": f"hta = '{HASHED}' AND hva = '{HASHED[:20]}'", "exclude": ["hta"]}, 1),
    ({"where": "cta LIKE 'xxx%' AND length(cta) = 20", "rename": {"cta": "cva", "cva": "cta"}}, 2),
    ({"where": "cca = 'ends'", "exclude": ["cta"], "rename": {"cca": "cta"}}, 1),
    ({"where": "cca > 'b' OR cta IS NULL", "columns": ["n"], "rename": {"n": "cca"}}, 13),
    ({"where": "upper(cta COLLATE \"C\") = cta OR hva || rva < '4'"}, 6),
]
"""A sink's entries, and how many rows of one each there are."""
SEATS = """
CREATE TABLE shop.seats (a int NOT NULL, b int NOT NULL, n int);
CREATE UNIQUE INDEX ON shop.seats (a);
CREATE UNIQUE INDEX ON shop.seats (b);
INSERT INTO shop.seats SELECT g, -g, 0 FROM generate_series(1, 5) g;
"""


def reads(shop: Shop, table: str) -> int:
    return sum(change.op == "r" for change in shop.log(table))


def test_another_key_voids_what_the_topic_holds(shop: Shop) -> None:
    shop.conn.execute(SEATS)
    first = shop.capturing({"table": "shop.seats", "key": ["a"], "partitions": 1})
    first.migrate()
    first.register()
    shop.conn.execute("DELETE FROM shop.seats WHERE a = 1")
    wait_until(lambda: shop.rows("shop.seats").get(1, ...) is None, 20, "the stream")
    second = shop.capturing({"table": "shop.seats", "key": ["b"], "partitions": 1})
    second.migrate()
    assert second.register().sent == ["shop.seats"]
    wait_until(lambda: reads(second, "shop.seats") == 9, 20, "the rows again")
    assert [change.key for change in second.living("shop.seats")] == [
        {"b": -n} for n in range(5, 1, -1)
    ]
    assert second.register().sent == []


def test_a_table_becomes_one_of_events_and_one_of_rows_again(shop: Shop) -> None:
    """What was sent before is dead: the deletes of rows, and then the events that were purged."""
    shop.migrate()
    shop.register()
    shop.conn.execute("DELETE FROM shop.counters WHERE id = 1")
    wait_until(lambda: shop.rows("shop.counters").get(1, ...) is None, 20, "the delete")
    events = shop.capturing(ORDERS, {**COUNTERS, "events": True})
    events.migrate()
    assert events.register().sent == ["shop.counters"]
    wait_until(lambda: reads(events, "shop.counters") == 19, 20, "the events")
    with pytest.raises(psycopg.Error, match=r"an event of shop\.counters can't be changed"):
        shop.conn.execute("UPDATE shop.counters SET n = 0 WHERE id = 2")
    shop.conn.execute("DELETE FROM shop.counters WHERE id = 2")
    wait_until(lambda: events.rows("shop.counters").get(2, ...) is None, 20, "the purge")
    assert ids(events) == list(range(2, 11))
    rows = shop.capturing(ORDERS, COUNTERS)
    rows.migrate()
    assert rows.register().sent == ["shop.counters"]
    wait_until(lambda: reads(rows, "shop.counters") == 27, 20, "the rows")
    assert ids(rows) == list(range(3, 11))
    shop.conn.execute("UPDATE shop.counters SET n = 0 WHERE id = 3")


def ids(shop: Shop) -> list[int]:
    """The rows of a table that its topic has, dead ones left out."""
    return sorted({change.key["id"] for change in shop.living("shop.counters") if change.op != "d"})


def test_a_column_that_is_captured_or_no_longer_is_changes_all_rows(shop: Shop) -> None:
    shop.migrate()
    shop.register()
    full_shop = shop.capturing(ALL_OF_ORDERS, COUNTERS)
    full_shop.migrate()
    assert full_shop.register().sent == ["shop.orders"]
    wait_until(
        lambda: {row["hidden"] for row in shop.rows("shop.orders").values()} == {"secret"},
        20,
        "the column",
    )
    less = shop.capturing({**ALL_OF_ORDERS, "exclude": ["hidden", "note"]}, COUNTERS)
    less.migrate()
    assert less.register().sent == ["shop.orders"]
    wait_until(
        lambda: {tuple(row) for row in shop.rows("shop.orders").values()} == {("id", "total")},
        20,
        "without it",
    )
    hashed = shop.capturing({**ORDERS, "mask": {"note": {"hash": "s"}}}, COUNTERS)
    assert hashed.register().sent == ["shop.orders"]
    wait_until(
        lambda: {len(row.get("note", "")) for row in shop.rows("shop.orders").values()} == {64},
        20,
        "the hashes",
    )
    assert less.register().sent == ["shop.orders"]
    wait_until(
        lambda: {tuple(row) for row in shop.rows("shop.orders").values()} == {("id", "total")},
        20,
        "without it again",
    )
    # Once more: nothing is new, and the other table never was.
    result = less.register()
    assert (result.changed, result.sent) == (False, [])
    assert reads(shop, "shop.counters") == 10
    with Topics(shop.kafka) as topics:
        registration = registrations.read(topics, shop.pipeline)
    # The log holds its values still, so that whoever reads it leaves them out.
    assert registration is not None
    assert set(registration.tables["shop.orders"].withdrawn) == {"hidden", "note"}


def documents(shop: Shop, table: Table) -> dict[str, str]:
    """The rows that a view would make of the records of a topic, as `cdc run` decodes them."""
    with Topics(shop.kafka) as topics:
        decoder = RecordDecoder([table], placeholder(shop.pipeline.pipeline, topics.cluster_id()))
    document = codec(table).document
    rows: dict[str, dict[str, Any]] = {}
    for record in read_records(shop.kafka, table.topic):
        change = decoder.select(table.topic, decoder.decode(table.topic, record.key, record.value))
        known = rows.pop(change.id, {})
        if change.row is not None:
            row = json.loads(document(change.row))
            rows[change.id] = {**row, **{name: known[name] for name in change.missing}}
    return {row_id: json.dumps(row, ensure_ascii=False) for row_id, row in rows.items()}


def differing(shop: Shop, table: Table) -> dict[str, str | None]:
    """The ids of rows that differ between Postgres and the topic, with the first column that does."""
    logged = documents(shop, table)
    expected: dict[str, str] = dict(shop.conn.execute(row_query(table)).fetchall())
    rules = comparable(table)
    assert logged.keys() == expected.keys()
    return {
        row_id: rules.first_difference(text, logged[row_id])
        for row_id, text in expected.items()
        if not rules.equals(text, logged[row_id])
    }


def unmasked(shop: Shop, table: Table) -> int:
    """Count the records in which an audit finds values that aren't masked as the table says."""
    classifier = RecordClassifier(table, DecodeOptions(PLACEHOLDER), ())
    records = read_records(shop.kafka, table.topic)
    return sum(classifier.classify(each.key, each.value, 0, 0).unmasked for each in records)


def in_cache(shop: Shop, captured: dict[str, Any], entry: dict[str, Any]) -> Table:
    """The table as a cache has it, by this entry of its list."""
    listed = [{"table": captured["table"], **entry}]
    cache = {"type": "redis", "url": "redis://127.0.0.1:1", "prefix": "x", "tables": listed}
    pipeline_of_cache = pipeline("x", NO_SOURCE, captured, sinks={"cache": cache})
    table = table_survey.for_sinks(shop.table(captured["table"]), pipeline_of_cache)
    assert table.misnamed == {}
    return table.for_sink("cache")


def test_masked_values_are_what_postgres_computes(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a first snapshot, in the stream and sent again; and what a mask makes of a placeholder."""
    shop.conn.execute(
        f"CREATE TABLE shop.people (id serial PRIMARY KEY, n int, {', '.join(PEOPLE_COLUMNS)})"
    )
    names = [column.split()[0] for column in PEOPLE_COLUMNS]
    lengths = {"ta": 200, "va": 20, "vb": 100, "ca": 30}

    def insert() -> None:
        for text in TEXTS:
            values = [text and text[: lengths[name[1:]]] for name in names]
            marks = ", ".join(["%s"] * len(values))
            statement = f"INSERT INTO shop.people ({', '.join(names)}) VALUES ({marks})"
            shop.conn.execute(statement.encode(), values)

    insert()
    masked = shop.capturing({"table": "shop.people", "partitions": 1, "mask": MASKS})
    masked.migrate()
    masked.register()
    insert()
    count = len(TEXTS)
    wait_until(lambda: len(masked.rows("shop.people")) == 2 * count, 20, "the stream")
    people_table = masked.table("shop.people")
    assert differing(masked, people_table) == {}
    assert unmasked(masked, people_table) == 0
    redacted = [
        replace(column, mask=column.mask and Mask(redact=True)) for column in people_table.columns
    ]
    # Of the row without texts nothing is hashed or cut.
    assert unmasked(masked, replace(people_table, columns=tuple(redacted))) == 2 * (count - 1)
    # A sink's condition judges them too, also of columns that the sink hasn't, or calls otherwise.
    for entry, rows in SINK_ENTRIES:
        view = in_cache(masked, {"table": "shop.people", "mask": MASKS}, entry)
        assert differing(masked, view) == {}, entry
        assert len(documents(masked, view)) == 2 * rows, entry
    clear = {text for text in TEXTS if text and len(text) > 20}
    topic = str([change.after for change in masked.log("shop.people")])
    assert not [text for text in clear if text in topic]
    assert "ends " in topic  # A cut leaves what is shorter.

    # Views of several rows are made of what the log has.
    watched = pipeline(
        masked.pipeline.pipeline,
        masked.pipeline.source.dsn,
        {"table": "shop.people", "mask": MASKS},
        state={"type": "redis", "url": "redis://127.0.0.1:1/2", "prefix": "x"},
        views={
            "people": {
                "root": "shop.people",
                "columns": ["cta", "cca"],
                "where": "rta = '********'",
                "include": {
                    "same": {
                        "table": "shop.people",
                        "on": {"hta": "hta"},
                        "many": True,
                        "columns": ["cvb"],
                    }
                },
                "to": ["topic"],
            },
            "notes": {
                "from": "shop.people",
                "group_by": ["cta"],
                "select": {"rows": "count(*)"},
                "to": ["topic"],
            },
        },
    )
    people, notes = view_tables(watched, [masked.table("shop.people")])
    logged = {
        row_id: json.loads(text)
        for row_id, text in documents(masked, masked.table("shop.people")).items()
    }
    made = {row_id: json.loads(text) for row_id, text in shop.conn.execute(row_query(people))}
    assert made == {
        row_id: {
            **{name: row[name] for name in ("id", "cta", "cca")},
            "same": [
                {"cvb": other["cvb"]}
                for other in logged.values()
                if row["hta"] is not None and other["hta"] == row["hta"]
            ],
        }
        for row_id, row in logged.items()
    }
    counts = {
        json.loads(text)["cta"]: json.loads(text)["rows"]
        for _, text in shop.conn.execute(row_query(notes))
    }
    assert counts == Counter(row["cta"] for row in logged.values() if row["cta"] is not None)

    # A declared length that grows makes the hashes longer, without a change of any row.
    shop.conn.execute("ALTER TABLE shop.people ALTER hva TYPE varchar(30)")
    assert set(differing(masked, masked.table("shop.people")).values()) == {"hva"}
    resend(
        shop.conn,
        masked.table("shop.people"),
        reader=masked.pipeline.replication_user,
        id="ddl-1-refresh",
    )
    wait_until(lambda: reads(masked, "shop.people") == 3 * count, 20, "the rows again")
    assert differing(masked, masked.table("shop.people")) == {}

    # Planted: a twin that doesn't cut as Java does, and one without the mask.
    with monkeypatch.context() as planted:
        planted.setattr(mask, "CUT", "left({0}, {1})")
        assert set(differing(masked, masked.table("shop.people")).values()) == {"cta", "cca"}
    with monkeypatch.context() as planted:
        planted.setattr(Mask, "sql", lambda _, __, name: name)
        assert len(differing(masked, masked.table("shop.people"))) == 2 * count


def test_a_mask_on_a_value_that_the_log_lacks(shop: Shop) -> None:
    """Without REPLICA IDENTITY FULL the connector masks its placeholder."""
    shop.conn.execute(
        "CREATE TABLE shop.notes (id int PRIMARY KEY, n int, h text, long text, r text, short text,"
        """ longer text, "long, {é}: %b" text)"""
    )
    for column in ("h", "long", "r", "short"):
        shop.conn.execute(f"ALTER TABLE shop.notes ALTER {column} SET STORAGE EXTERNAL".encode())
    masks = {
        "h": {"hash": "s"},
        "long": {"cut": 40},
        "r": "redact",
        "long, {é}: %b": {"cut": 2},
    }
    notes = {"table": "shop.notes", "partitions": 1}
    masked = shop.capturing({**notes, "mask": masks})
    masked.migrate()
    shop.conn.execute("ALTER TABLE shop.notes REPLICA IDENTITY DEFAULT")
    masked.register()
    large = "x" * 5000
    shop.conn.execute(
        "INSERT INTO shop.notes VALUES (1, 0, %s, %s, %s, '', 'whole', 'cut')", [large] * 3
    )
    shop.conn.execute("UPDATE shop.notes SET n = 1")
    wait_until(lambda: (masked.rows("shop.notes").get(1) or {}).get("n") == 1, 20, "the update")
    assert large[:40] not in str(masked.rows("shop.notes"))  # A placeholder, masked.
    assert differing(masked, masked.table("shop.notes")) == {}
    odd = {"exclude": ["h"], "where": "\"long, {é}: %b\" = 'cu' AND longer = 'whole'"}
    view = in_cache(masked, {**notes, "mask": masks}, odd)
    assert differing(masked, view) == {}
    assert len(documents(masked, view)) == 1

    # So short a piece of a placeholder might be a value.
    short = shop.capturing({**notes, "mask": {**masks, "short": {"cut": 20}}})
    assert short.register().sent == ["shop.notes"]
    shop.conn.execute("UPDATE shop.notes SET short = %s", [large])
    shop.conn.execute("UPDATE shop.notes SET n = 2")
    wait_until(lambda: (short.rows("shop.notes").get(1) or {}).get("n") == 2, 20, "the update")
    with pytest.raises(Unreadable, match="a mask leaves open"):
        documents(short, short.table("shop.notes"))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("doc", ["shop.odd.doc can't be masked", "its type is jsonb", "exclude: [doc]"]),
        ("day", ["its type is date"]),
        ("tags", ["its type is text[]"]),
        ("mail", ["its type is shop.email"]),
        ("id", ["part of the key", "take id out of mask"]),
        ("nots", ["no column nots", "correct mask of shop.odd"]),
    ],
)
def test_what_the_connector_would_not_mask_is_refused(
    shop: Shop, column: str, words: list[str]
) -> None:
    shop.conn.execute(
        "CREATE DOMAIN shop.email AS text; CREATE TABLE shop.odd"
        " (id text PRIMARY KEY, doc jsonb, day date, tags text[], mail shop.email)"
    )
    masked = shop.capturing({"table": "shop.odd", "mask": {column: "redact"}})
    with pytest.raises(SourceError) as caught:
        _ = masked.tables
    text = f"{caught.value.message} {caught.value.hint}"
    assert [part for part in words if part not in text] == []
