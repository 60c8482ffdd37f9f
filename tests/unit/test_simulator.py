"""The simulator: its models keep the laws of what they are models of, and it finds planted bugs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from tests.contract import laws
from tests.simulator.found import FOUND, MENDED
from tests.simulator.history import history, parsed, sentences, shrunk
from tests.simulator.life import failure
from tests.simulator.planted import BUGS, planted
from tests.simulator.processes import Processes
from tests.simulator.views import KINDS, Link, Server
from tests.support.envelopes import table

NO_SPARK: Any = None
HISTORIES = 100


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """A history logs more than a person reads."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law_of_a_model(law: Callable[[laws.Harness], None], kind: str) -> None:
    """The same law as of a server, see `tests/contract/test_contract.py`."""
    server = Server()
    link = Link(Processes(), 0)
    law(laws.Harness(NO_SPARK, lambda: KINDS[kind](server, link), table("t.public.items")))


def test_random_histories() -> None:
    wrong = {made: failure(made) for made in map(history, range(HISTORIES))}
    assert {sentences(made): problem for made, problem in wrong.items() if problem} == {}


@pytest.mark.parametrize("text", MENDED)
def test_a_history_that_went_wrong_once(text: str) -> None:
    assert failure(parsed(text)) is None


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    """By a history that is right without it."""
    made = parsed(FOUND[bug])
    with planted(bug):
        assert failure(made)
    assert failure(made) is None


def test_a_seed_is_one_history_and_a_history_one_life() -> None:
    with planted("row lost by the connector"):
        made = next(h for h in map(history, range(99)) if failure(h))
        assert made == history(made.seed) == parsed(str(made))
        assert failure(made) == failure(made)


def test_a_history_that_goes_wrong_is_shrunk_to_what_matters() -> None:
    with planted("deletes ignored"):
        made = next(h for h in map(history, range(99)) if len(h.steps) > 9 and failure(h))
        small = shrunk(made, lambda h: failure(h) is not None)
        assert failure(small)
    assert 1 <= len(small.steps) <= 3
    # Whoever deletes had to put first.
    assert (
        "put item" in sentences(small)
        or "put order" in sentences(small)
        or "keep" in sentences(small)
    )
