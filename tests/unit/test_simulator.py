"""The simulator: its models keep the laws of what they stand for, it finds planted bugs, and some histories are right."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from tests.contract import laws
from tests.simulator.history import History, Step, history, told
from tests.simulator.life import failure
#X
from tests.simulator.processes import Processes
from tests.simulator.views import KINDS, Link, Server
from tests.support.envelopes import table

NO_SPARK: Any = None
HISTORIES = 100


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A history logs more than a person reads."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law_of_a_model(law: Callable[[laws.Harness], None], kind: str) -> None:
    """The same law as of the server that it stands for, see `tests/contract/test_contract.py`."""
    server = Server()
    link = Link(Processes(), 0)
    law(laws.Harness(NO_SPARK, lambda: KINDS[kind](server, link), table("t.public.items")))
