"""What the engine of documents runs on executors, as tasks of Spark: `Emission` sends changed documents to
their topics, `mark` reads topics and marks what they have. No key leaves the executors.

    pending rows -> dirty documents -> documents, in a transaction -> forgotten

Every step may be repeated: a document is whole, and as the state is now. Order of effects, always:
first noted in the state, then in the topic, then forgotten in the state. So what a crash leaves is
done by the next task.

The writer of a topic is fenced twice. An executor takes the name in Kafka only while the state
names its owner: it looks before and after, so an owner that comes later takes the name later, too.
The same look detects a state that has gone back, with its server: its documents would be older.

Of windows that are closed see `cdc.documents.closing`.

Of a view that `sends_once` the state also knows what the topic has, as digests. A document that the
topic has already isn't sent again. That a transaction begins is noted before it does: if it isn't
noted as sent afterwards, only the topic knows, and the engine reads it after it has fenced the
writer (`fence`, `mark`).
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

from cdc.codec.members import members
from cdc.codec.table import codec
from cdc.documents.assemble import Document, assemble, list_place, parents
from cdc.documents.closing import SAID, closed_at
from cdc.documents.groups import assemble_groups, documents_of
from cdc.documents.plan import Node, StatePlan, View, is_key
from cdc.documents.rows import Entries, value_reader
from cdc.documents.state import Chunk, State, Turn
from cdc.errors import ConnectorError, Fenced
from cdc.kafka.clients import LARGEST_BYTES, is_sendable
from cdc.kafka.transactions import Outgoing, TransactionalWriter
from cdc.sink.lane import Failure
from cdc.sink.lane_task import Blocks

SLICE = 2000
"""Documents that are assembled and sent at once: a transaction."""
ROUND_S = 1.0
"""Seconds after which a task sends no further slice: newer changes are applied first."""
PAGE = 2000
"""Rows that are climbed from at once: a parent may have millions of children."""
REMEMBERED = 100_000
"""Values that are remembered of each edge as climbed from. Of more, some are climbed from twice, to no harm."""
Joined = Any
"""What a row is joined by: the text of its values, of a join in time also its time."""
Write = Callable[[Sequence[Outgoing]], object]
_writers: dict[tuple[str, str, str], TransactionalWriter] = {}
"""This process' writers, by broker, name and owner; executors keep them across tasks."""
_encode = msgspec.json.Encoder().encode


@dataclass
class Report:
    """What a task has done. A failure travels as data: a key of `cdc.sink.remedy.REPORTED`."""

    documents: int = 0
    done: bool = False
    """Whether nothing was dirty any more at its end."""
    failure: str | None = None
    message: str = ""


def read_report(report: Report) -> Report:
    """Return what a task reports. Raises Failure: what it reports as failed."""
    if report.failure:
        raise Failure(report.failure, report.message)
    return report


