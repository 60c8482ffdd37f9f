"""Lag, freshness and the slow hop from plain numbers; the rules that admit a server."""

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.control import registrations
from cdc.control.registrations import Captured, Registration
from cdc.errors import SourceError
from cdc.kafka.log_continuity import pending_records
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, exit_code, find, verdict
from cdc.model.generation import GENERATION
from cdc.model.position import Position, Server, ViewCheckpoint
from cdc.model.table import Table
from cdc.model.wording import clock
from cdc.observe import collection
from cdc.observe.activity import LookConnections, stands_s
from cdc.observe.collection import collect
from cdc.observe.diagnosis import diagnose, document, slow_hop
from cdc.observe.status import (
    ClockStatus,
    ConnectorStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.observe.topic_report import find_tombstones_at_risk, measure
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


def test_a_view_at_the_end_has_no_lag() -> None:
    view = measure(TABLE, stored(10, 20), END, {}, now=100)
    assert (view.lag_records, view.lag_seconds, view.changes, view.at) == (0, 0.0, 7, 5.0)
    assert pending_records(TABLE.topic, stored(10, 20), END) == []


def test_lag_is_the_age_of_the_oldest_record_that_waits() -> None:
    checkpoint = stored(4, 17)
    places = pending_records(TABLE.topic, checkpoint, END)
    assert places == [(TABLE.topic, 0, 4), (TABLE.topic, 1, 17)]
    view = measure(
        TABLE, checkpoint, END, dict(zip(places, (97_000, 93_500), strict=True)), now=100
    )
    assert (view.lag_records, view.lag_seconds) == (9, 6.5)


def test_what_is_left_may_be_markers_only() -> None:
    assert measure(TABLE, stored(9, 20), END, {}, now=100).lag_seconds == 0.0


def test_a_view_without_a_position_waits_for_everything() -> None:
    view = measure(
        TABLE, None, END, {(TABLE.topic, 0, 0): 40_000, (TABLE.topic, 1, 0): 60_000}, now=100
    )
    assert (view.lag_records, view.lag_seconds, view.at) == (30, 60.0, None)


@pytest.mark.parametrize(
    "checkpoint", [stored(10, 20, topic_id="id-0"), stored(10)], ids=["recreated", "repartitioned"]
)
def test_a_position_in_another_topic_has_no_lag(checkpoint: ViewCheckpoint) -> None:
    assert measure(TABLE, checkpoint, END, {}, now=100) == ViewStatus(
        TABLE.qualified, changes=7, at=5.0, generation=""
    )
    assert pending_records(TABLE.topic, checkpoint, END) == []


def test_clocks_that_disagree_give_no_negative_lag() -> None:
    assert (
        measure(TABLE, stored(9, 20), END, {(TABLE.topic, 0, 9): 101_000}, now=100).lag_seconds
        == 0.0
    )


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
    "heartbeats are late": having(heartbeat=HeartbeatStatus(60, 0.1, 2)),
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
}  # fmt: skip
SENTENCES = Path(__file__).with_name("statuses.txt")
"""What is said of each: the verdict and the exit code; the first finding, its table, sink and time; the
sentence. `python -m tests.unit.test_status_unit` writes it.
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
        first = (
            " ".join(str(finding[part]) for part in ("code", "table", "sink", "since"))
            for finding in output["findings"][:1]
        )
        lines.append(
            f"{name}: {output['verdict']} {output['exit_code']}; {'; '.join([*first, sentence])}\n"
        )
    return "".join(lines)


def test_each_status_has_its_verdict_its_finding_and_its_sentence() -> None:
    assert sentences() == SENTENCES.read_text()


def test_a_sink_that_starts_again_by_itself_says_when() -> None:
    failed = replace(GOOD.sinks[0], state="failed", error="Full.", hint="make room")
    moment = time.time() + 40
    (ended, due) = (
        diagnose(replace(GOOD, sinks=(replace(failed, restart_at=restart_at),))).findings[0]
        for restart_at in (None, moment)
    )
    assert "by itself" not in ended.message
    assert f"starts again by itself at {clock(moment)}: Full." in due.message


UNREACHABLE = {"source-unreachable", "connect-unreachable", "kafka-unreachable"}


def test_what_hangs_is_said_to_give_no_answer_and_the_rest_is_reported() -> None:
    """A sink, and a server that takes connections and says nothing: as a stopped process does."""
    release = threading.Event()

    def hang(_: Table) -> ViewCheckpoint | None:
        release.wait(60)
        return None

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        shop = pipeline("shop", f"postgresql://owner@127.0.0.1:{port}/shop", "public.orders")
        shop = shop.model_copy(
            update={"kafka": f"127.0.0.1:{port}", "connect": f"http://127.0.0.1:{port}"}
        )
        positions = {
            "search": position_by_table(hang),
            "cache": position_by_table(lambda _: stored(3, 4)),
        }
        # Two waits of 4 s, one after the other, would be 8.
        status = answer_within(8, lambda: collect(shop, positions=positions))
    release.set()
    silent_codes = {
        finding.code for finding in status.findings if "no answer within 4 s" in finding.message
    }
    assert silent_codes == UNREACHABLE | {"sink-unreachable"}
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


BEATING = HeartbeatStatus(1.0, 0.02, 2.0, committed_at=NOW)
ORDERS_VIEW = ViewStatus("public.orders", 0, 0.0)


def with_clock(
    at: float,
    column: str | None = None,
    heartbeat: HeartbeatStatus = BEATING,
    **stream: object,
) -> Status:
    """A pipeline whose view `overdue` has a clock, and the stream of its state."""
    sink = SinkStatus("documents", "running", views=(ORDERS_VIEW,))
    documents = DocumentsStatus({}, {}, {}, 0, clocks={"overdue": ClockStatus(at, column)})
    sinks = (*GOOD.sinks, replace(sink, **stream))  # type: ignore[arg-type]
    return diagnose(replace(GOOD, heartbeat=heartbeat, sinks=sinks, documents=documents))


def codes(status: Status) -> list[str]:
    return [finding.code for finding in status.findings]


def test_a_clock_that_stands_though_heartbeats_arrive_is_found() -> None:
    (finding,) = with_clock(NOW - 90).findings
    assert (finding.code, finding.table, finding.sink) == (
        "clock-stands",
        "view.overdue",
        "documents",
    )
    assert "The clock of overdue stands 90 s behind Postgres, though no record" in finding.message
    assert "restart the run" in finding.message
    assert (finding.since, finding.fix) == (NOW - 90, "cdc -p FILE status --watch")
    assert codes(with_clock(NOW - 50)) == []
    rare = replace(BEATING, interval_s=60.0)
    assert codes(with_clock(NOW - 90, heartbeat=rare)) == []
    assert codes(with_clock(NOW - 190, heartbeat=rare)) == ["clock-stands"]


def test_the_table_that_holds_clocks_back_is_named() -> None:
    refused = replace(ORDERS_VIEW, problem="has lost records.", hint="cdc -p FILE run")
    stopped, stands = with_clock(NOW - 90, views=(refused,)).findings
    assert (stopped.code, stands.code) == ("view-stopped", "clock-stands")
    assert "it waits for the topic of public.orders, which isn't applied" in stands.message
    assert stands.fix == "cdc -p FILE run"
    aside = {
        "view.other": ["It has no column a.", "cdc -p FILE views plan"],
        "public.orders": ["there is no topic yet", "cdc -p FILE register"],
    }
    stands = with_clock(NOW - 90, aside=aside).findings[-1]
    assert "it waits for the topic of public.orders, which isn't applied" in stands.message
    assert stands.fix == "cdc -p FILE register"


def test_a_clock_that_stands_as_it_should_is_no_finding() -> None:
    """One that is a column, while no row comes; and one whose state gets nothing, or has much to do,
    which is said of the state.
    """
    assert codes(with_clock(NOW - 1e6, "dep_time")) == []
    lagging = (replace(ORDERS_VIEW, lag_records=9, lag_seconds=90.0),)
    assert codes(with_clock(NOW - 90, views=lagging)) == ["sink-behind"]
    assert codes(with_clock(NOW - 90, state="not running")) == ["sink-not-running"]
    assert codes(with_clock(NOW - 90, state="caught up")) == []
    assert codes(with_clock(NOW - 90, state="paused", paused_by="me")) == ["sink-paused"]
    assert codes(with_clock(NOW - 90, looked_s=40.0)) == ["sink-silent"]
    late = HeartbeatStatus(90.0, 0.02, 2.0, committed_at=NOW - 90)
    assert codes(with_clock(NOW - 91, heartbeat=late)) == ["heartbeat-late"]
    assert codes(with_clock(NOW - 90, heartbeat=HeartbeatStatus(1.0, 0.02, 2.0))) == []


def test_a_clock_is_ahead_once_the_time_of_postgres_has_gone_back() -> None:
    for column in (None, "dep_time"):
        (finding,) = with_clock(NOW + 300, column).findings
        assert finding.code == "clock-stands"
        assert "The clock of overdue is 5 min ahead of Postgres" in finding.message
        assert finding.fix == "timedatectl status"
    assert codes(with_clock(NOW + 50)) == []


@pytest.mark.parametrize("code", ["source-unreachable", "kafka-unreachable"])
def test_a_heartbeat_that_cannot_come_blames_no_other_hop(code: str) -> None:
    late = replace(GOOD, heartbeat=HeartbeatStatus(60, 0.1, 2))
    assert [finding.code for finding in diagnose(late).findings] == ["heartbeat-late"]
    away = replace(late, findings=(trouble(code, "Away."),))
    assert [finding.code for finding in diagnose(away).findings] == [code]


def test_a_status_is_one_json_document() -> None:
    assert json.loads(json.dumps(asdict(GOOD)))["sinks"][0]["views"][0]["lag_records"] == 0


def test_every_part_that_is_down_is_named_and_the_rest_told() -> None:
    checkpoint = stored(3, 4)
    shop = pipeline("shop", "postgresql://owner:s3cret@127.0.0.1:1/shop", "public.orders")
    status = collect(shop, positions={"cache": position_by_table(lambda _: checkpoint)})
    assert {finding.code for finding in status.findings} == UNREACHABLE
    assert all(finding.fix for finding in status.findings)
    assert status.sinks[0].views == (ViewStatus("public.orders", changes=7, at=5.0, generation=""),)
    assert "s3cret" not in json.dumps(asdict(status))


class Silent:
    """A server's connection, for what is stubbed beyond it."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass


