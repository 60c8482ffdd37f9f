"""Documents from the state, against a model: random transactions, cuts, chunks and crashes at every
step; then each document is what the tables say, and nothing is left over.
"""

import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis

from cdc.codec.decode_options import DecodeOptions
from cdc.config.view_settings import Order
from cdc.documents import tasks
from cdc.documents.plan import NO_JOIN, Aggregate, Join, Node, StatePlan, View
from cdc.documents.rows import Entries
from cdc.documents.scalar.operators import Term
from cdc.documents.scalar.type_groups import OTHER
from cdc.documents.state import Chunk, State, Turn, shard_prefix
from cdc.documents.tasks import SLICE, Emission, Report
from cdc.errors import SinkRejected
from cdc.kafka.transactions import Outgoing
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.lane import ChunkLimits, Failure, Lane, Part, Verdicts
from cdc.sink.lane_task import LaneRun
from cdc.sink.rejection import Stop
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.documents.executor import StateWriter
from cdc.sinks.redis.documents.sink import DocumentState
from cdc.sinks.redis.positions import Positions
from tests.support.budget import SCALE
from tests.support.cache import cache
from tests.support.proxy import Road
from tests.support.wait import wait_until

RUNS, CHANGES = 12 + 21 * (SCALE - 1), 250
"""`make properties`, at a scale of 20, looks at more than 100,000 changes."""
NAME, PARTITIONS = "library", 2
PREFIX = shard_prefix(NAME)
Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]


def table(name: str, key: tuple[str, ...], /, **types: str) -> Table:
    columns = tuple(Column(column, type_) for column, type_ in types.items())
    return Table("public", name, columns, key, f"library.public.{name}")


AUTHORS = table("authors", ("id",), id="integer", name="text", agent_id="integer")
BOOKS = table("books", ("id",), id="bigint", author_id="integer", title="text", year="integer")
BOOK_TAGS = table("book_tags", ("book_id", "tag_id"), book_id="bigint", tag_id="integer")
TAGS = table("tags", ("id",), id="integer", name="text", parent_id="integer")
REVIEWS = table(
    "reviews",
    ("id",),
    id="integer",
    book_id="bigint",
    user_id="integer",
    city="text",
    stars="integer",
)
USERS = table("users", ("id",), id="integer", city="text", name="text")
TABLES = (AUTHORS, BOOKS, BOOK_TAGS, TAGS, REVIEWS, USERS)


def columns(*names: str) -> tuple[Term, ...]:
    return tuple(Term("column", OTHER, (), name) for name in names)


def node(field: str, table: Table, on: tuple[str, str] | None = None, **options: Any) -> Node:
    join = Join(columns(on[0]), columns(on[1])) if on else NO_JOIN
    shown = options.pop("columns", tuple(column.name for column in table.columns))
    return Node(field, table, shown, join, **options)


AUTHOR_DOCS = node(
    "author_docs",
    AUTHORS,
    children=(
        node(
            "books",
            BOOKS,
            ("id", "author_id"),
            many=True,
            order_by=(Order("year", descending=True), Order("title")),
            limit=3,
            aggregates=(
                Aggregate("books_count", "count"),
                Aggregate("first_year", "min", "year"),
                Aggregate("years", "sum", "year"),
            ),
            children=(
                node(
                    "tags",
                    BOOK_TAGS,
                    ("id", "book_id"),
                    many=True,
                    flatten="tag",
                    columns=(),
                    children=(node("tag", TAGS, ("tag_id", "id"), columns=("name",)),),
                ),
                node(
                    "reviews",
                    REVIEWS,
                    ("id", "book_id"),
                    many=True,
                    children=(node("user", USERS, ("user_id", "id")),),
                ),
            ),
        ),
        node("agent", AUTHORS, ("agent_id", "id"), columns=("name",)),
    ),
)
REVIEW_DOCS = node(
    "review_docs",
    REVIEWS,
    children=(
        node(
            "book",
            BOOKS,
            ("book_id", "id"),
            children=(node("author", AUTHORS, ("author_id", "id")),),
        ),
        node("same_city", USERS, ("city", "city"), many=True, columns=("id", "name")),
    ),
)
TAG_DOCS = node(
    "tag_docs",
    TAGS,
    children=(
        node(
            "links",
            BOOK_TAGS,
            ("id", "tag_id"),
            many=True,
            children=(node("book", BOOKS, ("book_id", "id"), columns=("title",)),),
        ),
        node("parent", TAGS, ("parent_id", "id")),
    ),
)
PLAN = StatePlan(tuple(View(root.field, root, ()) for root in (AUTHOR_DOCS, REVIEW_DOCS, TAG_DOCS)))
VIEWS = tuple(view.name for view in PLAN.views)


