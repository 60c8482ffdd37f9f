"""Rows of the state and what is found by their values: reads that want no turn, from any process."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import redis

from cdc.sink.lane import Failure
from cdc.sinks.redis.documents.database import state_failure
from cdc.sinks.redis.documents.keys import index_key, row_prefix
from cdc.sinks.redis.server import bytes_client
from cdc.views.rows import LISTING, TALLY, StoredRow, decode_row
from cdc.views.state import Place, Span

PAGE = 2000
"""Keys of one request."""
SCANNED_SETS = 500
"""Index sets that are scanned at once. The server answers with small ones as a whole."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class RowReader:
    """Reads rows under a prefix of a database. Can be pickled; connects where it is used. Every
    method may raise Failure.
    """

    url: str
    prefix: str

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        """Read rows with an MGET a page."""
        begin, rows = row_prefix(self.prefix, table), dict[str, StoredRow]()
        for page in pages(ids):
            keys = [begin + row_id for row_id in page]
            values = self._ask(partial(_values, keys))
            for row_id, value in zip(page, values, strict=True):
                if value is not None:
                    rows[row_id] = decode_row(value)
        return rows

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        """Read index sets, a page in a round trip."""
        sets = self._by_text(table, slot, texts, lambda pipeline, key: pipeline.smembers(key))
        return {text: {row_id.decode() for row_id in ids} for text, ids in sets.items()}

    def scan_members(
        self, table: str, slot: int, texts: Collection[str]
    ) -> Iterable[Collection[str]]:
        """Scan the index sets of a page of texts side by side, with an SSCAN each in a round trip."""
        remaining = iter(texts)
        while page := list(islice(remaining, SCANNED_SETS)):
            cursors = dict.fromkeys((index_key(self.prefix, table, slot, text) for text in page), 0)
            while cursors:
                answers = self._ask(partial(_scan, cursors))
                cursors = {
                    key: cursor for key, (cursor, _) in zip(cursors, answers, strict=True) if cursor
                }
                yield {row_id.decode() for _, members in answers for row_id in members}

    def listed(
        self, table: str, number: int, texts: Collection[str], limit: int
    ) -> dict[str, list[str]]:
        """Read the beginnings of sorted sets, a page in a round trip."""
        lists = self._by_text(
            table,
            f"{LISTING}{number}",
            texts,
            lambda pipeline, key: pipeline.zrange(key, 0, limit - 1),
        )
        # The order has no space; an id may have.
        return {
            text: [member.decode().partition(" ")[2] for member in members]
            for text, members in lists.items()
        }

    def ranged(
        self,
        table: str,
        number: int,
        spans: Sequence[Span],
        limit: int,
        *,
        last_first: bool = False,
    ) -> list[list[Place]]:
        """Read parts of sorted sets, a page of them in a round trip."""
        answers: list[list[Place]] = []
        for page in pages(spans):

            def ask(server: redis.Redis, page: Sequence[Span] = page) -> list[Any]:
                pipeline = server.pipeline(transaction=False)
                for span in page:
                    key = index_key(self.prefix, table, f"{LISTING}{number}", span.text)
                    low = f"[{span.low}"
                    high = f"({span.high}"
                    if last_first:
                        pipeline.zrevrangebylex(key, high, low, span.skipped, limit)
                    else:
                        pipeline.zrangebylex(key, low, high, span.skipped, limit)
                return list(pipeline.execute())

            # The order has no space; an id may have.
            answers += [
                [Place._make(member.decode().split(" ", 1)) for member in members]
                for members in self._ask(ask)
            ]
        return answers

    def tallied(self, table: str, number: int, texts: Collection[str]) -> dict[str, dict[str, int]]:
        """Read hashes, a page in a round trip."""
        hashes = self._by_text(
            table, f"{TALLY}{number}", texts, lambda pipeline, key: pipeline.hgetall(key)
        )
        return {
            text: {field.decode(): int(value) for field, value in numbers.items()}
            for text, numbers in hashes.items()
        }

    def _by_text(
        self,
        table: str,
        slot: int | str,
        texts: Collection[str],
        request: Callable[[Any, str], object],
    ) -> dict[str, Any]:
        """Read what there is of each text; nothing is left out."""
        answers: dict[str, Any] = {}
        for page in pages(texts):
            keys = [index_key(self.prefix, table, slot, text) for text in page]

            def ask(server: redis.Redis, keys: Sequence[str] = keys) -> list[Any]:
                pipeline = server.pipeline(transaction=False)
                for key in keys:
                    request(pipeline, key)
                return list(pipeline.execute())

            pairs = zip(page, self._ask(ask), strict=True)
            answers |= {text: answer for text, answer in pairs if answer}
        return answers

    def _ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        try:
            return question(bytes_client(self.url))
        except redis.exceptions.RedisError as error:
            raise Failure(*state_failure(error, self.url, "the state of documents")) from None


def _scan(cursors: Mapping[str, int], server: redis.Redis) -> list[Any]:
    """Answer with the next cursor and some members of each set."""
    pipeline = server.pipeline(transaction=False)
    for key, cursor in cursors.items():
        pipeline.sscan(key, cursor, count=max(10, PAGE // len(cursors)))
    return list(pipeline.execute())


def _values(keys: list[str], server: redis.Redis) -> Any:
    return server.mget(keys)


def pages(items: Iterable[Item]) -> Iterable[list[Item]]:
    """Split what is asked for into lists, each for one request."""
    remaining = iter(items)
    while page := list(islice(remaining, PAGE)):
        yield page