ORDERS = Registration(Server("7", 1), 0, {"public.orders": Captured()})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Return a function that tells the findings on a registration, given the servers' answers."""

    def findings(
        *entries: str,
        registration: Registration | None,
        candidates: list[catalog.Candidate],
        server: Server | Exception = FIRST,
    ) -> list[Finding]:
        def answer(_: object) -> Server:
            if isinstance(server, Exception):
                raise server
            return server

        for part in ("read_slot", "read_connector", "read_definitions", "read_topics"):
            monkeypatch.setattr(collection, part, lambda *_: None)
        monkeypatch.setattr(LookConnections, "read_activity", lambda *_: None)
        monkeypatch.setattr(TopicsPool, "borrowed", lambda *_: Silent())
        monkeypatch.setattr(source, "connect", lambda _: Silent())
        monkeypatch.setattr(source, "server", answer)
        monkeypatch.setattr(registrations, "read", lambda *_: registration)
        monkeypatch.setattr(catalog, "candidates", lambda _: candidates)
        shop = pipeline("shop", "", *entries).with_tables(
            registration.tables if registration else []
        )
        return list(collect(shop, positions={}).findings)

    return findings


FIRST = Server("7", 1)
ALIKE = [catalog.Candidate("public", name) for name in ("orders", "Orders")]
PRESENT = ALIKE[:1]


