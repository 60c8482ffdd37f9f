"""The engine of documents behind a real broker, Spark and a state that is lost, or goes back.

What the state was given stays in the log, and what was sent to the topics of documents stays in them:
so documents never go back, and become right again.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from cdc.control.heartbeat import last_heartbeat
from cdc.documents.engine import DocumentEngine
from cdc.documents.resolve import resolve
from cdc.documents.tables import view_table
from cdc.documents.tasks import SLICE, Emission, Report, Write
from cdc.errors import ConnectorError, Fenced, SinkRejected
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import Outgoing, writing_records
from cdc.model.position import Position
from cdc.postgres import source
from cdc.sink.contract import PositionLost
from cdc.verify.barrier import WaitOptions, place_barrier
from tests.support.bad_records import produce
from tests.support.cache import CacheServer
from tests.support.document_history import Broker, History, repetitions
from tests.support.shop import read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

TABLES = """
CREATE TABLE lib.authors (id int PRIMARY KEY, version int);
CREATE TABLE lib.books (id int PRIMARY KEY, author_id int, version int);
"""
VIEWS = """
  author_docs:
    root: lib.authors
    include:
      books: {table: lib.books, on: {id: author_id}, many: true}
    to: [topic]
"""
CLOSING = """
  hours:
    from: lib.trips
    window: {tumbling: 1 hour, time: dep, lateness: 1 hour}
    clock: dep
    select: {trips: count(*)}
    to: [topic]
"""
Positions = Mapping[str, Position | None]


class Engine:
    """An engine, and the history whose documents it sends."""

    def __init__(self, spark: "SparkSession", history: History) -> None:
        self.history = history
        self.engine = DocumentEngine(
            spark, history.sink, history.pipeline, partial(resolve, history.pipeline)
        )
        self.begin()

    def begin(self) -> None:
        """Begin as a stream does when it loads its plan."""
        self.engine.tables(self.history.tables)
        self.history.prepare()
        self.engine.begin()

    def work(self, positions: Positions | None = None) -> None:
        """Work until nothing is left to do."""
        while self.engine.work(self.history.positions if positions is None else positions):
            assert self.engine.sent_per_s
        assert self.engine.sent_per_s is None

    @property
    def is_current(self) -> bool:
        return self.engine.is_current(self.history.positions)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    state_server = CacheServer(tmp_path / "state")
    yield state_server
    state_server.kill()


@pytest.fixture
def history(
    server: CacheServer, postgres_dsn: str, tmp_path: Path, stack: "Stack", unique: str
) -> Iterator[History]:
    broker = Broker(unique, stack.endpoints.kafka)
    with source.connect(postgres_dsn) as connection:
        connection.execute("CREATE SCHEMA lib")
        connection.execute(TABLES)
        history = History(connection, server.url, tmp_path, broker)
        history.declare(VIEWS)
        beat(history)
        yield history


def beat(history: History) -> None:
    """A heartbeat of the connector: its snapshot is complete."""
    row = {"pipeline": history.pipeline.pipeline}
    value = {"op": "u", "after": row, "source": {"ts_ms": 1, "lsn": 1}}
    records = [(b"{}", json.dumps(value).encode())]
    produce(history.pipeline.kafka, history.pipeline.heartbeat_topic, records)
    with Topics(history.pipeline.kafka) as topics:
        assert last_heartbeat(topics, history.pipeline)


def documents(history: History) -> list[tuple[int, dict[str, Any] | None]]:
    """All documents that were sent, in the order of each id's: id, document."""
    records = read(history.pipeline.kafka, history.pipeline.view_topic("author_docs"))
    return [
        (
            record.key["id"],
            record.after and {**record.after, "books": json.loads(record.after["books"])},
        )
        for record in records
    ]


def newest(history: History) -> dict[int, Any]:
    return {row_id: document for row_id, document in documents(history) if document}


def expected(history: History) -> dict[int, Any]:
    (view,) = history.views.values()
    rows = history.queried(view).values()
    return {row["id"]: row for row in map(json.loads, rows)}


