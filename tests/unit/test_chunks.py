"""How a cache's rows are divided into calls: none too large, and each ends where another run could go on."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.report import Row
from sinks import redis_chunks
from sinks.redis_chunks import chunks, states
from tests.support.budget import budget

LARGE = ("v", "w")
View = dict[str, str]


class Change(NamedTuple):
    offset: int
    id: str
    document: str | None
    kept: list[str] | None

    def on(self, view: View) -> str | None:
        """What it makes of a row, with what the view has of it."""
        if self.document is None or self.kept is None:
            return self.document
        return json.dumps(
            {**json.loads(self.document), **{name: json.loads(view[self.id])[name] for name in self.kept}}
        )


def log(choices: Sequence[tuple[int, int]]) -> list[Change]:
    """Rows that begin whole; updates leave out some of what is large."""
    alive: set[str] = set()
    made = []
    for offset, (key, kind) in enumerate(choices):
        name, gone = f"k{key}", kind == 0
        whole = name not in alive or kind == 1
        kept = None if gone or whole else [LARGE[one] for one in range(2) if kind & (2 + one)] or ["v"]
        values = {"n": offset, **{column: f"{column}{offset}" for column in LARGE if column not in (kept or ())}}
        made.append(Change(offset, name, None if gone else json.dumps(values), kept))
        alive = alive - {name} if gone else alive | {name}
    return made


def model(changes: Iterable[Change]) -> View:
    view: View = {}
    for change in changes:
        document = change.on(view)
        if document is None:
            view.pop(change.id, None)
        else:
            view[change.id] = document
    return view


def folded(changes: Sequence[Change]) -> list[Row]:
    """What `order.fold` makes of a batch, sorted by `first`."""
    found = []
    for name in {change.id for change in changes}:
        history = [change for change in changes if change.id == name]
        newest = history[-1]
        wholes = [at for at, change in enumerate(history) if change.kept is None]
        older = history[wholes[-1] if wholes else 0 : -1][::-1] if newest.kept is not None else None
        places = [change.offset for change in older] if older is not None else None
        found.append(
            Row(
                name,
                newest.offset,
                min([newest.offset, *(places or ())]),
                newest.document,
                newest.kept,
                [{"row": change.document, "kept": change.kept} for change in older] if older is not None else None,
                len(history),
                0,
                0,
                places,
            )
        )
    return sorted(found, key=lambda row: row.first or 0)


def apply(view: View, part: Iterable[Row]) -> None:
    for state in {state.id: state for state in part}.values():
        document = state.document if state.kept is None else state.complete(view.get(state.id))
        assert document is not None or state.kept is None, "unknown"
        if document is None:
            view.pop(state.id, None)
        else:
            view[state.id] = json.dumps(json.loads(document), sort_keys=True)


def canonical(view: View) -> View:
    return {key: json.dumps(json.loads(document), sort_keys=True) for key, document in view.items()}


CHOICES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), min_size=1, max_size=60)


@given(choices=CHOICES, begin=st.floats(0, 1), rows=st.integers(1, 8), size=st.integers(60, 400))
@budget(100)
def test_every_cut_is_safe_and_no_call_too_large(
    choices: list[tuple[int, int]], begin: float, rows: int, size: int
) -> None:
    """At each cut the view is what the log says up to there, so a run that goes on from it ends as this one."""
    changes = log(choices)
    start = int(begin * len(changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_chunks, "CHUNK_ROWS", rows)
        patch.setattr(redis_chunks, "CHUNK_BYTES", size)
        view = canonical(model(changes[:start]))
        for part, reach in chunks(states(folded(changes[start:]))):
            assert len(part) <= rows
            assert len(part) == 1 or sum(map(redis_chunks.length, part)) <= size
            apply(view, part)
            cut = len(changes) if reach is None else reach
            # Changes that a newer one of the batch has followed leave no state: as far as the view can be told apart.
            assert view == canonical(superseded(changes, start, cut))
        assert view == canonical(model(changes))


def superseded(changes: Sequence[Change], start: int, cut: int) -> View:
    """The view at a cut, without what a later whole change of the batch has made void."""
    lasting = set(range(start))
    for row in folded(changes[start:]):
        lasting |= {row.offset or 0, *(row.places or ())}
    return model(change for change in changes[:cut] if change.offset in lasting)


def test_a_whole_partition_of_rows_that_were_completed_is_many_calls() -> None:
    """Finding 24: each is made from the first and from the last records of a batch."""
    count = 3000
    inserts = [(key, 1) for key in range(count)]
    updates = [(key, 2) for key in range(count)]
    changes = log([*inserts, *updates])
    found = [(len(part), reach) for part, reach in chunks(states(folded(changes)))]
    assert max(length for length, _ in found) <= redis_chunks.CHUNK_ROWS
    assert len(found) == 2 * count / redis_chunks.CHUNK_ROWS


def test_what_the_view_adds_counts() -> None:
    changes = log([(key, 1) for key in range(9)] + [(key, 2) for key in range(9)])
    rows = folded(changes[9:])
    parts = [len(part) for part, _ in chunks(states(rows), lambda _: redis_chunks.CHUNK_BYTES // 2)]
    assert parts == [2, 2, 2, 2, 1]


def row(name: str, offset: int, first: int, **told: Any) -> Row:
    return Row._make({**dict.fromkeys(Row._fields), "id": name, "offset": offset, "first": first, **told}.values())


def test_a_row_whose_past_is_void_is_not_cut_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete and a record in quarantine look alike, so the view can't be made what it was between them."""
    monkeypatch.setattr(redis_chunks, "CHUNK_ROWS", 1)
    older = [{"row": '{"w":1}', "kept": ["v"]}, {"row": None, "kept": None}]
    joined = row("a", 5, 1, document='{"v":1}', kept=["w"], older=older, places=[3, 1])
    plain = [row(f"p{at}", at, at, document="{}") for at in (0, 2, 4, 6)]
    found = list(chunks(states([plain[0], joined, *plain[1:]])))
    assert [([state.offset for state in part], reach) for part, reach in found] == [
        ([0], 1),
        ([2, 4, 5], 6),
        ([6], None),
    ]