def test_patterns_without_an_answer_hide_nothing_of_a_registration(
    judge: Callable[..., list[Finding]],
) -> None:
    """Two tables whose views would have one name: what the pattern means now can't be said."""
    assert judge("public.*", registration=ORDERS, candidates=PRESENT) == []
    (early,) = judge("public.*", registration=None, candidates=ALIKE)
    assert early.code == "tables-undecided"
    (alone,) = judge("public.*", registration=ORDERS, candidates=ALIKE)
    assert (alone.code, alone.severity) == ("tables-undecided", "degraded")
    assert "would have one name" in alone.message
    second, undecided = judge(
        "public.*", registration=ORDERS, candidates=ALIKE, server=Server("8", 1)
    )
    assert (second.code, second.severity) == ("another-server", "down")
    assert "another server" in second.message
    assert undecided.code == "tables-undecided"
    promoted, _ = judge("public.*", registration=ORDERS, candidates=ALIKE, server=Server("7", 2))
    assert "was promoted" in promoted.message


def test_a_registration_that_could_not_be_read_is_reported(
    judge: Callable[..., list[Finding]],
) -> None:
    (unread,) = judge(
        "public.*",
        registration=ORDERS,
        candidates=PRESENT,
        server=SourceError("Not for you.", hint="cdc -p FILE migrate"),
    )
    assert (unread.code, unread.message) == ("registration-unreadable", "Not for you.")


