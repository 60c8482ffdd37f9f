"""`cdc doctor` and `cdc status` on real servers: a planted misconfiguration gives exactly its finding,
a healthy pipeline none above a remark. What is printed as `fix` is run as it is printed, and ends the
finding.
"""

import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from cdc.config import settings
from cdc.connectors.client import Connect
from cdc.errors import SourceError
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding, Severity, only_looks
from cdc.model.finding_codes import KINDS, code_of
from cdc.observe.collection import collect
from cdc.observe.diagnosis import diagnose
from cdc.observe.examination import Examination
from cdc.observe.status import Status
from cdc.postgres.table_survey import read_source
from cdc.readiness.checks import check_source
from cdc.sink import factory
from cdc.sink.contract import positions
from cdc.sinks.redis.settings import Redis
from tests.support.cache import cache as server_of
from tests.support.pipelines import NOWHERE, changed
from tests.support.shop import Shop
from tests.support.verbs import run_here
from tests.support.wait import wait_until

MISCONFIGURED = {
    "slot.drop.on.stop": "true",
    "tombstones.on.delete": "false",
    "decimal.handling.mode": "double",
    "snapshot.mode": "no_data",
    "include.unknown.datatypes": "false",
    "heartbeat.interval.ms": "0",
}
WITHOUT_A_RUN = ("sink-not-running", "sink-behind")
"""What `status` says of each destination here: there is no run, and none is needed."""


@dataclass
class Clinic:
    """A pipeline in all three destinations of the stack, and what the doctor says of it."""

    shop: Shop
    endpoints: Any
    folder: Path
    file: Path
    """The pipeline file."""

    def examine(self, **changes: Any) -> tuple[Finding, ...]:
        pipeline = changed(self.shop.pipeline, **changes)
        sinks = [factory.build(pipeline, name) for name in pipeline.sinks]
        return Examination(pipeline, sinks, self.folder).findings()

    def look(self, **changes: Any) -> list[Finding]:
        """What doctor finds above a remark, each with its command."""
        findings = self.examine(**changes)
        assert all(finding.fix and finding.why for finding in findings)
        # The machine that runs the tests isn't what is tested.
        return [
            finding
            for finding in findings
            if finding.severity is not Severity.INFO
            and finding.code not in ("memory-low", "disk-low", "log-held")
        ]

    def troubles(self, **changes: Any) -> list[str]:
        return list(map(name_of, self.look(**changes)))

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.shop.conn.execute(statement.encode())

    def advice(self, doctor: Sequence[Finding] | None = None) -> dict[str, str]:
        """What doctor and status print next to each finding above a remark, by name, but for those
        of runs. For one name both begin with the same command. `doctor` has what doctor finds, where
        it was asked already.
        """
        doctor = self.look() if doctor is None else doctor
        fixes: dict[str, str] = {}
        for finding in (*doctor, *self.status()):
            if finding.severity is Severity.INFO or finding.code in WITHOUT_A_RUN:
                continue
            fix = fixes.setdefault(name_of(finding), finding.fix)
            assert first_command(fix) == first_command(finding.fix)
        return fixes

    def status(self) -> Sequence[Finding]:
        """What status finds, once every server has answered it: on a busy machine one that is well may be late."""
        pipeline = self.shop.pipeline
        sinks = [factory.build(pipeline, name) for name in pipeline.sinks]
        looks = {sink.name: partial(positions, sink) for sink in sinks}

        def answered() -> Status | None:
            status = diagnose(collect(pipeline, positions=looks))
            is_silent = any("no answer within" in finding.message for finding in status.findings)
            return None if is_silent else status

        status = wait_until(answered, 30, "all servers to answer")
        assert status
        return status.findings

    def cdc(self, *words: str) -> None:
        if "--new-snapshot" in words:
            words = (*words, "--yes")  # at a terminal it asks
        answer = run_here(["-p", str(self.file), "--state", str(self.folder), *words])
        assert answer.returncode == 0, f"{words}: {answer.stdout}{answer.stderr}"

    def carry_out(self, fix: str) -> None:
        """Run what is printed, as it is printed."""
        if fix.endswith(";"):
            self.sql(*filter(None, map(str.strip, fix.split(";"))))
            return
        for command in fix.split(" && "):
            program, *words = shlex.split(command)
            if program == "redis-cli":
                host = words[words.index("-h") + 1]
                port = words[words.index("-p") + 1]
                with redis.Redis(host=host, port=int(port)) as server:
                    server.execute_command(*words[words.index("-p") + 2 :])
            else:
                assert [program, *words[:2]] == ["cdc", "-p", "FILE"]
                self.cdc(*words[2:])

    def carry_out_advice(self, ignored: Collection[str] = ()) -> list[Finding]:
        """Check that all findings of one fault begin with one command, looks aside, and run what
        the first of them says. Return doctor's findings, see `look`.
        """
        findings = self.look()
        advice = {
            name: fix
            for name, fix in self.advice(findings).items()
            if name not in ignored and not only_looks(fix)
        }
        assert len(set(map(first_command, advice.values()))) <= 1, advice
        for fix in [*advice.values()][:1]:
            self.carry_out(fix)
        return findings


