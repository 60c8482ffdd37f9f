"""Send changed documents to their topics: one task, or one a share, on executors, between two batches.

    pending rows -> dirty documents -> documents, in a transaction -> forgotten

Every step may be repeated: a document is whole, and as the state is now. Order of effects, always:
first noted in the state, then in the topic, then forgotten in the state. So what a crash leaves is
done by the next task.

The writer of a topic is fenced twice. An executor takes the name in Kafka only while the state
names its owner: it looks before and after, so an owner that comes later takes the name later, too.
The same look tells a state that has gone back, with its server: its documents would be older.

A task that was taken for lost may still write what it had read, until another writer takes its name.
So a document has one name at a time: that of its share, and whoever shares otherwise than before
takes the names of before first (`fence_writers`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from zlib import crc32

import msgspec

from cdc.errors import Fenced, KafkaUnavailable
from cdc.kafka.transactions import Outgoing, TransactionalWriter
from cdc.sink.lane import Failure
from cdc.views.assemble import Document, assemble
from cdc.views.climb import climb
from cdc.views.plan import StatePlan, View
from cdc.views.state import State, Turn

SLICE = 2000
"""Documents that are assembled and sent at once: a transaction."""
ROUND_S = 1.0
"""Seconds after which a task sends no further slice: newer changes are applied first."""
Write = Callable[[Sequence[Outgoing]], object]
_writers: dict[tuple[str, str, str], TransactionalWriter] = {}
"""This process' writers, by broker, name and owner; executors keep them across tasks."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Share:
    """What a task sends: the documents whose hash has this remainder. No two shares have one in
    common.
    """

    number: int
    count: int

    def select(self, marks: Mapping[str, str]) -> Mapping[str, str]:
        """Return the marks of the share's ids."""
        if self.count == 1:
            return marks
        return {
            row_id: mark
            for row_id, mark in marks.items()
            if crc32(row_id.encode()) % self.count == self.number
        }

    def writer(self, name: str) -> str:
        """Name the share's writer."""
        return name if self.count == 1 else f"{name}.{self.number}"


ALL = Share(0, 1)


def fence_writers(bootstrap: str, name: str, shares: Iterable[Share]) -> None:
    """Take the names of the writers of these shares, 60 ms each: no task that has them writes any
    more. A task of the present turn takes its name back.

    Raises:
        KafkaUnavailable: the broker can't be reached, or refuses.
    """
    for share in shares:
        TransactionalWriter(bootstrap, share.writer(name)).close()


class Report(msgspec.Struct):
    """What a task has done. A failure travels as data: a key of `cdc.sink.remedy.REPORTED`."""

    documents: int = 0
    done: bool = False
    """Whether nothing was dirty any more at its end."""
    failure: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Emission:
    """What an executor needs to send documents. Can be pickled.

    open_state  opens the state, in the executor's process
    topics      by name of the view
    name        `transactional.id` of the writer; of several, a number follows
    turn        the one that it has to be, in the state
    shares      how many tasks share the documents
    """

    plan: StatePlan
    open_state: Callable[[], State]
    bootstrap: str
    topics: Mapping[str, str]
    name: str
    turn: Turn
    shares: int = 1

    def run(self, numbers: Iterator[int]) -> Iterator[bytes]:
        """Run as a task of Spark: the number of its share, a `Report` as JSON out."""
        (number,) = numbers
        share = Share(number, self.shares)
        report, state = Report(), self.open_state()
        try:
            self.send(state, report, partial(self._write, state, share), share)
        except Failure as failure:
            report.failure, report.message = failure.kind, failure.message
        except Fenced as error:
            report.failure, report.message = "fenced", error.message
        except KafkaUnavailable as error:
            report.failure, report.message = "broker", error.message
        yield _encode(report)

    def send(self, state: State, report: Report, write: Write, share: Share = ALL) -> None:
        """Find and send dirty documents of a share until there are none, or the round is over. The
        first share's task climbs from changed rows for all.

        `write` is given a slice's records, and returns when they are durable.

        Raises:
            Failure: the state can't go on. Fenced, KafkaUnavailable: the topic can't.
        """
        deadline = time.monotonic() + ROUND_S
        state.require_turn(self.turn)
        if share.number == 0:
            self._climb(state)
        dirty = list(self.plan.views)
        while dirty:
            # In turns, so that a view with many documents delays no other by more than a slice.
            for view in list(dirty):
                if not (marks := share.select(state.dirty(view.name, SLICE * share.count))):
                    dirty.remove(view)
                    continue
                self._send_slice(view, state, marks, write)
                report.documents += len(marks)
            # After a slice of each, however long that took: none waits for another's last.
            if dirty and time.monotonic() > deadline:
                break
        report.done = state.is_clean()

    def _climb(self, state: State) -> None:
        """Mark the documents of rows that have changed since they were climbed from last.

        Where all documents are dirty, as before the first is sent, none has to be found.
        """
        chunks = iter(state.pending())
        if (first := next(chunks, None)) is None:
            return
        views = [view for view in self.plan.views if not state.is_unsent(view.name)]
        for chunk in chain([first], chunks):
            marks: dict[str, set[str]] = {}
            for view, ids in climb(self.plan, views, state, chunk):
                marks.setdefault(view, set()).update(ids)
                # Of a large fan-out not all at once: the chunk is forgotten with the last of them.
                if len(marks[view]) >= SLICE:
                    state.mark_rows(view, marks.pop(view))
            state.climbed(chunk, marks)

    def _send_slice(self, view: View, state: State, marks: Mapping[str, str], write: Write) -> None:
        documents = assemble(self.plan, state, view, list(marks))
        now_us = time.time_ns() // 1000
        records = [
            Outgoing(self.topics[view.name], document.key, _envelope(view.name, document, now_us))
            for document in documents
        ]
        if records:
            # Rows are applied between turns only. So a state in which it is still this turn has been
            # no older while they were read.
            state.require_turn(self.turn)
            write(records)
        state.sent(self.turn, view.name, marks)

    def _write(self, state: State, share: Share, records: Sequence[Outgoing]) -> None:
        """Write in a transaction. The writer of this process is fenced also by that of another
        process, which had the task before.
        """
        name = share.writer(self.name)
        try:
            self._writer(state, name).write(records)
        except Fenced:
            self._close_writers(name)
            self._writer(state, name).write(records)
        except KafkaUnavailable:
            self._close_writers(name)
            raise

    def _close_writers(self, name: str) -> None:
        for identity in [key for key in _writers if key[:2] == (self.bootstrap, name)]:
            _writers.pop(identity).close()

    def _writer(self, state: State, name: str) -> TransactionalWriter:
        identity = (self.bootstrap, name, self.turn.owner)
        if identity not in _writers:
            writer = TransactionalWriter(self.bootstrap, name)
            try:
                state.require_turn(self.turn)
            except BaseException:
                writer.close()
                raise
            self._close_writers(name)
            _writers[identity] = writer
        return _writers[identity]


def _envelope(view: str, document: Document, now_us: int) -> bytes | None:
    """Build the record's value as the connector writes it; None deletes the document."""
    if document.row is None:
        return None
    source = b'"source":{"schema":"view","table":%b,"ts_us":%d}' % (_encode(view), now_us)
    return b'{"op":"u","after":%b,%b}' % (document.row, source)