def expected(rows: Rows, place: Node, row: Row) -> Row:
    """The document of a row, from the tables as they are: the model."""
    document = {name: row[name] for name in row if name in place.columns}
    for child in place.children:
        (parent_column,), (child_column,) = child.join.parent, child.join.child
        value = row[parent_column.text]
        matching = sorted(
            (
                (row_id.encode(), row)
                for row_id, row in rows[child.table.name].items()
                if value is not None and row[child_column.text] == value
            ),
            key=lambda pair: pair[0],
        )
        children = [row for _, row in matching]
        for order in reversed(child.order_by):
            present = [row for row in children if row[order.column] is not None]
            present.sort(key=itemgetter(order.column), reverse=order.descending)
            children = [*present, *(row for row in children if row[order.column] is None)]
        years = [row["year"] for row in children if row.get("year") is not None]
        for part in child.aggregates:
            document[part.name] = {
                "books_count": len(children),
                "first_year": min(years, default=None),
                "years": sum(years) if years else None,
            }[part.name]
        nested = [expected(rows, child, row) for row in children]
        if child.flatten:
            nested = [part[child.flatten] for part in nested]
        document[child.field] = nested[: child.limit] if child.many else next(iter(nested), None)
    return document


def random_row(chance: random.Random, name: str) -> Row:
    def some(count: int) -> int | None:
        number = chance.randrange(-1, count)
        return None if number < 0 else number

    text = chance.choice(["", "a", "b", 'q"uote', "sep\x1e\x1f\x1darate", "süß 🎈"])
    rows: dict[str, Row] = {
        "authors": {"id": chance.randrange(6), "name": text, "agent_id": some(7)},
        "books": {
            "id": chance.randrange(12),
            "author_id": some(8),
            "title": text,
            "year": some(4),
        },
        "book_tags": {"book_id": chance.randrange(12), "tag_id": chance.randrange(6)},
        "tags": {"id": chance.randrange(6), "name": text, "parent_id": some(6)},
        "reviews": {
            "id": chance.randrange(15),
            "book_id": some(14),
            "user_id": some(6),
            "city": chance.choice([None, "", "a", "sep\x1e\x1fb"]),
            "stars": chance.randrange(5),
        },
        "users": {
            "id": chance.randrange(6),
            "city": chance.choice([None, "", "a", "sep\x1e\x1fb"]),
            "name": text,
        },
    }
    return rows[name]


class Crash(Exception):
    """The process ends here."""


class Crashing:
    """A state, or whatever is called, that ends the process before or after any call."""

    def __init__(self, target: Any, crash: Callable[[], None]) -> None:
        self._target, self._crash = target, crash

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._crash()
            answer = method(*arguments, **options)
            if isinstance(answer, Iterator):
                answer = list(answer)
            self._crash()
            return answer

        return call


