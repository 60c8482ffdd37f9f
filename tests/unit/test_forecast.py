"""What is foretold from the present pace, and when nothing is."""

from dataclasses import replace

import pytest

from cdc.cli.status import draw_status
from cdc.control.heartbeat import Heartbeat
from cdc.observe.diagnosis import diagnose
from cdc.observe.forecast import (
    LEAST_ROWS,
    catch_up_s,
    needed_memory_bytes,
    slot_loss_s,
    wal_pace,
)
from cdc.observe.run_log import LagSample
from cdc.observe.status import DocumentsStatus, HeartbeatStatus, SinkStatus, ViewStatus
from cdc.readiness.checks import check_slot_risk
from cdc.readiness.facts import Slot
from cdc.serve.drawing import describe_hops
from tests.support.page import good_status
from tests.unit.test_screens import shown

NOW = 1_800_000_000.0
SLOT = Slot(
    False, None, "0/1", "0/1", "extended", 600_000, 900_000, 1_200_000, "pgoutput", "shop", None, None
)  # fmt: skip
STUCK = HeartbeatStatus(age_s=300.0, delay_s=0.1, interval_s=5.0)


def views(*lags: int | None) -> list[ViewStatus]:
    return [ViewStatus(f"public.t{number}", lag) for number, lag in enumerate(lags)]


def sample(ago_s: float, records: int | None) -> LagSample:
    return LagSample(NOW - ago_s, 1.0, records)


@pytest.mark.parametrize(
    ("samples", "lags", "expected"),
    [
        ([sample(300, 4_000)], (600, 400), 100.0),
        ([sample(5_000, 9_000), sample(300, 4_000), sample(120, 2_000)], (1_000,), 100.0),
        ([sample(300, 4_000)], (0, 0), None),
        ([sample(300, 4_000)], (1_000, None), None),
        ([sample(300, 1_000)], (1_000,), None),
        ([sample(300, 500)], (1_000,), None),
        ([sample(300, None), sample(200, 3_000)], (1_000,), 100.0),
        ([sample(30, 4_000)], (1_000,), None),
        ([sample(5_000, 4_000)], (1_000,), None),
        ([], (1_000,), None),
    ],
    ids=[
        "it shrinks", "the last minutes count", "caught up", "unknown now", "it stands still", "it grows",
        "unknown then", "a moment is no pace", "long ago", "no sample",
    ],
)  # fmt: skip
def test_when_a_sink_has_caught_up(
    samples: list[LagSample], lags: tuple[int | None, ...], expected: float | None
) -> None:
    assert catch_up_s(samples, views(*lags), NOW) == expected


def test_when_a_slot_is_given_up() -> None:
    """600,000 bytes in 300 s: 1,200,000 more in 600 s."""
    assert slot_loss_s(SLOT, STUCK) == 600.0
    assert slot_loss_s(replace(SLOT, safe_wal_size=-1), STUCK) == 0.0


def test_a_transaction_holds_a_slot_back_while_the_heartbeat_beats() -> None:
    """The log that was written between two heartbeats tells the pace: 600,000 bytes in 300 s."""
    pace = wal_pace(Heartbeat(1, 0, 10, 400_000), Heartbeat(9, 300_000, 300_010, 1_000_000))
    assert pace == 2_000.0
    beats = HeartbeatStatus(age_s=1.0, delay_s=0.1, interval_s=5.0, wal_per_s=pace)
    held_back = replace(SLOT, lag_bytes=0, oldest_transaction_s=600.0)
    assert slot_loss_s(held_back, beats) == 600.0
    status = good_status(slot=held_back, heartbeat=beats, slot_loss_s=600.0)
    (finding,) = status.findings
    assert finding.code == "slot-at-risk"
    assert "in 10 min at the present pace" in finding.message
    assert slot_loss_s(replace(held_back, oldest_transaction_s=5.0), beats) is None
    assert slot_loss_s(held_back, replace(beats, wal_per_s=None)) is None
    assert slot_loss_s(held_back, replace(beats, wal_per_s=0.0)) is None
    # A moment is no pace.
    assert wal_pace(Heartbeat(1, 0, 10, 0), Heartbeat(2, 30_000, 30_010, 1_000_000)) is None


@pytest.mark.parametrize(
    ("slot", "heartbeat"),
    [
        (None, STUCK),
        (SLOT, None),
        (replace(SLOT, safe_wal_size=None), STUCK),
        (replace(SLOT, lag_bytes=0), STUCK),
        (SLOT, replace(STUCK, age_s=2.0)),
        (SLOT, replace(STUCK, age_s=30.0)),
    ],
    ids=["no slot", "no heartbeat", "no limit", "all confirmed", "it beats", "only just late"],
)
def test_nothing_is_said_of_a_slot(slot: Slot | None, heartbeat: HeartbeatStatus | None) -> None:
    assert slot_loss_s(slot, heartbeat) is None