def gone_back(history: History) -> list[str]:
    """Documents that hold an older version of a row than one before them, in whichever document."""
    counts: dict[tuple[int, str], int] = {}
    wrong = []
    for row_id, document in documents(history):
        for book in [*document["books"], {"id": "", **document}] if document else []:
            key = row_id, str(book["id"] if "author_id" in book else "")
            if book["version"] < counts.get(key, 0):
                wrong.append(f"document {row_id}: {book} after version {counts[key]}")
            counts[key] = max(counts.get(key, 0), book["version"])
    return wrong


def fill(history: History) -> None:
    history.do(
        "INSERT INTO lib.authors SELECT n, 1 FROM generate_series(1, 3) n",
        "INSERT INTO lib.books SELECT n, 1, 1 FROM generate_series(1, 4) n",
    )


def begin(history: History, spark: "SparkSession") -> Engine:
    """Start an engine, which has sent the first documents."""
    engine = Engine(spark, history)
    fill(history)
    history.apply()
    engine.work()
    return engine


def bump(history: History, author: int) -> None:
    """Move books to an author; all rows get another version."""
    history.do(
        f"UPDATE lib.books SET version = version + 1, author_id = {author}",
        "UPDATE lib.authors SET version = version + 1",
    )


def lose_a_while(history: History, server: CacheServer, engine: Engine) -> None:
    """Documents of A, then of B; then the state is back at A, and the log goes on to C."""
    fill(history)
    history.apply()
    engine.work()
    server.save()
    bump(history, 2)
    history.apply()
    engine.work()
    assert newest(history) == expected(history)
    server.go_back()
    bump(history, 3)


def test_documents_do_not_go_back_with_the_state(
    history: History, server: CacheServer, spark: "SparkSession"
) -> None:
    lose_a_while(history, server, Engine(spark, history))
    document_count = len(documents(history))
    engine = Engine(spark, history)
    engine.work()
    # The state lacks what documents were made of: none is sent, however long that takes.
    history.apply("authors")
    engine.work()
    assert len(documents(history)) == document_count
    assert not engine.is_current
    history.apply()
    engine.work()
    assert gone_back(history) == []
    assert newest(history) == expected(history)
    assert engine.is_current


def test_closed_windows_stay_as_they_are_without_their_state(
    history: History, server: CacheServer, spark: "SparkSession"
) -> None:
    """Also where the row that had the latest time has gone with it: the clock begins where the topic's windows
    closed.
    """
    history.connection.execute("CREATE TABLE lib.trips (id int PRIMARY KEY, dep timestamptz)")
    history.declare(CLOSING)
    server.save()
    engine = Engine(spark, history)
    history.do(trip(1, "10:00"), trip(2, "12:30"))
    history.apply()
    closed = {"10:00": (1, True), "12:00": (1, False)}
    work_until(engine, lambda: trips(history) == closed)
    history.do(trip(3, "10:30"))
    history.apply()
    history.do("DELETE FROM lib.trips WHERE id = 2")
    history.apply()
    work_until(engine, lambda: len(trips(history)) == 1)
    server.go_back()
    engine = Engine(spark, history)
    history.apply()
    state = history.state
    work_until(engine, lambda: bool(state.clocks()))
    work_until(engine, lambda: state.noted_clocks() == state.clocks())
    assert (trips(history), state.late("hours")) == ({"10:00": (1, True)}, [])
    history.do(trip(4, "10:40"))
    history.apply()
    engine.work()
    assert trips(history) == {"10:00": (1, True)}
    assert [change.id for change in state.late("hours")] == ["4"]
    assert (state.noted_clocks(), history.index_keys()) == (state.clocks(), [])


def work_until(engine: Engine, is_done: Callable[[], bool]) -> None:
    """Work until something is there: a time counts only after another look at it."""

    def works() -> bool:
        engine.work()
        return is_done()

    wait_until(works, 60, "the engine to be done")


def trip(row_id: int, dep: str) -> str:
    return f"INSERT INTO lib.trips VALUES ({row_id}, '1969-12-31 {dep}Z')"