class Library:
    """Tables, their log, the state, and the topics of the documents."""

    def __init__(self, url: str, seed: int, plant: "Plant | None" = None) -> None:
        """`plant` puts a bug in the way between the state and what is done with it."""
        self.chance = random.Random(seed)
        self.rows: Rows = {table.name: {} for table in TABLES}
        self.log: dict[str, list[list[tuple[bytes, bytes | None]]]] = {
            table.name: [[] for _ in range(PARTITIONS)] for table in TABLES
        }
        self.topics: dict[str, dict[bytes, bytes | None]] = {view.name: {} for view in PLAN.views}
        self.url, self.writer = url, uuid4().hex
        self.crash_share = self.chance.choice([0.0, 0.01, 0.05])
        self.plant = plant
        self.positions = Positions(Database("documents", url, PREFIX), None)
        for table in PLAN.tables:
            self.positions.create(table)

    def crash(self) -> None:
        if self.chance.random() < self.crash_share:
            raise Crash

    def transact(self) -> None:
        """Change some rows, in any way."""
        for _ in range(self.chance.choice([1, 3, 20])):
            table = self.chance.choice(TABLES)
            rows, row = self.rows[table.name], random_row(self.chance, table.name)
            kind = self.chance.random()
            if kind < 0.3:
                self.delete(table, row)
            elif kind < 0.4 and rows and len(table.key) == 1:
                # A change of the key: a delete and an insert, in whichever partitions.
                former = self.chance.choice(list(rows.values()))
                self.delete(table, former)
                self._write(table, {**former, "id": row["id"]})
            else:
                self._write(table, row)

    def _key(self, table: Table, row: Row) -> tuple[str, bytes]:
        values = [row[name] for name in table.key]
        row_id = str(values[0]) if len(values) == 1 else json.dumps(values, separators=(",", ":"))
        return row_id, json.dumps({name: row[name] for name in table.key}).encode()

    def _append(self, table: Table, row: Row, value: bytes | None) -> None:
        _, key = self._key(table, row)
        self.log[table.name][sum(key) % PARTITIONS].append((key, value))

    def _write(self, table: Table, row: Row) -> None:
        self.rows[table.name][self._key(table, row)[0]] = row
        source = {"lsn": 1, "schema": "public", "table": table.name}
        self._append(table, row, json.dumps({"op": "u", "after": row, "source": source}).encode())

    def delete(self, table: Table, row: Row) -> None:
        if self.rows[table.name].pop(self._key(table, row)[0], None) is not None:
            self._append(table, row, None)

    def ends(self, *, cut: bool) -> dict[str, list[int]]:
        """The ends of the topics, or any place before them."""
        ends = {}
        for table in TABLES:
            lengths = [len(part) for part in self.log[table.name]]
            start = self.reached(table)
            ends[table.name] = [
                self.chance.randint(low, high) if cut else high
                for low, high in zip(start, lengths, strict=True)
            ]
        return ends

    def reached(self, table: Table) -> Sequence[int]:
        stored = self.positions.checkpoint(table)
        return stored.position.offsets if stored else (0,) * PARTITIONS

    def apply(self, ends: dict[str, list[int]]) -> None:
        """Apply a batch up to these ends, as the sink does, in this process."""
        advances = []
        for table in PLAN.tables:
            stored, end = self.positions.checkpoint(table), tuple(ends[table.name])
            start = stored.position.offsets if stored else (0,) * PARTITIONS
            end = tuple(max(low, high) for low, high in zip(start, end, strict=True))
            if end != start:
                position = stored.position if stored else None
                advances.append(Advance(table, position, Position(table.topic, end)))
        steps = [
            step for advance in advances if (step := self.positions.take(advance, self.writer))
        ]
        writer = CrashingWriter(
            self.url, PREFIX, {step.advance.table.topic: step for step in steps}, PLAN
        )
        writer.crash = self.crash
        writer.limits = ChunkLimits(self.chance.choice([1, 3, 50]), 1 << 20)
        run = LaneRun(Lane(tuple(advances), DecodeOptions(), writer, Stop()))
        for step in steps:
            table = step.advance.table
            for partition, (low, high) in enumerate(
                zip(step.offsets, step.advance.end.offsets, strict=True)
            ):
                records = self.log[table.name][partition][low:high]
                numbered = [(key, value, low + place) for place, (key, value) in enumerate(records)]
                if numbered:
                    run.fold(table.topic, partition, numbered)
        assert [report.message for report in run.finish() if report.failure] == []
        for step in steps:
            self.positions.finish(step)

    def send(self) -> None:
        """Send what is dirty, as the task on an executor does."""
        state = State(self.url, PREFIX, VIEWS)
        topics = {view.name: view.name for view in PLAN.views}
        turn = state.take(self.writer)
        crashing: Any = Crashing(self.plant(state) if self.plant else state, self.crash)
        task = Emission(PLAN, crashing, "", topics, "documents", turn)

        def write(records: Sequence[Outgoing]) -> None:
            self.crash()
            for record in records:
                self.topics[record.topic][record.key] = record.value
            self.crash()

        report = Report()
        while not report.done:
            task.send(report, write)

    def documents(self, view: View) -> dict[str, Any]:
        """The newest documents in a topic, by the text of the key."""
        documents = {}
        for key, value in self.topics[view.name].items():
            if value is not None:
                row = json.loads(value)["after"]
                for child in view.root.children:
                    if isinstance(text := row[child.field], str):
                        row[child.field] = json.loads(text)
                documents[key.decode()] = row
        return documents


