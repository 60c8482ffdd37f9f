"""`shop.*` in a pipeline file, on real servers: decided by migrate and register, and the same for everybody else."""

import io
import sys
from functools import partial
from pathlib import Path

import pytest

from cdc.cli import verbs
from cdc.config import settings
from cdc.runtime.context import Context
from tests.support.pipelines import NOWHERE
from tests.support.shop import PASSWORD, Shop
from tests.support.verbs import document_of

MORE = """
CREATE VIEW shop.report AS SELECT id FROM shop.orders;
CREATE TABLE shop.payments (id int, at date, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE shop.payments_2025 PARTITION OF shop.payments FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');
CREATE TABLE shop.loose (n int);
"""
CAPTURED = ["shop.counters", "shop.orders", "shop.payments"]


@pytest.fixture
def file(shop: Shop, unique: str, tmp_path: Path) -> Path:
    shop.conn.execute(MORE)
    path = tmp_path / "shop.yaml"
    path.write_text(f"""\
pipeline: {unique}
source:
  dsn: "{shop.pipeline.source.dsn}"
  tables: [{{table: shop.*, partitions: 1}}]
  replication_password: {PASSWORD}
  heartbeat_s: 0.5
sinks:
  warehouse: {{type: delta, path: warehouse}}
kafka: {shop.kafka}
connect: {shop.connect}
""")
    return path


def test_what_is_captured_is_decided_once(shop: Shop, file: Path) -> None:
    cdc = partial(document_of, file)

    def captured() -> list[str]:
        return [entry.table for entry in Context(file, file.parent).pipeline.source.tables]

    def found(verb: str, code: str) -> list[str]:
        """The messages of a finding."""
        findings = cdc(verb, code=None)["findings"]
        return [finding["message"] for finding in findings if finding["code"] == code]

    def codes(verb: str) -> set[str]:
        return {finding["code"] for finding in cdc(verb, code=None)["findings"]}

    assert captured() == CAPTURED
    # Before `register` the doctor says what it would meet.
    pattern = "{table: shop.*, partitions: 1}"
    text = file.read_text()
    file.write_text(text.replace(pattern, f"{pattern}, shp.*"))
    (undecided,) = found("doctor", "tables-undecided")
    assert "shp.* in source.tables matches no table" in undecided
    file.write_text(text)

    plan = cdc("plan")
    assert [line.split(";")[0] for line in plan["register"]] == ["create the connector"]
    for step in ("created publication", "created role"):
        assert any(line.startswith(step) for line in plan["migrate"])
    assert plan["refused"] == []
    findings = cdc("migrate")["findings"]
    assert {finding["code"] for finding in findings} == {"table-left-out"}
    decision = "No action needed, unless its rows are wanted."
    assert [finding["message"] for finding in findings] == [
        f"{table} is left out: {why}. {decision}" for table, why in plan["left_out"].items()
    ]
    left_out = {finding["table"]: finding for finding in findings}
    assert left_out.keys() == {"shop.report", "shop.payments_2025", "shop.loose"}
    assert "a partition of shop.payments" in left_out["shop.payments_2025"]["message"]
    assert left_out["shop.loose"]["fix"].startswith(f"cdc -p {file}")
    cdc("register")
    assert captured() == CAPTURED
    assert found("status", "file-changed") == []
    plan = cdc("plan")
    assert plan["migrate"] == plan["register"] == []
    assert plan["run"] == [
        f"make {table} in warehouse, from its first record on" for table in CAPTURED
    ]

    shop.conn.execute(
        "CREATE TABLE shop.late (id int PRIMARY KEY); INSERT INTO shop.late VALUES (1)"
    )
    assert captured() == CAPTURED
    (waiting,) = found("status", "file-changed")
    assert "shop.late" in waiting
    plan = cdc("plan")
    assert "publishing shop.late" in plan["migrate"]
    assert plan["register"] == ["capture shop.late: all its rows are sent, beside the stream"]
    cdc("migrate")
    assert captured() == CAPTURED
    assert cdc("register")["sent"] == ["shop.late"]
    assert captured() == ["shop.counters", "shop.late", "shop.orders", "shop.payments"]
    assert found("status", "file-changed") == []

    # Nobody has taken it out of the file: what is written to it meanwhile would be lost without a
    # word.
    shop.conn.execute("ALTER TABLE shop.orders DROP CONSTRAINT orders_pkey")
    slipped = (
        "shop.orders is captured, and by patterns in source.tables alone it no longer would be"
    )
    for verb in ("migrate", "register"):
        assert slipped in cdc(verb, 4)["error"]["message"]
    assert slipped in str(cdc("plan")["refused"])
    assert slipped in str(cdc("status", code=None)["findings"])
    shop.conn.execute("ALTER TABLE shop.orders ADD PRIMARY KEY (id)")
    assert "no longer publishing shop.orders" not in cdc("migrate")["done"]

    # A partition beside its table: its rows would have to come twice.
    entries = "{table: shop.payments, partitions: 2}, shop.payments_2025, {table: shop.counters, partitions: 1}"
    file.write_text(text.replace(pattern, entries) + "delete_retention_hours: 48\n")
    plan = cdc("plan")
    refused = str(plan["refused"])
    assert "is a partition of" in refused
    assert "file says 2" in refused
    gone = ("shop.late", "shop.orders")
    assert {f"no longer publishing {name}" for name in gone} <= set(plan["migrate"])
    removals = [line.split(":")[0] for line in plan["register"] if "nobody updates them" in line]
    assert sorted(removals) == [f"no longer capture {name}" for name in gone]
    retention = "set delete.retention.ms = 172800000 on the topic of shop.counters"
    assert plan["register"][-1] == retention
    error = cdc("migrate", 4)["error"]
    assert "shop.payments_2025 is a partition of shop.payments, which is listed, too" in str(error)
    assert error["hint"] == "take shop.payments_2025 out of source.tables"

    # Under another name all of it is new, and what was stays.
    shop.stop()
    file.write_text(text.replace(f"pipeline: {shop.pipeline.pipeline}", "pipeline: renamed"))
    plan = cdc("plan")
    assert plan["idle"] == [shop.pipeline.pipeline]
    assert plan["register"][0].startswith("create the connector")
    assert plan["refused"] == []

    # Who only looks learns what can be known.
    def shown() -> list[str]:
        return [entry.table for entry in Context(file, file.parent).pipeline_to_show.source.tables]

    file.write_text(text.replace(shop.kafka, NOWHERE))
    assert "kafka-unreachable" in codes("status")
    assert shown() == sorted([*CAPTURED, "shop.late"])
    assert cdc("run", 5)["error"]["exit_code"] == 5
    dead = file.read_text().replace(shop.pipeline.source.dsn, f"postgresql://{NOWHERE}/x")
    file.write_text(dead.replace("[{table: shop.*", "[shop.orders, {table: shop.*"))
    away = {"kafka-unreachable", "source-unreachable"}
    assert codes("status") >= away
    assert shown() == ["shop.orders"]
    # The doctor examines what is left: Connect is there, and so is the warehouse's folder.
    assert codes("doctor") >= away
    assert "connect-unreachable" not in codes("doctor")