def trips(history: History) -> dict[str, tuple[int, bool]]:
    """How many trips each window has, and whether it is final, by its beginning."""
    records = read(history.pipeline.kafka, history.pipeline.view_topic("hours"))
    documents = {record.key["window_start"]: record.after for record in records}
    return {
        begin[11:16]: (document["trips"], document["final"])
        for begin, document in documents.items()
        if document is not None
    }


def test_without_the_hold_documents_would_go_back(
    history: History, server: CacheServer, spark: "SparkSession"
) -> None:
    """The test above is red when the state is taken for complete."""
    lose_a_while(history, server, Engine(spark, history))
    with Topics(history.pipeline.kafka) as topics:
        ends = topics.ends([table.topic for table in history.plan.tables])
    engine = Engine(spark, history)
    with suppress(PositionLost):
        engine.work(ends)
    assert gone_back(history) != []


@pytest.mark.parametrize("recovers", [True, False])
def test_a_move_that_the_state_lost_is_looked_for_in_the_topic(
    history: History,
    server: CacheServer,
    spark: "SparkSession",
    monkeypatch: pytest.MonkeyPatch,
    recovers: bool,
) -> None:
    """Books of A were sent at B; the state, back at A, meets them at C, and never hears of B. A twin
    that doesn't look leaves them there.
    """
    engine = begin(history, spark)
    server.save()
    history.do("UPDATE lib.books SET author_id = 2")
    history.apply()
    engine.work()
    server.go_back()
    history.do("UPDATE lib.books SET author_id = 3")
    if not recovers:
        monkeypatch.setattr("cdc.documents.engine.read_on_executors", lambda *_: [])
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    stale = [row_id for row_id, row in newest(history).items() if row != expected(history)[row_id]]
    assert stale == ([] if recovers else [2])


@pytest.mark.parametrize("begun", ["before it is reported", "after it is reported"])
def test_a_state_that_goes_back_under_a_running_engine_is_noticed(
    history: History, server: CacheServer, spark: "SparkSession", begun: str
) -> None:
    engine = Engine(spark, history)
    fill(history)
    history.apply()
    if begun == "after it is reported":
        engine.work()
    # Something is dirty when it is saved.
    bump(history, 1)
    history.apply()
    server.save()
    engine.work()
    bump(history, 2)
    history.apply()
    engine.work()
    positions = history.positions
    assert newest(history) == expected(history)
    server.go_back()
    # Nobody has told the engine; the server answers again, with an older state.
    with pytest.raises(PositionLost):
        engine.work(positions)
    assert gone_back(history) == []
    engine.begin()
    engine.work()
    history.apply()
    engine.work()
    assert gone_back(history) == []
    assert newest(history) == expected(history)


def test_what_was_not_sent_is_not_noted_as_sent(
    history: History, server: CacheServer, spark: "SparkSession"
) -> None:
    """The state loses a batch before any document of it is sent: nobody may take it for sent."""
    engine = begin(history, spark)
    server.save()
    bump(history, 2)
    history.apply()
    positions = history.positions
    server.go_back()
    with suppress(PositionLost):
        engine.work(positions)
    noted = history.sink.open_state().current()
    topic = history.table("books").topic
    assert noted["author_docs"][topic].position != positions[topic]
    engine.begin()
    engine.work()
    history.apply()
    engine.work()
    assert newest(history) == expected(history)


@pytest.mark.parametrize("emptied", ["state", "topic", "both"])
def test_an_empty_state_or_topic_is_filled_again(
    history: History, server: CacheServer, spark: "SparkSession", emptied: str
) -> None:
    engine = begin(history, spark)
    history.do("DELETE FROM lib.authors WHERE id = 3")
    if emptied != "topic":
        with redis.Redis.from_url(server.url) as client:
            client.flushdb()
    if emptied != "state":
        topic = history.pipeline.view_topic("author_docs")
        with kafka.KafkaAdminClient(bootstrap_servers=history.pipeline.kafka) as admin:
            admin.delete_topics([topic])
            wait_until(lambda: topic not in admin.list_topics(), 20, "the topic to go")
        history.declare(VIEWS)
    engine = Engine(spark, history)
    engine.work()
    history.apply()
    engine.work()
    last = dict(documents(history))
    assert {row_id: row for row_id, row in last.items() if row} == expected(history)
    assert gone_back(history) == []


