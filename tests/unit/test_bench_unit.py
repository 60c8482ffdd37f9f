"""A run of the bench whose view differs from its source has no number."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cases
from bench.cost import Cost
from bench.figure import Figure
from cdc.errors import DivergenceError


def stage(*, equal: bool) -> Any:
    meter = SimpleNamespace(cost=Cost(seconds=2.0))
    return SimpleNamespace(meter=lambda: nullcontext(meter), apply=lambda _: None, equal=lambda _: equal)


def test_no_number_without_equality() -> None:
    good, bad = (Figure("apply", "records/s", 1.0, "rival", changes=100) for _ in range(2))
    cases._ours(stage(equal=True), object(), good)  # type: ignore[arg-type]
    assert good.ours == [50.0]
    with pytest.raises(DivergenceError):
        cases._ours(stage(equal=False), object(), bad)  # type: ignore[arg-type]
    assert bad.ours == []