def test_a_pattern_that_means_nothing_registered_is_not_well(
    judge: Callable[..., list[Finding]],
) -> None:
    """Registered as public.*, then misspelt: there is nothing to look at, and that isn't well."""
    (meaningless,) = judge("pubilc.*", registration=ORDERS, candidates=PRESENT)
    assert (meaningless.code, meaningless.severity) == ("tables-undecided", "down")
    assert "pubilc.* in source.tables means none" in meaningless.message
    assert judge("public.ord*", registration=ORDERS, candidates=PRESENT) == []


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (replace(PRESENT[0], unlogged=True), "not logged"),
        (replace(PRESENT[0], keyed=False), "no primary key"),
    ],
)
def test_a_captured_table_that_slips_out_of_a_pattern_is_reported(
    judge: Callable[..., list[Finding]], now: catalog.Candidate, why: str
) -> None:
    items = catalog.Candidate("public", "items")
    registration = replace(ORDERS, tables={**ORDERS.tables, "public.items": Captured()})
    (slipped,) = judge("public.*", registration=registration, candidates=[now, items])
    assert "public.orders is captured" in slipped.message
    assert why in slipped.message
    assert 'ALTER PUBLICATION shop DROP TABLE ONLY "public"."orders"' in slipped.message
    # Who gives a table up, or lists it by its name, is not reported; nor is one that has become
    # part of another.
    given_up = replace(registration, tables={"public.items": Captured()})
    assert judge("public.*", registration=given_up, candidates=[now, items]) == []
    assert (
        judge("public.*", "public.orders", registration=registration, candidates=[now, items]) == []
    )
    part = replace(PRESENT[0], root="public.items")
    assert judge("public.*", registration=registration, candidates=[part, items]) == []


def test_a_paused_sink_is_a_remark_with_the_command_that_resumes_it() -> None:
    """Its lag and its ended run are no trouble of their own: somebody has decided so."""
    for state in ("running", "not running", "paused"):
        sink = replace(with_lag("cache", 900, state), paused_by="ann@host", since=5.0)
        status = diagnose(replace(GOOD, sinks=(sink,)))
        (finding,) = status.findings
        assert (finding.code, finding.severity, finding.since) == ("sink-paused", "info", 5.0)
        assert finding.fix == "cdc -p FILE resume cache"
        assert "ann@host, at least 900 s behind" in finding.message
        assert (verdict(status.findings), exit_code(status.findings)) == ("ok", 0)


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