def test_a_first_file_from_a_database(
    shop: Shop,
    unique: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shop.conn.execute(MORE)
    shop.conn.execute("CREATE TABLE shop.odd (id int PRIMARY KEY, times time[])")
    dsn = shop.pipeline.source.dsn
    path = tmp_path / f"{unique}.yaml"

    def init(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["cdc", "-p", str(path), "init", "--dsn", dsn, *words])
        with pytest.raises(SystemExit) as exit_info:
            verbs.main()
        printed = capsys.readouterr()
        assert exit_info.value.code == code, printed
        return printed.out + printed.err

    def tables() -> list[str]:
        stack = {f"CDC_{name}": "http://x" for name in ("ELASTICSEARCH", "CONNECT", "KAFKA")}
        environment = {**stack, "CDC_REDIS": "redis://x", "CDC_WAREHOUSE": "/x"}
        return [entry.table for entry in settings.load(path, environment).source.tables]

    # Nobody is asked who can't answer: every table that can be captured, by its name.
    printed = init()
    assert tables() == CAPTURED
    assert "left out shop.loose: no primary key" in printed
    assert "left out shop.odd: " in printed
    assert "    # - shop.odd" in path.read_text()
    assert "is there already" in init(code=2)
    path.unlink()
    assert "shop.odd" in init("--tables", "shop.*", code=4)
    shop.conn.execute("DROP TABLE shop.odd")
    init("--tables", "shop.*")
    assert tables() == ["shop.*"]
    assert "    #   shop.payments" in path.read_text().splitlines()
    path.unlink()
    assert "did you mean shop.orders?" in init("--tables", "shop.order", code=4)
    assert "'public.*'" in init("--tables", "orders", code=2)
    assert "matches no table" in init("--tables", "none.*", code=2)
    # At a terminal one is asked.
    monkeypatch.setattr("sys.stdin", Typing("2, shop.payments\n"))
    assert "  2  shop.orders" in init()
    assert tables() == ["shop.orders", "shop.payments"]


class Typing(io.StringIO):
    def isatty(self) -> bool:
        return True
