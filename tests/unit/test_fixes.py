"""What each finding advises: a command that the command line takes, or what a person has to decide."""

import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.audit.auditor import ROW_DEFECTS, TOPIC_HINTS, Flaw, row_flaw
from cdc.cli.verify import report
from cdc.config.view_settings import STATE
from cdc.control import registrations
from cdc.control.registrations import Captured, Registration
from cdc.documents.needs import Forecast, judge_room
from cdc.documents.plan import StatePlan
from cdc.documents.state import StateSizes
from cdc.errors import CdcError
from cdc.kafka.log_refusals import missing_topic, refuse_gap, shape_errors, unfilled_topic
from cdc.model.finding import Finding, find_error, is_command, only_looks
from cdc.model.finding_codes import KINDS, code_of
from cdc.model.generation import GENERATION
from cdc.model.obstacle import Obstacle
from cdc.model.position import Position, Server
from cdc.model.table import Table
from cdc.observe.collection import collect, find_tombstones_at_risk
from cdc.observe.diagnosis import diagnose
from cdc.observe.examination import Examination
from cdc.observe.registration_findings import find_aside
from cdc.observe.status import ViewStatus
from cdc.postgres import catalog
from cdc.readiness.checks import check_slot_risk
from cdc.readiness.facts import RESTRICTIVE
from cdc.sink import factory
from cdc.sink.contract import SchemaMismatch
from cdc.sink.remedy import classify
from cdc.sinks.elasticsearch.index.layout import outdated_error
from cdc.verify.comparison import Comparison
from tests.support.pages import refusal
from tests.support.pipelines import pipeline, position_by_table
from tests.unit.test_doctor import FAULTS, table
from tests.unit.test_forecast import LOADING
from tests.unit.test_status_unit import GOOD, NOW, SLOT, STATUSES, with_clock
from tests.unit.test_view_settings import GOOD as GOOD_VIEWS
from tests.unit.test_view_settings import resolve

TABLE = "public.orders"
SHOP = pipeline(
    "shop", "postgresql://127.0.0.1:1/x", {"table": TABLE, "exclude": ["note"]}, "app.*"
)
REGISTERED = Registration(Server("1", 1), tables={TABLE: Captured()})
WORDED = (
    *("source-unfit/version", "source-unfit/encoding", "setting-differs/wal_level"),
    *("table-refused", "publication-foreign", "machine-unfit/spark", "machine-unfit"),
    *("registration-unreadable", "sink-unreachable"),
    *("sink-waiting", "another-server", "server-promoted", "tables-undecided", "table-slipped"),
    *("view-stopped", "clock-stands", "records-unreadable", "changes-incomplete", "row-security"),
)
"""Keys whose hint differs from time to time, and is in words: they are in the message."""
KEYS = {(code_of(key), kind.why): key for key, kind in KINDS.items()}
"""Keys by what a finding has of them."""
REMADE = "cdc -p FILE topics renew --table public.orders, then cdc -p FILE run"

ELSEWHERE = {
    "view-refused": "tests/integration/test_view_checks.py",
    "documents-waiting": "tests/scenarios/test_document_failures.py",
}
"""Keys that take servers to be made, by the test that has them."""


def raised(code: str, check: object, *arguments: object) -> Finding:
    with pytest.raises(CdcError) as caught:
        check(*arguments)  # type: ignore[operator]
    return find_error(code, "it", caught.value)


def of_status() -> Iterator[Finding]:
    at_risk = replace(SLOT, safe_wal_size=10)
    view = ViewStatus(TABLE, 5, 90.0, generation=GENERATION)
    statuses = [
        # Everything else that a status gets is invented.
        *(status for status in STATUSES.values() if not status.findings),
        replace(GOOD, documents=replace(LOADING, limit_bytes=1)),
        *(with_clock(at) for at in (NOW - 90, NOW + 90)),
        with_clock(NOW - 90, views=(replace(view, problem="It is cut.", hint=REMADE),)),
        replace(GOOD, sinks=(replace(GOOD.sinks[0], paused_by="me"),)),
    ]
    for status in statuses:
        yield from diagnose(status).findings
    yield from (fault.finding for fault in check_slot_risk("shop", at_risk.safe_wal_size, 90))
    late = replace(GOOD.sinks[0], views=(replace(view, lag_seconds=1e6),))
    for state in ("running", "failed"):
        yield from find_tombstones_at_risk(SHOP, [replace(late, state=state)], time.time())


def of_registration() -> Iterator[Finding]:
    yield raised("another-server", registrations.refuse_another, REGISTERED, Server("2", 1), SHOP)
    yield raised("server-promoted", registrations.refuse_promoted, REGISTERED, Server("1", 2), SHOP)
    yield raised("file-changed", registrations.refuse_changed, REGISTERED, SHOP)
    yield raised("tables-undecided/pattern", registrations.refuse_meaningless, [TABLE], SHOP)
    yield raised("file-changed/tables", registrations.refuse_waiting, REGISTERED, ["app.new"])
    yield raised("tables-undecided", catalog.choose_tables, SHOP, [])
    keyless = [catalog.Candidate("app", "a"), catalog.Candidate("app", "b", keyed=False)]
    choice = catalog.choose_tables(SHOP, keyless)
    yield from choice.findings
    yield raised("table-slipped", catalog.refuse_slipped, ["app.b"], choice, SHOP)
    yield from table(hidden_by=RESTRICTIVE)
    for obstacle in Obstacle:
        yield find_aside(TABLE, obstacle)


