"""A writer that was stopped in mid-batch and goes on when another has taken its place takes nothing
back.

In:  a sink and a moment: just before the call of that number to its server. Out: Fenced, and the
heir isn't disturbed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.sink.contract import Sink
from tests.contract import laws
from tests.contract.switches import Moment
from tests.contract.test_contract import maker
from tests.support.budget import SCALE
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOMENTS = {
    "memory": range(1),
    "redis": range(4),
    "elasticsearch": range(0, 3, 2),
    "delta": range(0, 9, 8),
}
"""Not all where a round takes seconds; `make properties` tries every one."""
ALL = [
    (kind, number)
    for kind, some in MOMENTS.items()
    for number in (some if SCALE == 1 else range(24))
]


@pytest.fixture
def make(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path
) -> Callable[[], Sink]:
    return maker(request, kind, unique, tmp_path)


@pytest.mark.parametrize(("kind", "number"), ALL)
def test_a_stopped_writer_is_fenced(
    make: Callable[[], Sink], number: int, spark: "SparkSession", unique: str
) -> None:
    harness = laws.Harness(spark, make, table(f"{unique}.public.items"))
    came = laws.a_stopped_writer_is_fenced(harness, Moment(number).during)
    # Every sink looks at a position at least; how many calls there are after that is its own
    # affair.
    assert came or number > 1
