"""A watch of the sample's latency that fails is reported when the probe ends, and ends nothing else."""

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from cdc.sample.probe import Probe, Watch
from tests.support.wait import wait_until


def test_a_watch_that_fails_is_reported(postgres_dsn: str) -> None:
    now = datetime.now(UTC)

    def failing_find(_: list[str]) -> Mapping[str, datetime]:
        raise ConnectionError("the view is gone")

    views = {
        "gone": Watch(failing_find, 0.01, {"a": (now, now)}),
        "there": Watch(lambda _: {"a": now}, 0.01, {"a": (now, now)}),
    }
    with pytest.raises(ConnectionError, match="the view is gone"), Probe(postgres_dsn, views):
        wait_until(lambda: views["there"].latencies, 10, "the other view to be looked at")
    assert not views["there"].pending
