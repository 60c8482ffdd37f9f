"""What the index' sink says and does where no server is needed."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cdc.errors import SinkUnavailable
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Column, Table
from cdc.sink.lane import SUPERSEDED, Failure, FoldedRow, Part, PartitionOutcome, Verdicts
from cdc.sinks.elasticsearch import executor, scan
from cdc.sinks.elasticsearch.client import Server, join_names
from cdc.sinks.elasticsearch.connection import Answer
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter, describe, repair
from cdc.sinks.elasticsearch.positions import Record
from cdc.sinks.elasticsearch.scan import LONGEST_ID, document_id
from cdc.sinks.elasticsearch.sink import Elasticsearch

TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "t")
NOBODY = "http://elastic:secret@127.0.0.1:1"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Elasticsearch("search", NOBODY, "shop").position(TABLE),
        lambda: Server("search", NOBODY).client.indices.create(index="i"),
    ],
    ids=["the driver", "typed calls"],
)
def test_an_error_names_sink_and_address_and_no_login(ask: Callable[[], object]) -> None:
    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1:1") as caught:
        ask()
    assert "secret" not in f"{caught.value.message}{caught.value.hint}{caught.value.details}"
    assert caught.value.details["sink"] == "search"


def test_who_reads_a_position_imports_no_client() -> None:
    """It takes 0.7 s, as much as the rest of a verb's start, and 55 MB of an application."""
    code = (
        "from contextlib import suppress; import sys; from tests.unit import test_elasticsearch as unit\n"
        "with suppress(unit.SinkUnavailable): unit.Elasticsearch('search', unit.NOBODY, 'shop').position(unit.TABLE)\n"
        "sys.exit('elasticsearch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def part_of(*ids: str) -> Part:
    rows = {row_id: FoldedRow(row_id, 5, b"{}", (), []) for row_id in ids}
    advance = Advance(TABLE, None, Position("id", (9,)))
    return Part(advance, 0, 0, PartitionOutcome("t", 0), 6, rows)


def test_executors_name_no_login() -> None:
    with pytest.raises(Failure) as caught:
        ElasticsearchWriter(NOBODY, {"t": "i"}).write([part_of("1")])
    assert caught.value.kind == "unavailable"
    assert "secret" not in caught.value.message
    assert "127.0.0.1:1" in caught.value.message


@pytest.mark.parametrize("room_after", [2, 9])
def test_rows_for_which_there_is_no_room_are_sent_again(
    monkeypatch: pytest.MonkeyPatch, room_after: int
) -> None:
    """Those alone, and not for ever."""
    sent: list[list[str]] = []

    def send(_url: str, _method: str, _path: str, body: bytes, query: dict[str, str]) -> Answer:
        ids = re.findall('"_id":"(.)"', body.decode())
        refused = {"2"} if len(sent) < room_after else set()
        if query["filter_path"] == "errors":
            return answer({"errors": bool(refused.intersection(ids))})
        sent.append(ids)
        busy = {"status": 429, "error": {"type": "es_rejected_execution_exception"}}
        states = [busy if row_id in refused else {"status": 201} for row_id in ids]
        return answer({"items": [{"index": state} for state in states]})

    monkeypatch.setattr(executor, "send_request", send)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    writer = ElasticsearchWriter(NOBODY, {"t": "i"})
    part = part_of("1", "2")
    if room_after == 2:
        assert writer.write([part]) == [Verdicts()]
        assert sent == [["1", "2"], ["2"]]
        return
    with pytest.raises(Failure, match="no room for 1 writes") as caught:
        writer.write([part])
    assert caught.value.kind == "unavailable"
    assert len(sent) == 1 + len(executor.RETRY_S)


def test_an_answer_that_names_fewer_rows_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"index": {"status": 201}}]
    monkeypatch.setattr(executor, "send_request", lambda *_: answer({"items": items}))
    with pytest.raises(Failure, match="answered for 1 of 2 rows") as caught:
        ElasticsearchWriter(NOBODY, {"t": "i"}).write([part_of("1", "2")])
    assert caught.value.kind == "unavailable"