def test_topics_with_different_backlogs_make_no_document_with_a_late_row(
    history: History, spark: "SparkSession"
) -> None:
    fill(history)
    engine = Engine(spark, history)
    for part in (("authors", 0), ("authors", 1), ("books", 1)):
        history.apply(part)
        engine.work()
        assert documents(history) == []
    history.apply()
    engine.work()
    assert sorted(row_id for row_id, _ in documents(history)) == [1, 2, 3]
    assert newest(history) == expected(history)


BOOK_DOCS = """
  book_docs:
    root: lib.books
    include: {author: {table: lib.authors, on: {author_id: id}}}
    to: [topic]
"""


class SlowEmission(Emission):
    """Needs 0.4 s for a transaction, so a round of it ends after three."""

    def send(self, report: Report, write: Write) -> None:
        def slowly(records: Sequence[Outgoing]) -> None:
            write(records)
            time.sleep(0.4)

        super().send(report, slowly)


def test_a_view_is_current_amid_the_fan_out_of_another(
    history: History, server: CacheServer, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays right when the state loses what came after that."""
    history.declare(BOOK_DOCS + "  author_docs: {root: lib.authors, to: [topic]}\n")
    history.do(
        "INSERT INTO lib.authors VALUES (1, 1)",
        f"INSERT INTO lib.books SELECT n, 1, 1 FROM generate_series(1, {6 * SLICE}) n",
    )
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    assert engine.is_current
    monkeypatch.setattr("cdc.documents.engine.Emission", SlowEmission)
    history.do("UPDATE lib.authors SET version = version + 1")
    history.apply()
    assert engine.engine.work(history.positions)
    assert noted_topics(history) == {("book_docs", "books"), ("author_docs", "authors")}
    assert not engine.is_current
    server.save()
    history.do("INSERT INTO lib.authors VALUES (2, 1)")
    history.apply()
    assert engine.engine.work(history.positions)
    assert noted_topics(history) == {("book_docs", "books"), ("author_docs", "authors")}
    server.go_back()
    # The state never hears of this author: its document is looked for in the topic.
    history.do("DELETE FROM lib.authors WHERE id = 2")
    engine.begin()
    engine.work()
    history.apply()
    engine.work()
    assert engine.is_current
    assert len(noted_topics(history)) == 3
    assert_authors_are_newest(history)
    authors = read(history.pipeline.kafka, history.pipeline.view_topic("author_docs"))
    last = {author.key["id"]: author.after for author in authors}
    assert last == {1: {"id": 1, "version": 2}, 2: None}


def noted_topics(history: History) -> set[tuple[str, str]]:
    """The views and tables where documents are noted to be as new as the state."""
    notes = history.sink.open_state().current()
    positions = history.positions
    return {
        (view, table.name)
        for view, note in notes.items()
        for table in history.plan.tables
        if table.topic in note and note[table.topic].position == positions[table.topic]
    }


@dataclass(frozen=True, kw_only=True)
class HaltingEmission(Emission):
    """Halts once, in the second slice of a fan-out: after a third of it.

    when    "before" or "after" the slice is written; in both cases before it is forgotten
    folder  gets the file `slices`, a byte for each that was begun, for on a busy machine a slice is a
            round, and a task for itself; and `halted`, with this process' id; goes on when that file
            is gone
    """

    when: str
    folder: Path

    def send(self, report: Report, write: Write) -> None:
        def halting(records: Sequence[Outgoing]) -> None:
            with (self.folder / "slices").open("ab") as slices:
                slices.write(b".")
                is_second = slices.tell() == 2
            if is_second and self.when == "before":
                self._halt()
            write(records)
            if is_second and self.when == "after":
                self._halt()

        super().send(report, halting)

    def _halt(self) -> None:
        halted = self.folder / "halted"
        halted.with_suffix(".new").write_text(str(os.getpid()))
        halted.with_suffix(".new").rename(halted)
        wait_until(lambda: not halted.exists(), 60, "the end of the halt")


@dataclass
class Halt:
    """An engine that is amid a fan-out, and its state's server."""

    history: History
    engine: Engine
    server: CacheServer
    spark: "SparkSession"
    folder: Path
    working: "Future[None]"

    def end(self) -> None:
        (self.folder / "halted").unlink()

    def kill_worker(self) -> Engine:
        """Spark's Python worker is killed, and its engine begins again."""
        os.kill(int((self.folder / "halted").read_text()), signal.SIGKILL)
        with pytest.raises(Exception, match="Python worker"):
            self.working.result(300)
        self.end()
        self.engine.begin()
        return self.engine

    def take_over(self) -> Engine:
        """Another engine begins, and sends all; then the first one wakes up and goes on."""
        other = Engine(self.spark, self.history)
        other.work()
        self.end()
        with pytest.raises(Fenced):
            self.working.result(300)
        return other

    def kill_state(self) -> Engine:
        """The state's server is killed, and what it had written since it was saved last is lost."""
        self.server.go_back()
        self.end()
        with pytest.raises(PositionLost):
            self.working.result(300)
        self.engine.begin()
        self.engine.work()
        self.history.apply()
        return self.engine


@pytest.mark.parametrize("kill", [Halt.kill_worker, Halt.take_over, Halt.kill_state])
def test_a_fan_out_goes_on_after_a_kill_on_its_way(
    history: History,
    server: CacheServer,
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[[Halt], Engine],
) -> None:
    """The view is one of alerts: a reader of committed records finds each change once. The broker is
    killed in test_document_failures.
    """
    history.declare(f"{BOOK_DOCS.rstrip()}\n    alerts: true\n")
    history.do(
        "INSERT INTO lib.authors VALUES (1, 1)",
        f"INSERT INTO lib.books SELECT n, 1, 1 FROM generate_series(1, {3 * SLICE}) n",
    )
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    assert engine.is_current
    for when in ("before", "after"):
        server.save()
        history.do("UPDATE lib.authors SET version = version + 1")
        history.apply()
        folder = tmp_path / when
        folder.mkdir()
        emission = partial(HaltingEmission, when=when, folder=folder)
        monkeypatch.setattr("cdc.documents.engine.Emission", emission)
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(engine.work)
            wait_until((folder / "halted").exists, 60, "a third of the fan-out to be sent")
            engine = kill(Halt(history, engine, server, spark, folder, working))
        engine.work()
        assert engine.is_current
        assert_authors_are_newest(history)
    records = read(history.pipeline.kafka, history.pipeline.view_topic("book_docs"))
    changes = [(record.key["id"], record.op, record.after) for record in records]
    assert len(changes) >= 6 * SLICE
    assert repetitions(changes) == []


def assert_authors_are_newest(history: History) -> None:
    """Each document of a book has the author as Postgres has it now, after no newer one."""
    versions: dict[int, int] = {}
    for record in read(history.pipeline.kafka, history.pipeline.view_topic("book_docs")):
        assert record.after
        version = json.loads(record.after["author"])["version"]
        assert versions.get(record.key["id"], 0) <= version
        versions[record.key["id"]] = version
    rows = map(json.loads, history.queried(history.views["book_docs"]).values())
    assert versions == {row["id"]: row["author"]["version"] for row in rows}


class ShortRecords(Emission):
    """As if a request held a document with one book, and none with four."""

    def send(self, report: Report, write: Write) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cdc.kafka.clients.LARGEST_BYTES", 330)
            super().send(report, write)


def test_a_document_that_no_record_can_hold_is_named(
    history: History, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't taken for a broker that is away, and a shorter list is a document that can be sent."""
    monkeypatch.setattr("cdc.documents.engine.Emission", ShortRecords)
    fill(history)
    engine = Engine(spark, history)
    history.apply()
    with pytest.raises(SinkRejected, match=r'document \{"id": ?1\} of author_docs') as caught:
        engine.work()
    assert "`limit`" in caught.value.hint
    history.declare(VIEWS.replace("many: true", "many: true, limit: 1"))
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    assert engine.is_current
    assert newest(history) == expected(history)


def test_documents_that_are_sent_once_more_are_noted(
    history: History, spark: "SparkSession"
) -> None:
    """As `verify --repair` has them sent, while no table changes."""
    engine = begin(history, spark)
    topic = history.pipeline.view_topic("author_docs")
    with Topics(history.pipeline.kafka) as topics:
        before = topics.log_ends([topic])[topic]
        history.sink.open_state().mark("author_docs", {"1": b'{"id":1}'}, send_again=True)
        engine.work()
        end = topics.log_ends([topic])[topic]
    assert end != before, "nothing was sent"
    note = history.sink.open_state().current()["author_docs"][topic]
    assert note is not None
    assert note.position == end
    assert engine.is_current
    assert newest(history) == expected(history)


def test_a_note_covers_documents_that_readers_are_not_shown_yet(
    history: History, spark: "SparkSession"
) -> None:
    """A commit returns before its markers are in the topic; here a transaction before it is open."""
    engine = begin(history, spark)
    topic = history.pipeline.view_topic("author_docs")
    records = [(b'{"id":%d}' % row_id, None) for row_id in range(100, 150)]
    with writing_records(history.pipeline.kafka, "other", topic, records, 60):
        bump(history, 2)
        history.apply()
        engine.work()
    note = history.sink.open_state().current()["author_docs"][topic].position.offsets
    with Topics(history.pipeline.kafka) as topics:
        later = topics.next_records({(topic, *place) for place in enumerate(note)})
    assert set(later.values()) == {None}
    assert newest(history) == expected(history)


def test_documents_of_what_is_not_committed_in_kafka_are_waited_for(
    history: History, spark: "SparkSession"
) -> None:
    """The heartbeat that places a barrier may hold changes whose markers reach their topics later."""
    begin(history, spark)
    view = view_table(history.pipeline, history.views["author_docs"])
    books, records = history.table("books").topic, [(b'{"id":9}', None)]
    with Topics(history.pipeline.kafka) as topics:
        place = partial(place_barrier, history.pipeline, topics, [view], 0, WaitOptions(1))
        place()
        behind = pytest.raises(ConnectorError, match=f"documents are behind in {books}")
        with writing_records(history.pipeline.kafka, "connector", books, records, 60), behind:
            place()


def test_a_view_that_comes_back_has_no_document_of_a_row_that_went(
    history: History, spark: "SparkSession"
) -> None:
    """Nobody marks documents of a view that is away: neither those of rows that are deleted, nor
    those that a row has left whose entries had other numbers.
    """
    book_docs = """
  book_docs:
    root: lib.books
    include: {author: {table: lib.authors, on: {author_id: id}}}
    to: [topic]
"""
    same_version = """
  same_docs:
    root: lib.books
    include: {books: {table: lib.books, on: {version: version}, many: true}}
    to: [topic]
"""
    history.declare(same_version + VIEWS)
    fill(history)
    history.do("UPDATE lib.books SET version = 9")
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    # One view less, with the first index of books; meanwhile a book moves and an author goes.
    history.do(
        "UPDATE lib.books SET author_id = 3 WHERE id = 1", "DELETE FROM lib.authors WHERE id = 2"
    )
    history.compact()
    history.declare(VIEWS, prepare=False)
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    last = dict(documents(history))
    assert {row_id: row for row_id, row in last.items() if row} == expected(history)
    # And back, while the author that went is forgotten by the log.
    history.declare(book_docs, prepare=False)
    engine = Engine(spark, history)
    history.do("DELETE FROM lib.authors WHERE id = 3")
    history.apply()
    engine.work()
    history.declare(VIEWS, prepare=False)
    engine = Engine(spark, history)
    history.apply()
    engine.work()
    last = dict(documents(history))
    assert {row_id: row for row_id, row in last.items() if row} == expected(history)