@dataclass(frozen=True)
class Emission:
    """What an executor needs to send documents. Can be pickled.

    topics  by name of the view
    name    `transactional.id` of the writer
    turn    the one that it has to be, in the state
    """

    plan: StatePlan
    state: State
    bootstrap: str
    topics: Mapping[str, str]
    name: str
    turn: Turn

    def run(self, partition: Iterator[object]) -> Iterator[Report]:
        """Run as a task of Spark, of any input."""
        for _ in partition:
            pass
        report = Report()
        with _reported(report):
            self.send(report, self._write)
        yield report

    def fence(self, partition: Iterator[object]) -> Iterator[Report]:
        """Run as a task of Spark as `run` is: end the transactions of any writer that had the name
        before. What it committed is below the ends of the topics from then on.
        """
        for _ in partition:
            pass
        report = Report(done=True)
        with _reported(report):
            self._close_writers()
            self._writer()
        yield report

    def send(self, report: Report, write: Write) -> None:
        """Find and send dirty documents until there are none, or the round is over.

        `write` is given a slice's records, and returns when they are durable.

        Raises:
            Failure: the state can't go on. Fenced, ConnectorError: the topic can't.
        """
        deadline = time.monotonic() + ROUND_S
        self.state.require_turn(self.turn)
        self._climb()
        clocks = self.state.clocks()
        for name, now in clocks.items():
            # In every turn, whatever has set the clock forward.
            self.state.ripen(self.turn, name, now)
        dirty = list(self.plan.views)
        while dirty:
            # In turns, so that a view with many documents delays no other by more than a slice.
            for view in list(dirty):
                if not (marks := self.state.dirty(view.name, SLICE)):
                    dirty.remove(view)
                    continue
                self._send_slice(view, marks, clocks.get(view.name), write)
                report.documents += len(marks)
            # After a slice of each, however long that took: none waits for another's last.
            if dirty and time.monotonic() > deadline:
                break
        report.done = self.state.is_clean()

    def _climb(self) -> None:
        """Mark the documents of rows that have changed since they were climbed from last.

        Where all documents are dirty, as before the first is sent, none has to be found.
        """
        chunks = iter(self.state.pending())
        if (first := next(chunks, None)) is None:
            return
        # The documents of groups are never all dirty. A view of rows may have had the name before.
        views = [
            view
            for view in self.plan.views
            if view.grouping is not None or not self.state.is_unsent(view.name)
        ]
        for chunk in chain([first], chunks):
            marks: dict[str, set[str]] = {}
            for view, ids in climb(self.plan, views, self.state, chunk):
                marks.setdefault(view, set()).update(ids)
                # Of a large fan-out not all at once: the chunk is forgotten with the last of them.
                if len(marks[view]) >= SLICE:
                    self.state.mark_rows(view, marks.pop(view))
            self.state.climbed(chunk, marks)

    def _send_slice(
        self, view: View, marks: Mapping[str, str], now: int | None, write: Write
    ) -> None:
        # Before the rows are read: a task that is run twice at once refuses what the other has sent.
        former = self.state.digests(view.name, list(marks)) if view.sends_once else None
        make = assemble_groups if view.grouping is not None else assemble
        documents, due, closed = make(self.plan, self.state, view, list(marks), now)
        now_us = time.time_ns() // 1000
        records: list[Outgoing] = []
        digests: dict[str, bytes | None] = {}
        for document in documents:
            op = "u"
            if former is not None:
                digest = row_digest(document.row)
                held = former.by_id.get(document.id)
                if document.id in closed:
                    digests[document.id] = None if closed[document.id].is_over else SAID
                    if held == SAID or (document.row is None and not held):
                        continue
                elif digest == held:
                    continue
                else:
                    digests[document.id] = digest
                op = "u" if document.id in former.by_id else "c"
            value = _envelope(view.name, document, op, now_us)
            if not is_sendable(document.key, value):
                # No broker would ever take it.
                raise Failure(
                    "oversized",
                    f"The document {document.key.decode()} of {view.name} has {len(value or b''):,}"
                    f" bytes; Kafka takes {LARGEST_BYTES:,}.",
                )
            records.append(Outgoing(self.topics[view.name], document.key, value))
        if records:
            # Rows are applied between turns only. So a state in which it is still this turn has been
            # no older while they were read.
            if former is not None:
                self.state.begin_sending(self.turn, former.number)
            else:
                self.state.require_turn(self.turn)
            write(records)
        dropped = [pane for window in closed.values() for pane in window.panes]
        self.state.sent(self.turn, view.name, marks, due, digests, dropped)

    def _write(self, records: Sequence[Outgoing]) -> None:
        """Write in a transaction. A process that had the task before may have fenced this one's writer."""
        try:
            self._writer().write(records)
        except Fenced:
            self._close_writers()
            self._writer().write(records)
        except ConnectorError:
            self._close_writers()
            raise

    def _close_writers(self) -> None:
        for identity in [key for key in _writers if key[:2] == (self.bootstrap, self.name)]:
            _writers.pop(identity).close()

    def _writer(self) -> TransactionalWriter:
        identity = (self.bootstrap, self.name, self.turn.owner)
        if identity not in _writers:
            writer = TransactionalWriter(self.bootstrap, self.name)
            try:
                self.state.require_turn(self.turn)
            except BaseException:
                writer.close()
                raise
            self._close_writers()
            _writers[identity] = writer
        return _writers[identity]


def climb(
    plan: StatePlan, views: Sequence[View], state: State, chunk: Chunk
) -> Iterator[tuple[str, Collection[str]]]:
    """Find the ids of documents that a chunk's rows may have changed, up the tree of a view, edge by edge: of
    which view, and a page of ids; one may come several times.

    The document of a row that is itself a root is dirty already. Entries of rows as they were and rows
    as they are now are enough, without older states of anything else. If a document differs between two
    states, take a way from its root down to a changed row that is in one of the states only, or whose
    row changed, and on it the topmost changed row. All rows above are unchanged, so their entries are
    the same in both states. So climbing from the topmost changed row, in the version in which the way
    existed, reaches the root.
    """
    if not views:
        return
    current = state.rows(chunk.table, list(chunk.rows))
    versions = [*chunk.rows.items(), *((row_id, row.entries) for row_id, row in current.items())]
    for view in views:
        if view.grouping is not None and view.root.table.qualified == chunk.table:
            yield view.name, documents_of(plan, state, view, [entries for _, entries in versions])
        for path in view.root.paths():
            node = path[-1]
            if node.is_root or node.table.qualified != chunk.table:
                continue
            joined_by = _joined_reader(plan, node)
            values = {
                value
                for row_id, entries in versions
                if (value := joined_by(row_id, entries)) is not None
            }
            for ids in _roots(plan, state, path, values):
                yield view.name, ids


