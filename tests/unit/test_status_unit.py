"""Lag, freshness and the slow hop from plain numbers; the rules that admit a server."""

import json
import os
import socket
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.control import registrations
from cdc.control.registrations import Captured, Registration
from cdc.errors import SourceError
from cdc.generations.registry import Damage, Generations
from cdc.kafka.log_continuity import pending_records
from cdc.model.finding import Finding, exit_code, find, verdict
from cdc.model.generation import GENERATION
from cdc.model.position import Position, Server, ViewCheckpoint
from cdc.model.table import Table
from cdc.model.wording import clock
from cdc.observe import collection
from cdc.observe.activity import Activity, LookConnections, describe_sink, stands_s
from cdc.observe.collection import collect, find_tombstones_at_risk, measure
from cdc.observe.diagnosis import diagnose, document, proof_sentence, slow_hop
from cdc.observe.registration_findings import find_registration_troubles
from cdc.observe.status import (
    ClockStatus,
    ConnectorStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.postgres import catalog, source
from cdc.readiness.facts import Slot
from tests.support.pipelines import pipeline, position_by_table
from tests.support.wait import answer_within

TABLE = Table("public", "orders", (), (), "shop.public.orders")
END = Position("id-1", (10, 20))
SLOT = Slot(True, 1, "0/1", "0/2", "reserved", 500, 900, None, "pgoutput", "shop", None, None)
GOOD = Status(
    "shop",
    ConnectorStatus("RUNNING", ("RUNNING",), None),
    SLOT,
    HeartbeatStatus(1.0, 0.02, 2.0),
    (SinkStatus("cache", "running", views=(ViewStatus("public.orders", 0, 0.0),)),),
)


def stored(*offsets: int, topic_id: str = "id-1") -> ViewCheckpoint:
    return ViewCheckpoint(Position(topic_id, offsets), "writer", rows=7, changed_at=5.0)


@pytest.mark.parametrize(
    ("checkpoint", "waiting", "lag"),
    [
        (stored(10, 20), {}, (0, 0.0)),
        (stored(4, 17), {(0, 4): 97.0, (1, 17): 93.5}, (9, 6.5)),
        # It waits for everything.
        (None, {(0, 0): 40.0, (1, 0): 60.0}, (30, 60.0)),
        # What is left may be markers only.
        (stored(9, 20), {(0, 9): None}, (1, 0.0)),
        # Clocks disagree.
        (stored(9, 20), {(0, 9): 101.0}, (1, 0.0)),
        # The topic was created again, or has got another number of partitions.
        (stored(10, 20, topic_id="id-0"), {}, (None, None)),
        (stored(10), {}, (None, None)),
    ],
)
def test_lag_is_the_age_of_the_oldest_record_that_waits(
    checkpoint: ViewCheckpoint | None,
    waiting: dict[tuple[int, int], float | None],
    lag: tuple[int | None, float | None],
) -> None:
    """`waiting`: the next record of each partition, and when it was written."""
    assert pending_records(TABLE.topic, checkpoint, END) == [
        (TABLE.topic, *place) for place in waiting
    ]
    times = {(TABLE.topic, *place): int(at * 1000) for place, at in waiting.items() if at}
    view = measure(TABLE, checkpoint, END, times, now=100)
    assert (view.lag_records, view.lag_seconds) == lag
    assert (view.changes, view.at) == ((7, 5.0) if checkpoint else (0, None))


def with_lag(name: str, seconds: float, state: str = "running") -> SinkStatus:
    return SinkStatus(name, state, views=(ViewStatus("public.orders", 5, seconds),))


def trouble(code: str, message: str, sink: str | None = None) -> Finding:
    return find(code, sink or "it", message, "repair it", sink=sink)


NOW = 1_800_000_000.0
BOOM = ConnectorStatus("RUNNING", ("FAILED",), "Boom")
MISSING = ConnectorStatus("MISSING", (), None)
CACHE_AWAY = trouble("sink-unreachable", "The cache is away.", "cache")
ASIDE = {"public.orders": ["Wider.", "cdc rebuild cache"]}


def having(**parts: Any) -> Status:
    return replace(GOOD, **parts)


def with_sinks(*sinks: SinkStatus) -> Status:
    return replace(GOOD, sinks=sinks)


def with_cache(seconds: float, state: str = "running", **parts: Any) -> Status:
    return with_sinks(replace(with_lag("cache", seconds, state), **parts))


def uncompared(seconds: float, **parts: Any) -> Status:
    sinks = (replace(GOOD.sinks[0], compared_s=seconds),)
    return replace(GOOD, **{"definitions": "comparison", "sinks": sinks, **parts})


BEATING = HeartbeatStatus(1.0, 0.02, 2.0, committed_at=NOW)
RARE = replace(BEATING, interval_s=60.0)
LATE = HeartbeatStatus(60, 0.1, 2)
ORDERS_VIEW = ViewStatus("public.orders", 0, 0.0)
REFUSED = replace(ORDERS_VIEW, problem="has lost records.", hint="cdc -p FILE run")
LAGGING = replace(ORDERS_VIEW, lag_records=9, lag_seconds=90.0)
OTHERS_ASIDE = {
    "view.other": ["It has no column a.", "cdc -p FILE views plan"],
    "public.orders": ["there is no topic yet", "cdc -p FILE register"],
}


def clocked(
    at: float, column: str | None = None, heartbeat: HeartbeatStatus = BEATING, **stream: Any
) -> Status:
    """A pipeline whose view `overdue` has a clock, and the stream of its state."""
    sink = SinkStatus("documents", "running", views=(ORDERS_VIEW,))
    documents = DocumentsStatus({}, {}, {}, 0, clocks={"overdue": ClockStatus(at, column)})
    sinks = (*GOOD.sinks, replace(sink, **stream))
    return replace(GOOD, heartbeat=heartbeat, sinks=sinks, documents=documents)


def with_clock(at: float, **stream: Any) -> Status:
    return diagnose(clocked(at, **stream))


def paused(state: str) -> Status:
    return with_cache(900, state, paused_by="ann@host", since=5.0)


STATUSES = {
    "all is well": GOOD,
    "a second behind": with_cache(1),
    "half a minute behind": with_sinks(with_lag("cache", 9), with_lag("search", 30)),
    "slow": with_sinks(with_lag("cache", 9), with_lag("search", 90)),
    "no run": with_cache(9, "not running"),
    "no run of one sink": with_sinks(with_lag("cache", 9, "not running"), with_lag("search", 1)),
    "no run, since": with_sinks(replace(GOOD.sinks[0], state="not running", since=8.0)),
    # A warehouse that a run keeps current unseen is some seconds late by design.
    "unread and a little late": with_cache(9, "unknown"),
    "unread and late": with_cache(90, "unknown"),
    "unread and not late": with_sinks(replace(GOOD.sinks[0], state="unknown")),
    "caught up and late": with_cache(90, "caught up"),
    "heartbeats are late": having(heartbeat=LATE),
    "commits come a little late": having(heartbeat=HeartbeatStatus(1, 40, 2)),
    "commits come late": having(heartbeat=HeartbeatStatus(1, 90, 2)),
    "no heartbeat": having(heartbeat=None),
    "the first snapshot": having(heartbeat=None, slot=None, snapshot_records=4_200),
    "a task has failed": having(connector=BOOM),
    "a change can't be sent": having(connector=replace(BOOM, unsendable="public.a: it is keyless")),
    # What the connector refuses stays in the log, whatever becomes of the table.
    "columns alike": having(connector=replace(BOOM, trace="Table 'a' has columns that differ only by case.")),
    "no connector": having(connector=MISSING),
    "the connector is stopped": having(connector=ConnectorStatus("STOPPED", (), None)),
    "the connector is paused": having(connector=ConnectorStatus("PAUSED", ("PAUSED",), None)),
    "no slot": having(slot=None),
    "a lost slot": having(slot=replace(SLOT, wal_status="lost")),
    "no slot, and a task has failed": having(slot=None, connector=BOOM),
    "no slot, and no connector": having(slot=None, connector=MISSING),
    "Kafka is away": having(findings=(trouble("kafka-unreachable", "Kafka is away."),)),
    "Postgres is away": having(findings=(trouble("source-unreachable", "Away."),)),
    "a sink is away": having(findings=(CACHE_AWAY,)),
    "a table has slipped": having(findings=(trouble("table-slipped", "A table was renamed."),)),
    "a sink has failed": with_cache(1, "failed", error="Full."),
    "a sink waits": with_cache(1, "waiting", error="Away.", hint="nothing to do"),
    "a sink is silent": with_cache(1, looked_s=40.0),
    "a batch is stuck": with_cache(90, stands_s=40.0),
    "a batch takes its time": with_cache(90, stands_s=9.0),
    "a batch is stuck, for its sink is away": replace(with_cache(1, stands_s=40.0), findings=(CACHE_AWAY,)),
    "a view has stopped": with_cache(9, views=(ViewStatus("t", problem="It is gone.", hint="cdc rebuild cache"),)),
    "a table waits": with_cache(900, aside=ASIDE, aside_since={"public.orders": 7.0}),
    "a record in quarantine": with_cache(0, views=(ViewStatus("public.orders", 0, 0.0, quarantined=2),)),
    "quarantine, and no connector": replace(with_cache(0, views=(ViewStatus("t", quarantined=2),)), connector=MISSING),
    "definitions uncompared": uncompared(61.0),
    "definitions compared": uncompared(59.0),
    "definitions by triggers": uncompared(61.0, definitions="event triggers"),
    # Its lag and its ended run are no trouble of their own: somebody has decided so.
    "a paused sink": paused("paused"),
    "a paused sink, not yet obeyed": paused("running"),
    "a paused sink without a run": paused("not running"),
    "no heartbeat can come from Postgres": having(heartbeat=LATE, findings=(trouble("source-unreachable", "Away."),)),
    "no heartbeat can come through Kafka": having(heartbeat=LATE, findings=(trouble("kafka-unreachable", "Away."),)),
    "a clock stands": clocked(NOW - 90),
    "a clock stands for a little": clocked(NOW - 50),
    "a clock stands between two heartbeats": clocked(NOW - 90, heartbeat=RARE),
    "a clock stands, and heartbeats are rare": clocked(NOW - 190, heartbeat=RARE),
    "a clock is held back by a view": clocked(NOW - 90, views=(REFUSED,)),
    # It stands as it should: no row comes, or its state gets nothing or has much to do.
    "the clock of a column": clocked(NOW - 1e6, "dep_time"),
    "the clock of a state that is behind": clocked(NOW - 90, views=(LAGGING,)),
    "the clock of a state without a run": clocked(NOW - 90, state="not running"),
    "the clock of a state whose run has ended": clocked(NOW - 90, state="caught up"),
    "the clock of a paused state": clocked(NOW - 90, state="paused", paused_by="me"),
    "the clock of a silent state": clocked(NOW - 90, looked_s=40.0),
    "the clock of late heartbeats": clocked(NOW - 91, heartbeat=replace(LATE, age_s=90.0, committed_at=NOW - 90)),
    "the clock of heartbeats without times": clocked(NOW - 90, heartbeat=HeartbeatStatus(1.0, 0.02, 2.0)),
    # The time of Postgres has gone back.
    "a clock is ahead": clocked(NOW + 300),
    "the clock of a column is ahead": clocked(NOW + 300, "dep_time"),
    "a clock is a little ahead": clocked(NOW + 50),
}  # fmt: skip
SENTENCES = Path(__file__).with_name("statuses.txt")
"""What is said of each: the verdict and the exit code; the first finding, its table, sink and time; the
sentence; below them each further finding with what it says. `python -m tests.unit.test_status_unit`
writes it.
"""


def sentences() -> str:
    """What a person and a monitor see of each status."""
    lines = []
    for name, status in STATUSES.items():
        diagnosis = diagnose(status)
        output = json.loads(json.dumps(document(diagnosis)))
        assert output["verdict"] == verdict(diagnosis.findings)
        assert output["exit_code"] == exit_code(diagnosis.findings)
        assert all(finding["fix"] and finding["why"] for finding in output["findings"])
        sentence = slow_hop(diagnosis)
        assert output["slow_hop"] == sentence
        assert "Next: " in sentence
        assert not sentence.endswith(("..", "?."))
        found = [
            " ".join(str(finding[part]) for part in ("code", "table", "sink", "since"))
            for finding in output["findings"]
        ]
        verdict_line = f"{output['verdict']} {output['exit_code']}"
        lines.append(f"{name}: {'; '.join([verdict_line, *found[:1], sentence])}\n")
        lines += [
            f"    {place}; {finding['message']} Next: {finding['fix']}\n"
            for place, finding in zip(found[1:], output["findings"][1:], strict=True)
        ]
    return "".join(lines)


def test_each_status_has_its_verdict_its_finding_and_its_sentence() -> None:
    assert sentences() == SENTENCES.read_text()


def test_a_sink_that_starts_again_by_itself_says_when() -> None:
    failed = replace(GOOD.sinks[0], state="failed", error="Full.", hint="h", restart_at=NOW + 40)
    (finding,) = diagnose(with_sinks(failed)).findings
    assert f"starts again by itself at {clock(NOW + 40)}: Full." in finding.message


def test_what_holds_a_clock_back_is_a_table_and_no_view() -> None:
    *_, stands = with_clock(NOW - 90, aside=OTHERS_ASIDE).findings
    assert "it waits for the topic of public.orders, which isn't applied" in stands.message
    assert stands.fix == "cdc -p FILE register"


UNREACHABLE = {"source-unreachable", "connect-unreachable", "kafka-unreachable"}


@pytest.mark.parametrize("load", [0.5, 12.5])
def test_what_hangs_is_said_to_give_no_answer_and_the_rest_is_reported(
    monkeypatch: pytest.MonkeyPatch, load: float
) -> None:
    """A sink, and a server that takes connections and says nothing: as a stopped process does. On a
    machine with more work than cores, one that is up may only be slow.
    """
    monkeypatch.setattr("os.getloadavg", lambda: (load * (os.cpu_count() or 1), 0.0, 0.0))
    release = threading.Event()

    def hang(_: Table) -> ViewCheckpoint | None:
        release.wait(60)
        return None

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        shop = pipeline(
            "shop",
            f"postgresql://owner@127.0.0.1:{port}/shop",
            "public.orders",
            kafka=f"127.0.0.1:{port}",
            connect=f"http://127.0.0.1:{port}",
        )
        positions = {
            "search": position_by_table(hang),
            "cache": position_by_table(lambda _: stored(3, 4)),
        }
        # Two waits of 4 s, one after the other, would be 8.
        status = answer_within(8, lambda: collect(shop, positions=positions))
    release.set()
    findings = [each for each in status.findings if "no answer within 4 s" in each.message]
    assert {finding.code for finding in findings} == UNREACHABLE | {"sink-unreachable"}
    assert {"only be slow" in finding.message for finding in findings} == {load > 1}
    search, cache = status.sinks
    assert search.views == (ViewStatus("public.orders"),)
    assert (cache.views[0].changes, cache.views[0].lag_records) == (7, None)


def test_a_server_that_begins_to_hang_during_a_look_is_named_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Postgres has answered about its slot, and then nothing of its definitions."""
    release = threading.Event()
    monkeypatch.setattr(collection, "ANSWER_S", 2.0)
    monkeypatch.setattr(collection, "read_slot", lambda _: GOOD.slot)
    monkeypatch.setattr(collection, "read_definitions", lambda _: release.wait(60))
    shop = pipeline("shop", "postgresql://owner@127.0.0.1:1/shop", "public.orders")
    status = collect(shop, positions={})
    release.set()
    (finding,) = [each for each in status.findings if each.code == "source-unreachable"]
    assert finding.message.startswith("Postgres -> Kafka can't be judged: Postgres gives no answer")
    assert status.slot == GOOD.slot


def test_a_heartbeat_within_its_interval_is_not_late() -> None:
    assert not HeartbeatStatus(6.9, 0.0, 2.0).late
    assert HeartbeatStatus(7.1, 0.0, 2.0).late


def test_every_part_that_is_down_is_named_and_the_rest_told() -> None:
    checkpoint = stored(3, 4)
    shop = pipeline("shop", "postgresql://owner:s3cret@127.0.0.1:1/shop", "public.orders")
    status = collect(shop, positions={"cache": position_by_table(lambda _: checkpoint)})
    assert {finding.code for finding in status.findings} == UNREACHABLE
    assert all(finding.fix for finding in status.findings)
    assert status.sinks[0].views == (ViewStatus("public.orders", changes=7, at=5.0, generation=""),)
    assert "s3cret" not in json.dumps(asdict(status))


FIRST = Server("7", 1)
ORDERS = Registration(FIRST, 0, {"public.orders": Captured()})
ITEMS_TOO = replace(ORDERS, tables={**ORDERS.tables, "public.items": Captured()})
GIVEN_UP = replace(ORDERS, tables={"public.items": Captured()})
PRESENT, ITEMS = (catalog.Candidate("public", name) for name in ("orders", "items"))
ALIKE = [PRESENT, catalog.Candidate("public", "Orders")]
UNLOGGED = [replace(PRESENT, unlogged=True), ITEMS]
KEYLESS = [replace(PRESENT, keyed=False), ITEMS]
PART = [replace(PRESENT, root="public.items"), ITEMS]
ALL = ["public.*"]
UNDECIDED = ("tables-undecided", "degraded", "would have one name")
SLIPPED = "public.orders is captured, and by patterns in source.tables alone it no longer would be"


@pytest.mark.parametrize(
    ("tables", "registration", "candidates", "server", "expected"),
    [
        (ALL, ORDERS, [PRESENT], FIRST, []),
        # Two tables whose views would have one name: what the pattern means now can't be said.
        (ALL, None, ALIKE, FIRST, [UNDECIDED]),
        (ALL, ORDERS, ALIKE, FIRST, [UNDECIDED]),
        (ALL, ORDERS, ALIKE, Server("8", 1), [("another-server", "down", "another server"), UNDECIDED]),
        (ALL, ORDERS, ALIKE, Server("7", 2), [("server-promoted", "degraded", "was promoted"), UNDECIDED]),
        # Registered as public.*, then misspelt: there is nothing to look at, and that isn't well.
        (
            ["pubilc.*"], ORDERS, [PRESENT], FIRST,
            [("tables-undecided", "down", "pubilc.* in source.tables means none")],
        ),
        (["public.ord*"], ORDERS, [PRESENT], FIRST, []),
        (ALL, ITEMS_TOO, UNLOGGED, FIRST, [("table-slipped", "degraded", f"{SLIPPED}: not logged")]),
        (ALL, ITEMS_TOO, KEYLESS, FIRST, [("table-slipped", "degraded", f"{SLIPPED}: no primary key")]),
        # Who gives a table up, or lists it by its name, isn't reported; nor is a part of another.
        (ALL, GIVEN_UP, UNLOGGED, FIRST, []),
        ([*ALL, "public.orders"], ITEMS_TOO, UNLOGGED, FIRST, []),
        (ALL, ITEMS_TOO, PART, FIRST, []),
    ],
)  # fmt: skip
def test_a_registration_is_compared_with_the_file_the_catalog_and_the_server(
    tables: list[str],
    registration: Registration | None,
    candidates: list[catalog.Candidate],
    server: Server,
    expected: list[tuple[str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "connect_to_read", lambda _: nullcontext())
    monkeypatch.setattr(source, "server", lambda _: server)
    monkeypatch.setattr(registrations, "read", lambda *_: registration)
    monkeypatch.setattr(catalog, "candidates", lambda _: candidates)
    pool: Any = SimpleNamespace(borrowed=lambda _: nullcontext())
    shop = pipeline("shop", "", *tables).with_tables(registration.tables if registration else [])
    findings = find_registration_troubles(shop, pool)
    assert [(finding.code, finding.severity) for finding in findings] == [
        (code, severity) for code, severity, _ in expected
    ]
    for finding, (code, _, words) in zip(findings, expected, strict=True):
        assert words in finding.message
        if code == "table-slipped":
            assert 'ALTER PUBLICATION shop DROP TABLE ONLY "public"."orders"' in finding.message


def test_a_registration_that_could_not_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SourceError("Not for you.", hint="cdc -p FILE migrate")

    for part in ("read_slot", "read_connector", "read_definitions", "read_topics"):
        monkeypatch.setattr(collection, part, lambda *_: None)
    monkeypatch.setattr(LookConnections, "read_activity", lambda *_: None)
    monkeypatch.setattr(collection, "find_registration_troubles", refuse)
    (unread,) = collect(pipeline("shop", "", "public.orders"), positions={}).findings
    assert (unread.code, unread.message) == ("registration-unreadable", "Not for you.")


def test_a_batch_stands_still_while_no_view_of_it_moves() -> None:
    hung = Progress("cache", RunState.APPLYING, busy=True, published_at=NOW - 40).aged(NOW)
    before, later = ViewStatus("public.a", at=NOW - 60), ViewStatus("public.b", at=NOW - 3)
    assert stands_s(hung, [before], NOW) == 40
    assert stands_s(hung, [before, later], NOW) == 3
    # Nothing was ever applied; a clock of another host is ahead; no batch is at hand.
    assert stands_s(hung, [ViewStatus("public.a")], NOW) == 40
    assert stands_s(hung, [replace(later, at=NOW + 9)], NOW) == 0
    assert stands_s(replace(hung, busy=False).aged(NOW), [before], NOW) == 0


SHOP_OF_A_DAY = pipeline("shop", "", "public.orders", delete_retention_hours=24)


def at_risk(view: ViewStatus, state: str = "not running", **fields: Any) -> list[Finding]:
    sink = SinkStatus("cache", state, views=(view,), **fields)
    return list(find_tombstones_at_risk(SHOP_OF_A_DAY, [sink], NOW))


def view_behind(hours: float) -> ViewStatus:
    return ViewStatus("public.orders", 5, hours * 3600, 7, NOW - hours * 3600, generation="")


@pytest.mark.parametrize(("hours", "codes"), [(17, []), (18.1, ["tombstones-at-risk"])])
def test_a_view_that_is_nearly_as_far_behind_as_tombstones_stay_is_at_risk(
    hours: float, codes: list[str]
) -> None:
    assert [finding.code for finding in at_risk(view_behind(hours))] == codes
    assert list(find_tombstones_at_risk(SHOP_OF_A_DAY, [SinkStatus("cache")], NOW)) == []


def test_a_view_that_the_log_can_no_longer_continue_is_at_risk_no_more() -> None:
    assert at_risk(replace(view_behind(300), problem="too late")) == []


def test_a_view_that_reads_a_topic_from_its_beginning_is_at_risk_from_then_on() -> None:
    """The records of a compacted topic are older than the view: it has missed no delete of them."""
    unread = measure(TABLE, None, END, {(TABLE.topic, 0, 0): int((NOW - 30 * 86400) * 1000)}, NOW)
    assert unread.lag_seconds == 30 * 86400
    assert at_risk(unread) == []
    begun, overdue = (
        datetime.fromtimestamp(NOW - hours * 3600, UTC).strftime(GENERATION) for hours in (1, 20)
    )
    assert at_risk(replace(view_behind(30 * 24), generation=begun)) == []
    (finding,) = at_risk(replace(view_behind(30 * 24), generation=overdue))
    assert "for 20 h; " in finding.message
    assert "4 h left" in finding.message


@pytest.mark.parametrize(
    ("state", "fields", "fix"),
    [
        ("not running", {}, "run --sink cache"),
        ("failed", {}, "run --sink cache"),
        ("paused", {"paused_by": "ann@host"}, "resume cache"),
        # Another run would fence the one that is at work, or may be.
        ("running", {}, "status --watch"),
        ("waiting", {}, "status --watch"),
        ("unknown", {}, "status --watch"),
        ("failed", {"restart_at": NOW}, "status --watch"),
    ],
)
def test_the_fix_of_a_view_at_risk_starts_no_second_run(
    state: str, fields: dict[str, Any], fix: str
) -> None:
    (finding,) = at_risk(view_behind(20), state, **fields)
    assert finding.fix == f"cdc -p FILE {fix}"


if __name__ == "__main__":
    SENTENCES.write_text(sentences())


def test_a_view_that_differs_is_a_finding_with_keys_and_not_proved() -> None:
    damage = Damage("", 1500.0, 2, ["5", "7"])
    activity = Activity({}, {}, {"cache": Generations(damages={"public.a": damage})})
    stored = ViewStatus("public.a", changes=9, at=1000.0, generation="")
    sink = describe_sink("cache", activity, (stored, replace(stored, table="public.b")))
    findings = diagnose(Status("shop", sinks=(sink,))).findings
    (finding,) = (finding for finding in findings if finding.code == "view-differs")
    assert (finding.table, finding.keys, finding.count) == ("public.a", ("5", "7"), 2)
    assert finding.message.startswith(
        "public.a in cache: 2 rows differ from Postgres, with keys such as 5, 7."
    )
    assert finding.fix == "cdc -p FILE verify --sink cache --table public.a --repair"
    # What was found of another generation says nothing of the one that readers see.
    other = describe_sink("cache", activity, (replace(stored, generation="g2"),))
    assert not any(view.wrong for view in other.views)


def test_the_views_are_proved_through_the_moment_of_the_one_that_was_proved_first() -> None:
    proved = ViewStatus("public.a", proved_through=2000.0, complete_at=1500.0)
    older = ViewStatus("public.b", proved_through=1800.0, complete_at=1800.0)
    status = Status("shop", sinks=(SinkStatus("cache", views=(proved, older)),))
    assert proof_sentence(status) == (
        f"proved through {clock(1800.0)}, all rows since {clock(1500.0)}"
    )
    mended = replace(status, sinks=(SinkStatus("cache", views=(replace(proved, repaired=3),)),))
    assert proof_sentence(mended).endswith(f"all rows since {clock(1500.0)}, 3 rows repaired")
    never = SinkStatus("search", views=(ViewStatus("public.a"), ViewStatus("public.b")))
    unproved = replace(status, sinks=(*status.sinks, never))
    assert proof_sentence(unproved).endswith(
        "; not proved: public.a in search and 1 more: cdc -p FILE verify"
    )
    assert not proof_sentence(replace(status, sinks=(never,)))