def of_log() -> Iterator[Finding]:
    """Of audits, and of views that the log can't continue."""
    for key in ROW_DEFECTS:
        yield row_flaw(key, 2).for_table(TABLE).finding(TABLE)
    for key, hint in TOPIC_HINTS.items():
        yield Flaw(key, 1, "it is so", hint).for_table(TABLE).finding(TABLE)
    table = Table("public", "orders", (), (), f"shop.{TABLE}")
    end = Position("id-1", (10, 20))
    stored = ((1,), (1, 2), (11, 20))
    positions = [None, Position("id-0", (1, 2)), *(Position("id-1", offsets) for offsets in stored)]
    for sink in ("cache", STATE):
        for position in positions:
            start = Position("id-1", (5, 5))
            yield raised("view-stopped", refuse_gap, sink, table, start, end, position)
        yield find_error("view-stopped", TABLE, unfilled_topic(table))
    yield find_error("topic-missing", TABLE, missing_topic(table.topic))
    for name in (TABLE, "cdc.ddl", "cdc.heartbeat"):
        for partitions, policy in ((2, "compact"), (1, "delete")):
            (mistake,) = shape_errors(f"shop.{name}", 1, partitions, policy)
            yield find_error(str(mistake.finding_key), f"shop.{name}", mistake)
    yield find_error("table-waiting", TABLE, SchemaMismatch(table, "cache"), sink="cache")
    outdated = outdated_error(table, "search", "fields", ["note"])
    yield find_error("setting-differs/index", TABLE, outdated, sink="search")


def of_documents(folder: Path) -> Iterator[Finding]:
    (folder / "views").mkdir()
    plan = StatePlan(resolve(folder / "views", GOOD_VIEWS))
    none = dict.fromkeys((table.qualified for table in plan.tables), 0)
    sizes = StateSizes(none, none, none, 0, 10, 100, {})
    url = "redis://:secret@cache:6380/4"
    yield raised("state-too-large", judge_room, url, Forecast(1000, 1000), sizes)
    risk = judge_room(url, Forecast(100, 100), sizes)
    assert risk
    yield risk


def of_servers_away(folder: Path) -> Iterator[Finding]:
    sinks = [factory.build(SHOP, name) for name in SHOP.sinks]
    yield from Examination(SHOP, sinks, folder).findings()
    positions = {"cache": position_by_table(sinks[0].position)}
    yield from collect(SHOP, positions=positions).findings
    for key in ("machine-unfit", "registration-unreadable"):
        yield find_error(key, key, classify(OSError("no"), key, "cdc -p FILE doctor"))


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finding, ...]:
    folder = tmp_path_factory.mktemp("fixes")
    return (
        *(finding for fault in FAULTS.values() for finding in fault()),
        *of_status(),
        *of_registration(),
        *of_log(),
        *of_documents(folder),
        *of_servers_away(folder),
        raised("view-differs", report, [Comparison("cache", TABLE, different=1)], False),
    )


def key_of(finding: Finding) -> str:
    return KEYS[finding.code, finding.why]


def test_there_is_a_finding_of_every_case(findings: tuple[Finding, ...]) -> None:
    assert set(KINDS) - set(map(key_of, findings)) == set(ELSEWHERE)
    assert len(KEYS) == len(KINDS)


def test_what_is_advised_can_be_typed(findings: tuple[Finding, ...]) -> None:
    """A word of `cdc` that isn't one, and a sentence that was taken for a command, are seen here."""
    wrong = []
    for finding in findings:
        assert is_command(finding.fix), finding
        for command in finding.fix.split(" && "):
            program, *words = shlex.split(command) if not command.endswith(";") else [command]
            if program == "cdc" and (reason := refusal(words)):
                wrong.append((finding.code, reason))
    assert wrong == []


def test_what_a_command_does_not_end_a_person_decides(findings: tuple[Finding, ...]) -> None:
    silent = set()
    for finding in findings:
        key = key_of(finding)
        decision = KINDS[key].decision
        if only_looks(finding.fix) and not (decision and decision in finding.message):
            sentences = re.findall(r"[.:;?] +\w", finding.message)
            if not (key in WORDED and sentences):
                silent.add((key, finding.message, finding.fix))
    assert silent == set()


@pytest.mark.parametrize(
    "command",
    [
        "cdc -p FILE topics audit --repair", "cdc -p FILE verify --repair --table t", "cdc -p FILE register",
        "SELECT pg_drop_replication_slot('a');", "ALTER TABLE a SET LOGGED;", "redis-cli -h h CONFIG SET maxmemory 1",
        "curl -s -X PUT h/a", "apt install openjdk-17-jre-headless",
    ],
)  # fmt: skip
def test_what_acts_is_no_look(command: str) -> None:
    assert not only_looks(command)