def test_a_document_that_is_newer_than_a_change_does_not_complete_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that ended early has left it. A null in it says nothing about the change before: that would
    go into quarantine.
    """
    docs = [
        {"_id": row_id, "_version": version, "found": True, "_source": {"id": row_id, "v": None}}
        for row_id, version in (("1", 6), ("2", 7), ("3", 8))
    ]
    monkeypatch.setattr(scan, "send_request", lambda *_: answer({"docs": docs}))
    rows = [FoldedRow(row_id, 7, b"{}", ("v",), []) for row_id in "123"]
    stored = ElasticsearchWriter(NOBODY, {"t": "i"}).read_stored(part_of("1"), rows)
    older = {"1": b'{"id": "1", "v": null}', "2": b'{"id": "2", "v": null}'}
    assert stored == {**older, "3": SUPERSEDED}


def answer(body: object) -> Answer:
    return Answer(None, json.dumps(body).encode())  # type: ignore[arg-type]


def test_an_id_that_the_server_does_not_take_is_hashed() -> None:
    """And no two rows have one document, whatever their ids look like."""
    for short_id in ("1", "é" * 256, "sha25"):
        assert document_id(short_id) == short_id
    empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert document_id("") == empty
    hashed = [document_id(row_id) for row_id in ("", "é" * 257, "é" * 258, empty, "sha256:")]
    assert len(set(hashed)) == len(hashed)
    assert all(len(key.encode()) <= LONGEST_ID and key.startswith("sha256:") for key in hashed)


def test_names_go_in_groups_that_fit_into_a_line() -> None:
    """The server takes 4096 bytes of it, and counts what is escaped three times."""
    names = [f"shop-public.{'Ü' * 20}_{number}@20260101t000000000000" for number in range(500)]
    groups = list(join_names(names))
    assert ",".join(groups).count(",") == len(names) - 1
    assert max(map(len, groups)) <= 3000
    assert list(join_names([])) == []
    assert list(join_names(["x" * 5000])) == ["x" * 5000]


def test_what_a_batch_has_shown_stays_visible() -> None:
    """Also to whoever goes on with a smaller one."""
    stored_record = Record(ViewCheckpoint(Position("id", (3, 3))), Position("id", (3, 3)))
    cut = stored_record.begins(Position("id", (9, 4)))
    assert (cut.stored, cut.visible) == (stored_record.stored, Position("id", (9, 4)))
    smaller = ViewCheckpoint(Position("id", (5, 7)))
    last = cut.begins(smaller.position).ends(smaller)
    assert (last.stored, last.visible) == (smaller, Position("id", (9, 7)))
    assert Record().begins(Position("id", (1,))) == Record(None, Position("id", (1,)))
    first = Position("id", (5, 5))
    assert Record().fresh
    # A try that was cut may have shown what the next one, with other chunks, would delete.
    assert not Record().begins(first).fresh
    assert not Record().begins(first).ends(ViewCheckpoint(first)).fresh
    assert last.begins(Position("another", (1, 1))).visible == Position("another", (1, 1))


def test_a_record_comes_back() -> None:
    record = Record(None, Position("id", (1, 2)), {"if_seq_no": 4, "if_primary_term": 1})
    ended = record.ends(ViewCheckpoint(Position("id", (1, 2)), "me", 7, 12.5, 3, "g"))
    for state in (record, ended):
        item = {"_source": json.loads(state.to_json()), "_seq_no": 4, "_primary_term": 1}
        assert Record.from_item(item, "g") == state


PARSING = "document_parsing_exception"
SOURCE = ' at [Source: (byte[])"{...field [secret]'
"""What the server's reasons quote of a row."""
TWICE = ", field second: it has a key twice in an object"
LONG = ", field b.c: it has a number of over 1,000 characters"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (f"[1:22] failed to parse: Duplicate field 'secret'\n{SOURCE}", TWICE),
        (f"[1:20] failed to parse: [1:25] Duplicate field 'field [first]'\n{SOURCE}", TWICE),
        ("[1:32] failed to parse: Number value length (1001) exceeds the maximum allowed", LONG),
        ("[1:2] failed to parse field [b.c] of type [long] in document with id 'secret'", ", field b.c"),
        ("[1:13] failed to parse: something else about secret", ", field second"),
        ("Duplicate", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_refusal_names_column_and_cause_alone(reason: str, words: str) -> None:
    """The place in a reason is one at or after the member's name: the 13th character, or the 32nd."""
    document = b'{"first":1, "second":"first:", "b.c" : {"second":[]}}'
    assert describe(document, {"type": PARSING, "reason": reason}) == PARSING + words


def test_only_what_is_refused_for_is_repaired() -> None:
    long = "1" * 1001
    document = f'{{"a":{{"n":1.10,"u":"\\u00e9","long":"{long}"}},"b":{long},"c":"x"}}'
    assert repair(document.encode()) == document.replace(f'"b":{long}', f'"b":"{long}"').encode()
    assert repair(document.replace(f'"b":{long}', f'"b":{long[1:]}').encode()) is None
    assert repair(b"[" * 5000) is None
    deep = "[" * 5000 + "]" * 5000
    assert repair(f'{{"a":{deep}}}'.encode()) is None