def _roots(
    plan: StatePlan, state: State, path: tuple[Node, ...], values: Collection[Joined]
) -> Iterator[Collection[str]]:
    """Climb from what rows of a path's last node are joined by to the ids of its root, page by page."""
    parent, child = path[-2:]
    name = parent.table.qualified
    found: Iterable[Collection[str]]
    if child.time is not None:
        found = parents(plan, state, parent, child, values)
    elif is_key(parent.table, child.join.parent):
        found = (values,)
    else:
        found = state.scan_members(name, plan.slots[name].index(child.join.parent), values)
    climbed = set[Joined]()
    # A join in time finds a page for each row, of one parent or a few: these are asked for at once.
    remaining = chain.from_iterable(found)
    while page := list(islice(remaining, PAGE)):
        if parent.is_root:
            yield page
            continue
        unmet = _joined(plan, state, parent, page) - climbed
        if unmet:
            yield from _roots(plan, state, path[:-1], unmet)
        climbed |= unmet
        if len(climbed) > REMEMBERED:
            climbed.clear()


def _joined(plan: StatePlan, state: State, node: Node, ids: Collection[str]) -> set[Joined]:
    joined_by = _joined_reader(plan, node)
    rows = state.rows(node.table.qualified, ids)
    values = (joined_by(row_id, row.entries) for row_id, row in rows.items())
    return {value for value in values if value is not None}


def _joined_reader(plan: StatePlan, node: Node) -> Callable[[str, Entries], Joined | None]:
    """Return the function from a row's id and entries to what it is joined by."""
    if node.time is None:
        return value_reader(plan, node.table, node.join.child)
    return lambda _, entries: list_place(plan, node, node.listing, entries)


@contextmanager
def _reported(report: Report) -> Iterator[None]:
    try:
        yield
    except (Failure, Fenced, ConnectorError) as error:
        report.failure = "fenced" if isinstance(error, Fenced) else error.kind
        report.message = error.message


def _envelope(view: str, document: Document, op: str, now_us: int) -> bytes | None:
    """Build the record's value as the connector writes it; None deletes the document."""
    if document.row is None:
        return None
    source = b'"source":{"schema":"view","table":%b,"ts_us":%d}' % (_encode(view), now_us)
    return b'{"op":"%b","after":%b,%b}' % (op.encode(), document.row, source)


class _Value(msgspec.Struct):
    after: msgspec.Raw


_decode_value = msgspec.json.Decoder(_Value).decode


def row_digest(row: bytes | None) -> bytes | None:
    """Return the digest of a document as it is sent; None where there is none."""
    return None if row is None else hashlib.blake2b(row, digest_size=12).digest()


def _document_id(view: View, topic: str, key: bytes) -> str:
    """Return the id of a document from the key of its record.

    Raises:
        Failure: of the kind `rekeyed`, if the view had another key as the record was written. What the
            record says of a document, no later one can take back.
    """
    names = members(key).keys()
    if names != set(view.keyed.key):
        raise Failure(
            "rekeyed",
            f"{topic} has documents with the key ({', '.join(names)}), and the key of view.{view.name}"
            f" is ({', '.join(view.keyed.key)}) now.",
        )
    return codec(view.keyed).row_id(key)


def mark(state: State, turn: Turn, views: Mapping[str, View], blocks: Blocks) -> Report:
    """Mark the documents of records. `views`: by topic."""
    report = Report(done=True)
    with _reported(report):
        for topic, _, records in blocks:
            view = views[topic]
            keys: dict[str, bytes] = {}
            digests: dict[str, bytes | None] = {}
            closed: list[int] = []
            for key, value, _ in records:
                if key is None:
                    continue
                document_id = _document_id(view, topic, key)
                keys[document_id] = key
                if view.sends_once:
                    row = bytes(_decode_value(value).after) if value else None
                    digests[document_id] = row_digest(row)
                    if row is not None and (at := closed_at(view, row)) is not None:
                        digests[document_id] = SAID
                        closed.append(at)
            state.mark(view.name, keys)
            state.note_digests(turn, view.name, digests)
            if closed:
                state.note_closed(turn, view.name, max(closed))
    return report
