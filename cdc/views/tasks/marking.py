"""Mark all documents as dirty that were sent to their topics, and note what the topics have of views
that send each change once, and which windows they have closed: tasks on the executors, which read the
topics.

Invariant: no key leaves the executors.
"""

import hashlib
from collections.abc import Callable, Mapping

import msgspec

from cdc.codec.members import members
from cdc.codec.table import codec
from cdc.errors import ConnectorError
from cdc.sink.lane import Failure
from cdc.sink.lane_task import Blocks
from cdc.views.closing import SAID, closed_at
from cdc.views.plan import View
from cdc.views.state import State, Turn
from cdc.views.tasks.report import Report


class _Value(msgspec.Struct):
    after: msgspec.Raw


_decode = msgspec.json.Decoder(_Value).decode


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


def mark(
    open_state: Callable[[], State],
    turn: Turn,
    views: Mapping[str, View],
    blocks: Blocks,
) -> bytes:
    """Mark the documents of records. Returns an encoded `Report`.

    views: by topic
    """
    report = Report(done=True)
    try:
        state = open_state()
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
                    row = bytes(_decode(value).after) if value else None
                    digests[document_id] = row_digest(row)
                    if row is not None and (at := closed_at(view, row)) is not None:
                        digests[document_id] = SAID
                        closed.append(at)
            state.mark(view.name, keys)
            state.note_digests(turn, view.name, digests)
            if closed:
                state.note_closed(turn, view.name, max(closed))
    except (Failure, ConnectorError) as failure:
        report.failure = failure.kind
        report.message = failure.message
    return report.encode()