class Planted:
    """A state with a bug: it passes calls on, but for what a subclass does."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


class OldVersionsNotClimbed(Planted):
    def pending(self) -> list[Chunk]:
        chunks = self.state.pending()
        return [
            chunk._replace(rows={key: Entries({}, {}, {}) for key in chunk.rows})
            for chunk in chunks
        ]


class PendingLost(Planted):
    def pending(self) -> list[Chunk]:
        for chunk in self.state.pending():
            self.state.climbed(chunk, {})
        return []


class EachRootTakenForDirty(Planted):
    def is_unsent(self, view: str) -> bool:
        return True


class PagesNotMarked(Planted):
    def mark_rows(self, view: str, ids: Collection[str]) -> None:
        pass


class ForgottenBeforeSent(Planted):
    def require_turn(self, turn: Turn) -> None:
        self.state.require_turn(turn)
        self.turn = turn

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        marks = self.state.dirty(view, limit)
        self.state.sent(self.turn, view, marks)
        return marks


class NotedAfterSent(Planted):
    """Keeps in mind which documents are dirty, and forgets their chunk, before they are sent."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.in_mind: dict[str, set[str]] = {view.name: set() for view in PLAN.views}

    def climbed(self, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
        for view, ids in marks.items():
            self.in_mind[view] |= set(ids)
        self.state.climbed(chunk, {})

    def dirty(self, view: str, limit: int) -> dict[str, str]:
        return {**dict.fromkeys(self.in_mind[view], "0"), **self.state.dirty(view, limit)}

    def sent(self, turn: Turn, view: str, marks: Mapping[str, str], *more: Any) -> None:
        self.in_mind[view] -= set(marks)
        self.state.sent(turn, view, marks, *more)


Plant = Callable[[State], Planted]


class CrashingWriter(StateWriter):
    crash: Callable[[], None]

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        self.crash()
        verdicts = super().write(parts)
        self.crash()
        return verdicts


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("state")
    with cache(folder) as address:
        yield address


def run(library: Library) -> list[str]:
    """Random transactions, batches and crashes, until some documents are wrong or enough was done;
    returns the differences.
    """
    changes, wrong = 0, list[str]()
    while changes < CHANGES and not wrong:
        library.transact()
        changes = sum(len(part) for parts in library.log.values() for part in parts)
        cut = library.chance.random() < 0.3
        ends = library.ends(cut=cut)
        while True:
            try:
                library.apply(ends)
                library.send()
                wrong = [] if cut else differences(library)
                break
            except Crash:
                if library.chance.random() < 0.5:
                    library.writer = uuid4().hex
                if library.chance.random() < 0.5:
                    break
    library.crash_share = 0.0
    library.apply(library.ends(cut=False))
    library.send()
    return wrong or differences(library)


def differences(library: Library) -> list[str]:
    wrong = []
    for view in PLAN.views:
        table = view.root.table
        rows = library.rows[table.name]
        expected_rows = {
            json.dumps({name: row[name] for name in table.key}): expected(
                library.rows, view.root, row
            )
            for row in rows.values()
        }
        documents = library.documents(view)
        wrong += [
            f"{view.name} {key}: {documents.get(key)} instead of {expected_rows.get(key)}"
            for key in expected_rows.keys() | documents.keys()
            if expected_rows.get(key) != documents.get(key)
        ]
    return wrong


@pytest.mark.parametrize(
    "plant",
    [
        OldVersionsNotClimbed, PendingLost, EachRootTakenForDirty, NotedAfterSent, PagesNotMarked, ForgottenBeforeSent,
    ],
)  # fmt: skip
def test_planted_bugs_are_found(url: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SLICE", 3)
    for seed in range(10):
        with redis.Redis.from_url(url) as server:
            server.flushdb()
        library = Library(url, seed, plant)
        library.crash_share = (0.0, 0.05, 0.005)[seed % 3]
        if run(library):
            return
    pytest.fail("no difference was found")


def test_a_failover_is_followed(tmp_path: Path) -> None:
    """The name leads to the new primary; open connections still to the old one, which is a replica
    by now. Who closes the state leaves no connection.
    """
    with cache(tmp_path / "a") as old_url, cache(tmp_path / "b") as new_url:
        ports = [urlsplit(url).port or 0 for url in (old_url, new_url)]
        road = Road(ports[0])
        sink = DocumentState(f"redis://127.0.0.1:{road.port}/0", NAME)
        state, view = sink.open_state(), PLAN.views[0].name
        state.mark(view, {"1": b"{}"})
        with redis.Redis.from_url(old_url) as old, redis.Redis.from_url(new_url) as new:
            old.replicaof("127.0.0.1", str(ports[1]))
            road.target = ports[1]
            with pytest.raises(Failure) as caught:
                state.mark(view, {"2": b"{}"})
            assert caught.value.kind == "unavailable"
            state.mark(view, {"3": b"{}"})
            assert list(state.dirty(view, 9)) == ["3"]
            sink.close()
            wait_until(lambda: clients(new) == 2, 10, "this one and the replica alone")
        road.close()


def test_a_server_that_evicts_is_refused_with_words_that_name_the_state(url: str) -> None:
    """Each time that a table is made ready, also one that has rows already."""
    sink = DocumentState(url, NAME)
    sink.needs = {AUTHORS.qualified: "all"}
    sink.prepare(AUTHORS)
    with redis.Redis.from_url(url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(
            SinkRejected, match="allkeys-lru on the server of the state of docu"
        ) as caught:
            sink.prepare(AUTHORS)
        assert caught.value.hint.startswith("redis-cli -h ")
        server.config_set("maxmemory-policy", "noeviction")


def test_a_state_that_does_not_fit_is_refused_with_numbers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the driver, on executors and in the engine's task; with room again it goes on."""
    with redis.Redis.from_url(url) as server:
        server.flushdb()
        library = Library(url, 1)
        library.crash_share = 0.0
        sink = DocumentState(url, NAME)
        state = State(url, PREFIX, VIEWS)
        sink.needs = {AUTHORS.qualified: "all"}
        for _ in range(9):
            library.transact()
        server.config_set("maxmemory", 1)
        with pytest.raises(SinkRejected, match=r"no room for the state .* of 1 bytes") as refused:
            sink.prepare(AUTHORS)
        assert "memory" in refused.value.hint
        with pytest.raises(Failure, match="no room for the state") as caught:
            state.take("run")
        assert caught.value.kind == "rejected"
        server.config_set("maxmemory", 0)
        ends = library.ends(cut=False)
        with monkeypatch.context() as patch:
            patch.setattr(library, "crash", lambda: server.config_set("maxmemory", 1))
            with pytest.raises(AssertionError, match="no room for"):
                library.apply(ends)
        server.config_set("maxmemory", 0)
        library.apply(library.ends(cut=False))
        library.send()
        assert differences(library) == []


def kinds_of_keys(server: redis.Redis) -> set[str]:
    """What comes after the prefix in the keys of the server, all of which have it."""
    keys = [key if isinstance(key, str) else key.decode() for key in server.scan_iter()]
    return {key.removeprefix(f"{PREFIX}:").split(":")[0] for key in keys}


def clients(server: redis.Redis) -> int:
    return len(server.client_list())


def test_documents_are_what_the_tables_say(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = 0
    for seed in range(RUNS):
        monkeypatch.setattr(tasks, "SLICE", (3, SLICE)[seed % 2])
        with redis.Redis.from_url(url) as server:
            server.flushdb()
            library = Library(url, seed)
            assert run(library) == [], seed
            changes += sum(len(part) for parts in library.log.values() for part in parts)
            # All that is left are rows, their indexes, positions and names.
            remaining = kinds_of_keys(server)
            assert remaining <= {
                "_cdc",
                "_x",
                "_number",
                "_documents",
                *(t.qualified for t in TABLES),
            }
            for table in TABLES:
                for row in list(library.rows[table.name].values()):
                    library.delete(table, row)
            library.apply(library.ends(cut=False))
            library.send()
            assert differences(library) == [], seed
            remaining = kinds_of_keys(server)
            assert remaining <= {"_cdc", "_number", "_documents"}
    assert changes >= (100_000 if SCALE >= 20 else RUNS * CHANGES)