def name_of(finding: Finding) -> str:
    """Name a finding by its code, or by the setting that differs."""
    return finding.subject if finding.code == "setting-differs" else finding.code


def first_command(fix: str) -> str:
    return fix.partition(" && ")[0]


@pytest.fixture
def clinic(shop: Shop, stack: Any, unique: str, tmp_path: Path) -> Clinic:
    endpoints = stack.endpoints
    sinks = {
        "search": {"type": "elasticsearch", "url": endpoints.elasticsearch},
        "cache": {"type": "redis", "url": endpoints.redis, "prefix": unique},
        "warehouse": {"type": "delta", "path": str(tmp_path / "warehouse")},
    }
    file = shop.file(tmp_path, sinks=sinks)
    fresh = settings.load(file, {})
    return Clinic(replace(shop, pipeline=fresh), endpoints, tmp_path, file)


def test_the_doctor_before_and_after_register(clinic: Clinic) -> None:
    """What `register` would meet; then health, and faults of Postgres, Connect and Kafka."""
    shop = clinic.shop
    name = shop.pipeline.pipeline
    assert clinic.troubles() == ["control-missing"]
    shop.migrate()
    # A slot of the pipeline's name that another program made.
    clinic.sql(f"SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')")
    assert clinic.troubles() == ["slot-foreign"]
    shop.drop_slot()
    assert clinic.troubles() == []
    shop.register()
    assert clinic.troubles() == []
    role = shop.pipeline.replication_user
    faults = {
        ("role-unfit", "lacks LOGIN or REPLICATION"): f"ALTER ROLE {role} NOREPLICATION",
        ("role-unfit/superuser", "is a superuser"): f"ALTER ROLE {role} SUPERUSER",
        ("role-unfit/unreadable", "may not read"): f"REVOKE SELECT ON shop.orders FROM {role}",
        ("role-unfit/unreadable", "cdc.signal"): f"REVOKE INSERT ON cdc.signal FROM {role}",
        ("row-security", "hide rows"): "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY",
        ("publication-differs", "lacks"): f"ALTER PUBLICATION {name} DROP TABLE shop.orders",
        (
            "publication-differs/partial",
            "leaves out operations",
        ): f"ALTER PUBLICATION {name} SET (publish = 'insert')",
        ("identity-unfit/partial", "TOAST"): "ALTER TABLE shop.orders REPLICA IDENTITY DEFAULT",
        ("identity-unfit", "lacks the key"): "ALTER TABLE shop.counters REPLICA IDENTITY NOTHING",
        ("table-refused", "no primary key"): (
            "ALTER TABLE shop.counters DROP CONSTRAINT counters_pkey"
        ),
        ("trigger-missing/truncation", "TRUNCATE"): (
            "ALTER TABLE shop.orders DISABLE TRIGGER USER"
        ),
        ("control-missing", "has no row"): f"DELETE FROM cdc.heartbeat WHERE pipeline = '{name}'",
    }
    with Connect(shop.connect) as connect:
        # A stopped connector: faults of Postgres don't end its task, nor does it mend them.
        connect.stop(name)
    for (key, words), plant in faults.items():
        clinic.sql(plant)
        if KINDS[key].severity == Severity.DOWN:
            with pytest.raises(SourceError) as refused:
                shop.register()
            assert refused.value.finding_key == key
        (finding,) = clinic.carry_out_advice({"connector-stopped"})
        assert (finding.code, finding.why) == (code_of(key), KINDS[key].why)
        assert words in finding.message
        if key == "table-refused":
            # The advice has a place for columns, which a person chooses.
            (refused_table,) = clinic.examine()[:1]
            assert only_looks(refused_table.fix)
            assert "ALTER TABLE shop.counters ADD PRIMARY KEY (...)" in refused_table.message
            clinic.sql("ALTER TABLE shop.counters ADD PRIMARY KEY (id)")
        assert (key, clinic.troubles()) == (key, [])


