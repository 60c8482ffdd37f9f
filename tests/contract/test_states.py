"""The state of documents keeps the laws; one that breaks a law is caught by it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from cdc.documents import scripts, state
from cdc.documents.state import State, state_key
from cdc.errors import SinkRejected
from cdc.model.table import Table
from cdc.observe import forecast
from cdc.observe.status import DocumentsStatus
from cdc.sink.contract import PositionLost
from cdc.sinks.redis.documents import executor, sink
from cdc.sinks.redis.documents.sink import DocumentState
from tests.contract import state_laws as laws
from tests.support.cache import cluster

Law = Callable[[laws.Harness], None]
MakeHarness = Callable[[], laws.Harness]
RED = (AssertionError, pytest.fail.Exception)


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("state")
    with cluster(folder) as url:
        yield url


@pytest.fixture
def make_harness(cluster_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHarness]:
    """On a node of a cluster, which takes no command whose keys lie in several slots. It doesn't see
    all keys that a script reaches: so those that are left are looked at, too.
    """
    with redis.Redis.from_url(cluster_url) as server:
        server.flushdb()

        def make(sink_type: type[DocumentState] = DocumentState) -> laws.Harness:
            harness = laws.Harness(lambda: sink_type(cluster_url, "lib"))
            monkeypatch.setattr("cdc.sinks.redis.positions.run_on_executors", harness.run)
            return harness

        yield make
        assert len({key_slot(key) for key in server.scan_iter()}) <= 1


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law: Law, make_harness: MakeHarness) -> None:
    law(make_harness())


SCRIPTS: dict[str, tuple[object, str, str, str, Law]] = {
    "what stays the same is written": (
        executor,
        "APPLY",
        "if old == (new or false) then return end",
        "",
        laws.a_row_that_stays_the_same_makes_nothing_dirty,
    ),
    "pending with new entries": (
        executor,
        "APPLY",
        "pending[#pending + 1] = before",
        "pending[#pending + 1] = entries",
        laws.changed_rows_are_dirty_and_pending,
    ),
    "old entries stay": (executor, "APPLY", "enter(entry, id, -1)", "", laws.entries_are_those_of_the_rows),
    "old bytes counted": (
        executor,
        "APPLY",
        "bytes = bytes - #old",
        "",
        laws.sizes_are_those_of_the_rows,
    ),
    "any writer": (
        executor,
        "APPLY",
        "if not held or offset(ARGV[first]) ~= ARGV[first + 1] then return moved(ARGV[first]) end",
        "",
        laws.a_stopped_writer_changes_nothing,
    ),
    "rows stay": (
        executor,
        "APPLY",
        "for i = rows, #ARGV, 4 do change(i); n = n + 1 end",
        "",
        laws.rows_and_position_move_in_one_step,
    ),
    "position stays": (
        executor,
        "APPLY",
        "redis.call('HSET', KEYS[1], ARGV[first], ARGV[first + 2])",
        "",
        laws.rows_and_position_move_in_one_step,
    ),
    "unsent for ever": (
        scripts,
        "SENT",
        "redis.call('SREM', KEYS[4], KEYS[2])",
        "",
        laws.all_is_unsent_until_a_mark_is_forgotten,
    ),
    "key of a deleted row lost": (
        executor,
        "APPLY",
        "redis.call('HSET', ARGV[roots + 1 + 2 * v], id, key)",
        "",
        laws.a_deleted_root_leaves_its_key,
    ),
    "newer marks forgotten": (
        scripts,
        "SENT",
        "tonumber(marks[i]) == tonumber(ARGV[count + 3 + i])",
        "true",
        laws.a_newer_mark_stays,
    ),
    "digests of what was sent lost": (
        scripts,
        "SENT",
        "note_digests(KEYS[6], 3 * count + 4)",
        "",
        laws.what_a_topic_has_is_known_by_digest,
    ),
    "final documents sent again": (
        scripts,
        "MARK",
        " and redis.call('HGET', KEYS[4], ARGV[i]) ~= 'final'",
        "",
        laws.what_is_closed_is_known,
    ),
    "closed windows of another topic": (
        scripts,
        "FORGET_DIGESTS",
        "redis.call('HDEL', KEYS[3], ARGV[3])",
        "",
        laws.what_is_closed_is_known,
    ),
    "transaction begun twice": (
        scripts,
        "BEGIN_SENDING",
        "if tonumber(redis.call('HGET', KEYS[1], 'sending') or 0) ~= tonumber(ARGV[3]) then return 'unsettled' end",
        "",
        laws.a_transaction_is_begun_once,
    ),
    "turn not asked for": (scripts, "DURING_TURN", scripts.DURING_TURN, "", laws.another_turn_forgets_no_mark),
    "climbed twice": (
        scripts,
        "CLIMBED",
        "if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end",
        "redis.call('HDEL', KEYS[1], ARGV[1])",
        laws.a_chunk_is_climbed_from_once,
    ),
    "cleared without a mark": (
        sink, "FORGET", "return finish(ARGV[2]) or 1", "return 1", laws.a_cleared_table_is_undone
    ),
}  # fmt: skip
"""Lines of the scripts, with what stands there instead."""


@pytest.mark.parametrize("bug", SCRIPTS)
def test_a_broken_script_is_caught(
    bug: str, make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, line, instead, law = SCRIPTS[bug]
    assert line in getattr(module, name)
    monkeypatch.setattr(module, name, getattr(module, name).replace(line, instead))
    with pytest.raises((*RED, PositionLost)):
        law(make_harness())


def test_keys_without_a_tag_are_caught(
    make_harness: MakeHarness, cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "shard_prefix", lambda prefix: f"{prefix}:0")
    with pytest.raises(SinkRejected, match="is a node of a cluster"):
        laws.changed_rows_are_dirty_and_pending(make_harness())
    with redis.Redis.from_url(cluster_url) as server:
        server.flushdb()


class StaysCurrent(DocumentState):
    """Keeps what is noted as current when a table is cleared."""

    def clear(self, table: Table) -> None:
        key = state_key(self.prefix, "documents")
        with redis.Redis.from_url(self.url) as server:
            notes: Any = server.hgetall(key)
            super().clear(table)
            server.hset(key, mapping=notes)


class VouchesForFormerRows(DocumentState):
    """Notes what is needed of a table beside rows that were stored for something else."""

    def prepare(self, table: Table) -> None:
        super().prepare(table)
        key = state_key(self.prefix, "needs")
        name = table.qualified
        with redis.Redis.from_url(self.url) as server:
            server.hset(key, name, self.needs[name])


@pytest.mark.parametrize(
    ("sink_type", "law"),
    [
        (StaysCurrent, laws.a_cleared_table_is_undone),
        (VouchesForFormerRows, laws.only_rows_that_were_undone_count_for_another_need),
    ],
)
def test_a_broken_sink_is_caught(
    sink_type: type[DocumentState], law: Law, make_harness: Callable[..., laws.Harness]
) -> None:
    with pytest.raises(RED):
        law(make_harness(sink_type))


DIRTY = State.dirty
SCAN_MEMBERS = State.scan_members


def none_is_stale(fields: Iterable[str], _: Collection[str]) -> list[str]:
    return []


def all_are_stale(fields: Iterable[str], current: Collection[str]) -> list[str]:
    """Takes all views for changed when the table of one is."""
    noted = list(fields)
    return [field for field in noted if " " in field] if STALE_FIELDS(noted, current) else []


STALE_FIELDS = state.stale_fields


def longest_dirty_only(self: State, view: str, limit: int) -> dict[str, str]:
    return dict(list(DIRTY(self, view, 99).items())[:limit])


def first_page(self: State, *arguments: Any) -> list[Collection[str]]:
    return list(SCAN_MEMBERS(self, *arguments))[:1]


@pytest.mark.parametrize(
    ("place", "bug", "law"),
    [
        ("stale_fields", none_is_stale, laws.another_need_starts_a_table_over),
        ("stale_fields", none_is_stale, laws.a_view_that_is_no_more_leaves_nothing),
        ("stale_fields", all_are_stale, laws.another_need_starts_a_table_over),
        ("State.dirty", longest_dirty_only, laws.no_more_marks_are_read_than_asked_for),
        ("State.scan_members", first_page, laws.all_pages_are_read),
    ],
)
def test_a_broken_state_is_caught(
    place: str, bug: object, law: Law, make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"cdc.documents.state.{place}", bug)
    with pytest.raises(RED):
        law(make_harness())


def test_the_memory_that_a_state_takes_is_foretold(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the rows tell what the other half takes, with keys and indexes; these rows are short,
    so that it is several times their bytes.
    """
    monkeypatch.setattr(forecast, "LEAST_ROWS", FORETOLD)
    harness = make_harness()
    write_books(harness, range(FORETOLD))
    harness.apply()
    books, half = "lib.books", sizes(harness)
    applied = sum(half.pop("applied")[books].position.offsets)
    documents = DocumentsStatus(**half, applied={books: applied}, waiting={books: FORETOLD})
    foretold = forecast.needed_memory_bytes(documents)
    write_books(harness, range(FORETOLD, 2 * FORETOLD))
    harness.apply()
    after, former = sizes(harness), documents.used_bytes
    assert foretold
    assert former
    growth = (foretold - former) / (after["used_bytes"] - former)
    assert 0.7 < growth < 1.4, (growth, former / documents.bytes[books])


FORETOLD = 10_000


def write_books(harness: laws.Harness, numbers: range) -> None:
    for number in numbers:
        harness.write(
            laws.BOOKS, id=number, author_id=number // 10, title=f"book {number}", year=number
        )


def sizes(harness: laws.Harness) -> dict[str, Any]:
    tables = [table.qualified for table in laws.PLAN.tables]
    return harness.state.sizes(tables, [view.name for view in laws.PLAN.views])._asdict()