def test_a_slot_that_is_given_up_soon_is_a_risk_while_there_is_room() -> None:
    assert list(check_slot_risk("shop", 9_000, 1_000)) == []
    assert list(check_slot_risk("shop", 9_000, 1_000, 100_000.0)) == []
    (fault,) = check_slot_risk("shop", 900 << 20, 100 << 20, 1_200.0)
    assert fault.key == "slot-at-risk"
    assert "After 900 MiB more of log, in 20 min at the present pace, Postgres" in fault.message


def test_a_sink_that_catches_up_needs_nobody() -> None:
    late = ViewStatus("public.orders", 1_000, 90.0)
    sink = SinkStatus("cache", "running", views=(late,))
    messages = []
    for forecast in (None, 240.0):
        status = replace(good_status(), sinks=(replace(sink, catch_up_s=forecast),), findings=())
        (finding,) = [f for f in diagnose(status).findings if f.code == "sink-behind"]
        messages.append(finding.message)
        assert finding.fix == "cdc -p FILE status --watch"
    assert "If the lag doesn't shrink, the run needs more cores" in messages[0]
    assert "At the present pace it has caught up in 4 min." in messages[1]


def test_the_page_and_the_screen_have_forecasts() -> None:
    late = ViewStatus("public.orders", 1_000, 90.0)
    sink = SinkStatus("cache", "running", rows_per_s=500.0, views=(late,), catch_up_s=240.0)
    status = good_status(sink, slot_loss_s=1_200.0)
    hops = describe_hops(status)
    assert "slot is lost in 20 min" in hops.source.lines
    assert "500 changes/s, 4 min left" in hops.branches[0].hop.lines
    text = " ".join(shown(draw_status(status, "")).split())
    assert "given up in 20 min at this pace" in text
    assert "caught up in 4 min" in text


ROWS = LEAST_ROWS
LOADING = DocumentsStatus(
    {"a": ROWS, "b": 0}, {"a": 100 * ROWS, "b": 0}, {}, 0, 200 * ROWS, 1000 * ROWS
)
"""A server that uses two bytes for each of its rows; `b` has none yet."""


@pytest.mark.parametrize(
    ("documents", "records", "expected"),
    [
        (LOADING, {"a": (3 * ROWS, ROWS)}, 800),
        (LOADING, {"a": (3 * ROWS, ROWS), "b": (2 * ROWS, 0)}, 1200),
        # Of three records two changed a row that was there.
        (LOADING, {"a": (3 * ROWS, 3 * ROWS)}, 400),
        # All rows of b went again, as those of an outbox.
        (LOADING, {"a": (ROWS, ROWS), "b": (2 * ROWS, 2 * ROWS)}, 400),
        # What the server holds besides doesn't grow with the state.
        (replace(LOADING, used_bytes=900 * ROWS), {"a": (ROWS, ROWS)}, 1300),
        (LOADING, {"a": (0, ROWS), "b": (0, 0)}, None),
        (LOADING, None, None),
        (replace(LOADING, rows={"a": ROWS - 1}), {"a": (3 * ROWS, ROWS)}, None),
        (replace(LOADING, used_bytes=None), {"a": (3 * ROWS, ROWS)}, None),
    ],
)
def test_the_memory_that_a_state_will_take(
    documents: DocumentsStatus,
    records: dict[str, tuple[int, int]] | None,
    expected: int | None,
) -> None:
    """records: by table, how many wait and are applied. expected: in bytes by row that is there."""
    if records is not None:
        waiting = {name: waits for name, (waits, _) in records.items()}
        applied = {name: count for name, (_, count) in records.items()}
        documents = replace(documents, waiting=waiting, applied=applied)
    estimate = needed_memory_bytes(documents)
    assert estimate == (None if expected is None else expected * ROWS)


def test_a_state_that_will_not_fit_is_a_risk_while_it_is_built() -> None:
    loading = replace(LOADING, waiting={"a": 9 * ROWS}, applied={"a": ROWS})
    status = replace(good_status(documents=loading), findings=())
    (finding,) = diagnose(status).findings
    assert (finding.code, finding.severity) == ("state-too-large", "warning")
    assert "uses about 38 MiB, and maxmemory is 19 MiB" in finding.message
    for limit in (2001 * ROWS, None):
        fitting = replace(loading, limit_bytes=limit)
        assert diagnose(replace(status, documents=fitting)).findings == ()