def test_what_is_advised_about_topics_ends_it(clinic: Clinic) -> None:
    """After each fix the topic has all rows: the finding alone would also go with an empty topic."""
    clinic.shop.migrate()
    clinic.shop.register()
    pipeline = clinic.shop.pipeline
    topic = pipeline.topic("shop.counters")

    def set_to(setting: str, value: str) -> Callable[[Topics], None]:
        return lambda topics: topics.override({topic: {setting: value}})

    def split(_: Topics) -> None:
        with kafka.KafkaAdminClient(bootstrap_servers=pipeline.kafka) as admin:
            admin.create_partitions({topic: 2})

    def cut(topics: Topics) -> None:
        topics.override({topic: {"cleanup.policy": "compact,delete"}})
        with kafka.KafkaAdminClient(bootstrap_servers=pipeline.kafka) as admin:
            admin.delete_records({kafka.TopicPartition(topic, 0): 3})
        topics.override({topic: {"cleanup.policy": "compact"}})

    faults: dict[tuple[str, str], Callable[[Topics], None]] = {
        **{
            (f"setting-differs/{setting}", f"{setting} of {topic}"): set_to(setting, "1000")
            for setting in ("delete.retention.ms", "min.compaction.lag.ms", "max.message.bytes")
        },
        ("topic-unfit/policy", topic): set_to("cleanup.policy", "delete"),
        ("topic-unfit/partitions", topic): split,
        ("topic-unfit/truncated", topic): cut,
        ("topic-missing", topic): lambda topics: topics.remove([topic]),
    }
    expected = {key for (key,) in clinic.shop.conn.execute("SELECT id FROM shop.counters")}
    with Topics(pipeline.kafka) as topics:
        for (key, subject), plant in faults.items():
            plant(topics)
            (finding,) = clinic.carry_out_advice()
            assert (finding.code, finding.subject) == (code_of(key), subject)
            assert finding.why == KINDS[key].why
            assert (key, clinic.troubles()) == (key, [])
            wait_until(
                lambda: clinic.shop.rows("shop.counters").keys() == expected,
                20,
                f"all rows are in the topic after the fix of {key}",
            )


def _index(clinic: Clinic, method: str, path: str, body: Any = None) -> None:
    httpx.request(method, f"{clinic.endpoints.elasticsearch}{path}", json=body).raise_for_status()


def test_the_doctor_on_destinations_and_on_servers_that_are_away(clinic: Clinic) -> None:
    shop = clinic.shop
    shop.migrate()
    codes: dict[str, list[str]] = {}

    def note(code: str, plant: Callable[[], Any], mend: Callable[[], Any]) -> None:
        plant()
        try:
            codes[code] = clinic.troubles()
        finally:
            mend()

    cache = redis.Redis.from_url(clinic.endpoints.redis)
    policy = str(cache.config_get("maxmemory-policy")["maxmemory-policy"])
    note(
        "maxmemory-policy",
        lambda: cache.config_set("maxmemory-policy", "allkeys-lru"),
        lambda: cache.config_set("maxmemory-policy", policy),
    )
    cache.close()
    with server_of(clinic.folder / "state", "--maxmemory-policy", "allkeys-lru") as url:
        state = Redis(type="redis", url=url, prefix="shop")
        evicting = clinic.troubles(state=state), clinic.examine(state=state)
    assert evicting[0] == ["maxmemory-policy"]
    assert [part.message for part in evicting[1] if part.subject == "maxmemory-policy"] == [
        "documents: maxmemory-policy is allkeys-lru: rows may vanish without a word."
    ]
    assert clinic.troubles(state=state) == ["sink-unreachable"]
    alias = f"/{shop.pipeline.pipeline}-shop.orders"
    note(
        "index-shadows-alias",
        lambda: _index(clinic, "PUT", alias),
        lambda: _index(clinic, "DELETE", alias),
    )
    warehouse = clinic.folder / "warehouse"
    note("sink-unfit", lambda: warehouse.write_text("no folder"), warehouse.unlink)
    assert codes == {code: [code] for code in codes}

    dsn = shop.pipeline.source.dsn
    nowhere = shop.pipeline.source.model_copy(
        update={"dsn": dsn.replace(dsn.split("@")[1].split("/")[0], NOWHERE)}
    )
    assert clinic.troubles(source=nowhere) == ["source-unreachable"]
    assert clinic.troubles(connect=f"http://{NOWHERE}") == ["connect-unreachable"]
    assert clinic.troubles(kafka=NOWHERE) == ["kafka-unreachable"]
    assert clinic.troubles() == []


