"""What `now()` is: the time of commits, or of a column."""

import json
from pathlib import Path

import pytest

from cdc.config import settings
from cdc.config.settings import Pipeline
from cdc.documents.engine import TAKE_S, ViewClocks
from cdc.documents.plan import Node, StatePlan, View
from cdc.documents.rows import latest_times
from cdc.model.position import Position
from cdc.scalar.instants import FIRST, microseconds
from tests.support.simulated import MemoryLog, SimulatedClock
from tests.unit.test_time_settings import GOOD, TABLES

TOPIC = "air.public.flights"
FLIGHTS = Node("flights", TABLES[0], ("id",))
COMMITS = View("commits", FLIGHTS, ())
EVENTS = View("events", FLIGHTS, (), clock="dep")
VIEWS = [COMMITS, EVENTS]


class Log:
    """A log of one table with two partitions, and what a state has of it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.clock = SimulatedClock()
        self.log = MemoryLog(self.clock)
        self.heartbeats = pipeline.heartbeat_topic
        self.log.create(TOPIC, 2)
        self.log.create(self.heartbeats, 1)
        self.seen: dict[str, int] = {}
        self.reached = (0, 0)
        self.clocks = ViewClocks(self.log, pipeline, lambda: dict(self.seen), self.clock.monotonic)

    def beat(self, committed_ms: int) -> None:
        source = {"ts_ms": committed_ms, "lsn": 1}
        value = {"op": "u", "after": {"pipeline": "air"}, "source": source}
        self.log.append(self.heartbeats, 0, b"{}", json.dumps(value).encode())

    def read(self) -> dict[str, int] | None:
        self.clock.now += TAKE_S
        positions = {TOPIC: Position(self.log.topics[TOPIC].id, self.reached)}
        now = self.clocks.read(VIEWS, [TOPIC], positions)
        return None if now is None else dict(now)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    path = tmp_path / "air.yaml"
    path.write_text(GOOD)
    return Log(settings.load(path, {}))


def test_no_time_counts_before_the_first_heartbeat(log: Log) -> None:
    assert [log.read() for _ in range(3)] == [None] * 3
    log.beat(5)
    assert log.read() == {"commits": 5000, "events": FIRST}


def test_an_idle_table_has_the_time_of_the_heartbeats(log: Log) -> None:
    for moment in range(1, 5):
        log.beat(moment)
        assert log.read() == {"commits": moment * 1000, "events": FIRST}


def test_no_row_moves_a_clock_beyond_the_commits(log: Log) -> None:
    log.beat(7)
    log.seen = {"events": 99_000}
    assert log.read() == {"commits": 7000, "events": 7000}


def test_a_row_of_the_future_moves_no_clock() -> None:
    texts = ["2013-01-01T10:00:00.000000Z", "2099-01-01T00:00:00.000000Z", "infinity", None]
    other_columns = {"id": 1, "origin": None, "tail": None, "day": None}
    rows = [json.dumps({**other_columns, "dep": text}).encode() for text in texts]
    plan = StatePlan((COMMITS, EVENTS))
    [table] = plan.tables
    now = microseconds("2026-01-01T00:00:00.000000Z")
    assert now is not None
    assert latest_times(plan, table, rows, now) == {"events": microseconds(str(texts[0]))}
    assert latest_times(plan, table, rows[1:], now) == {}
    assert latest_times(StatePlan((COMMITS,)), table, rows, now) == {}


def test_a_time_counts_once_the_state_has_the_ends_and_stays_until_the_next_one_does(
    log: Log,
) -> None:
    log.beat(40)
    log.log.append(TOPIC, 0, b"1", b"{}")
    assert [log.read() for _ in range(3)] == [None] * 3
    log.reached = (1, 0)
    assert log.read() == {"commits": 40_000, "events": FIRST}
    log.beat(50)
    log.log.append(TOPIC, 1, b"2", b"{}")
    assert [log.read() for _ in range(3)] == [{"commits": 40_000, "events": FIRST}] * 3
    log.reached = (1, 1)
    assert [log.read() for _ in range(2)][-1] == {"commits": 50_000, "events": FIRST}