def test_what_status_advises_about_the_capture_ends_it(clinic: Clinic) -> None:
    shop = clinic.shop
    name = shop.pipeline.pipeline
    shop.migrate()
    shop.register()
    assert clinic.advice() == {}
    with Connect(shop.connect) as connect:
        config = connect.config(name)
        assert config is not None
        for found, setting, value in (
            ("errors.tolerance", "errors.tolerance", "all"),
            ("connector-differs", "max.batch.size", "100"),
        ):
            connect.put(name, {**config, setting: value})

            def is_advised(name: str = found) -> bool:
                return clinic.advice().keys() == {name}

            wait_until(is_advised, 20, f"advice about {found} alone")
            assert [*map(name_of, clinic.carry_out_advice())] == [found]
            assert (found, clinic.troubles()) == (found, [])

        def lose_slot() -> None:
            connect.stop(name)
            shop.drop_slot()

        def misconfigure() -> None:
            connect.stop(name)
            connect.put(name, {**config, **MISCONFIGURED})

        faults: dict[str, tuple[Callable[[], object], set[str]]] = {
            "paused": (
                lambda: httpx.put(f"{shop.connect}/connectors/{name}/pause").raise_for_status(),
                {"connector-stopped"},
            ),
            "stopped": (lambda: connect.stop(name), {"connector-stopped"}),
            "deleted": (lambda: connect.delete(name), {"connector-stopped"}),
            "no slot": (lose_slot, {"connector-stopped", "slot-lost"}),
            "settings": (misconfigure, {"connector-stopped", *MISCONFIGURED}),
            "no publication": (
                lambda: clinic.sql(f"DROP PUBLICATION {name}"),
                {"publication-differs"},
            ),
        }
        for fault, (plant, expected) in faults.items():
            plant()

            def advised(names: set[str] = expected) -> dict[str, str] | None:
                """The advice once it has these names alone: on a busy machine a healthy server may
                once give no answer in time.
                """
                advice = clinic.advice()
                return advice if advice.keys() == names else None

            advice = wait_until(advised, 20, f"advice about {fault} alone")
            assert advice
            (fix,) = set(advice.values())  # doctor and status advise the same
            clinic.carry_out(fix)
            assert (fault, clinic.advice()) == (fault, {})
            shop.conn.execute(b"UPDATE shop.counters SET n = n + 1 WHERE id = 1")
            (row,) = shop.conn.execute(b"SELECT n FROM shop.counters WHERE id = 1").fetchall()
            wait_until(
                lambda n=row[0]: shop.rows("shop.counters")[1]["n"] == n,  # type: ignore[misc]
                20,
                f"changes come through after the fix of {fault}",
            )


def test_a_statement_that_is_advised_fits_names_in_upper_case_and_ends_its_finding(
    shop: Shop,
) -> None:
    shop.migrate()
    capturing = shop.capturing("Shop.Orders")
    role = shop.pipeline.replication_user
    conn = shop.conn

    def findings() -> dict[str, Finding]:
        facts = read_source(conn, capturing.pipeline, connected=False)
        listed = [fault.finding for fault in check_source(facts)]
        return {name_of(finding): finding for finding in listed}

    def run(fix: str) -> None:
        for statement in filter(None, map(str.strip, fix.split(";"))):
            conn.execute(statement.encode())

    for statement in (
        'CREATE SCHEMA "Shop"',
        'CREATE TABLE "Shop"."Orders" (id int PRIMARY KEY) PARTITION BY RANGE (id)',
        'CREATE UNLOGGED TABLE "Shop"."Part" PARTITION OF "Shop"."Orders" DEFAULT',
        'ALTER TABLE "Shop"."Orders" ENABLE ROW LEVEL SECURITY',
        "ALTER SYSTEM SET idle_replication_slot_timeout = '10h'",
        "ALTER SYSTEM SET max_slot_wal_keep_size = -1",
        "SELECT pg_reload_conf()",
    ):
        conn.execute(statement.encode())
    limits = ("idle_replication_slot_timeout", "max_slot_wal_keep_size")
    names = {"table-unlogged", "row-security", *limits}
    try:
        wait_until(lambda: names <= findings().keys(), 20, "the faults are seen")
        for name in names:
            run(findings()[name].fix)
        wait_until(lambda: not names & findings().keys(), 20, "the fixes have ended them")
    finally:
        for setting in limits:
            conn.execute(f"ALTER SYSTEM RESET {setting}".encode())
        conn.execute("SELECT pg_reload_conf()")
    # No other policy undoes a restrictive one.
    conn.execute(
        f'CREATE POLICY few ON "Shop"."Orders" AS RESTRICTIVE FOR SELECT TO {role} USING (id > 5)'.encode()
    )
    hidden = findings()["row-security"]
    assert only_looks(hidden.fix)
    assert "name the other roles instead" in hidden.message
    conn.execute(b'ALTER POLICY few ON "Shop"."Orders" TO pg_monitor')
    assert "row-security" not in findings()
