"""`cdc doctor` on real servers: a planted misconfiguration gives exactly its finding, and a healthy
pipeline none above a remark.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis

from cdc.connectors.client import Connect
from cdc.doctor.examination import Examination
from cdc.errors import SourceError
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding, Severity
from cdc.postgres import source
from cdc.sink import factory
from cdc.sinks.redis.settings import Redis
from tests.support.cache import cache as server_of
from tests.support.pipelines import NOWHERE
from tests.support.shop import Shop

pytestmark = pytest.mark.timeout(300)


REFUSED = (
    *("role-unfit", "role-unreadable", "publication-incomplete", "publication-partial"),
    *("table-refused", "heartbeat-row-missing"),
)
"""Faults that `register` refuses, and calls what the doctor calls them."""
DECIDED_BY_A_PERSON = {
    "table-refused": "which columns are the key",
    "topic-policy": "when the views may be built again, which the renewal of a topic takes",
}
"""Findings whose `fix` isn't run here, by what has to be decided first."""


@dataclass
class Clinic:
    """A pipeline in all three destinations of the stack, and what the doctor says of it."""

    shop: Shop
    endpoints: Any
    folder: Path

    def examine(self, **settings: Any) -> tuple[Finding, ...]:
        pipeline = self.shop.pipeline.model_copy(update=settings)
        sinks = [factory.build(pipeline, name) for name in pipeline.sinks]
        return Examination(pipeline, sinks, self.folder).findings()

    def troubles(self, **settings: Any) -> list[str]:
        """The codes of all findings above a remark, each with its command."""
        findings = self.examine(**settings)
        assert all(finding.fix and finding.why for finding in findings)
        # The machine that runs the tests isn't what is tested.
        machine_codes = ("memory-low", "state-disk-low", "warehouse-disk-low", "source-disk-low")
        crowded = ("index-disk-high", "slot-of-others-idle")
        return [
            finding.code
            for finding in findings
            if finding.severity is not Severity.INFO
            and finding.code not in (*machine_codes, *crowded)
        ]

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.shop.conn.execute(statement.encode())

    def carry_out_fixes(self) -> None:
        """Run what is printed next to each finding above a remark."""
        for finding in self.examine():
            if finding.severity is Severity.INFO:
                continue
            if finding.fix == "cdc -p FILE migrate":
                self.shop.migrate()
            elif finding.fix == "cdc -p FILE register":
                self.shop.register()
            elif finding.fix == "cdc -p FILE topics":
                with Topics(self.shop.pipeline.kafka) as topics:
                    ensure_topics(topics, self.shop.pipeline)
            else:
                self.sql(finding.fix)


@pytest.fixture
def clinic(shop: Shop, stack: Any, unique: str, tmp_path: Path) -> Clinic:
    endpoints = stack.endpoints
    tree = shop.pipeline.model_dump()
    sinks = {
        "search": {"type": "elasticsearch", "url": endpoints.elasticsearch},
        "cache": {"type": "redis", "url": endpoints.redis, "prefix": unique},
        "warehouse": {"type": "delta", "path": str(tmp_path / "warehouse")},
    }
    fresh = type(shop.pipeline).from_tree(
        {
            "pipeline": unique,
            "source": {
                "dsn": shop.pipeline.source.dsn,
                "tables": [
                    {"table": "shop.orders", "partitions": 2, "exclude": ["hidden"]},
                    {"table": "shop.counters", "partitions": 1},
                ],
                "replication_password": tree["source"]["replication_password"].get_secret_value(),
                "heartbeat_s": 0.5,
            },
            "sinks": sinks,
            "kafka": endpoints.kafka,
            "connect": endpoints.connect,
        }
    )
    return Clinic(replace(shop, pipeline=fresh), endpoints, tmp_path)


def test_the_doctor_before_and_after_register(clinic: Clinic) -> None:
    """What `register` would meet; then health, and faults of Postgres, Connect and Kafka."""
    shop, name = clinic.shop, clinic.shop.pipeline.pipeline
    assert clinic.troubles() == ["control-missing"]
    shop.migrate()
    assert clinic.troubles() == []
    shop.register()
    assert clinic.troubles() == []
    role = shop.pipeline.replication_user
    faults = {
        "role-unfit": f"ALTER ROLE {role} NOREPLICATION",
        "role-superuser": f"ALTER ROLE {role} SUPERUSER",
        "role-unreadable": f"REVOKE SELECT ON shop.orders FROM {role}",
        "row-security": "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY",
        "publication-incomplete": f"ALTER PUBLICATION {name} DROP TABLE shop.orders",
        "publication-partial": f"ALTER PUBLICATION {name} SET (publish = 'insert')",
        "identity-partial": "ALTER TABLE shop.orders REPLICA IDENTITY DEFAULT",
        "table-refused": "ALTER TABLE shop.counters DROP CONSTRAINT counters_pkey",
        "truncation-unwatched": "ALTER TABLE shop.orders DISABLE TRIGGER USER",
        "heartbeat-row-missing": f"DELETE FROM cdc.heartbeat WHERE pipeline = '{name}'",
    }
    codes, refusals = {}, {}
    with Connect(shop.connect) as connect:
        # A stopped connector: faults of Postgres don't end its task, nor does it mend them.
        connect.stop(name)
    for code, plant in faults.items():
        clinic.sql(plant)
        codes[code] = clinic.troubles()
        if code in REFUSED:
            with pytest.raises(SourceError) as refused:
                shop.register()
            refusals[code] = refused.value.code
        if code in DECIDED_BY_A_PERSON:
            clinic.sql("ALTER TABLE shop.counters ADD PRIMARY KEY (id)")
        else:
            clinic.carry_out_fixes()
        assert (code, clinic.troubles()) == (code, [])
    assert codes == {code: [code] for code in faults}
    assert refusals == {code: code for code in REFUSED}
    assert clinic.troubles() == []
    assert _connector_faults(clinic) == {
        code: [code]
        for code in ("connector-skips-errors", "connector-rounds-numbers", "connector-differs")
    }
    assert _topic_faults(clinic) == {
        code: [code]
        for code in ("topic-retention", "topic-policy", "topic-small-records", "topic-missing")
    }


def _connector_faults(clinic: Clinic) -> dict[str, list[str]]:
    name, codes = clinic.shop.pipeline.pipeline, {}
    with Connect(clinic.shop.connect) as connect:
        config = connect.config(name)
        assert config is not None
        for code, setting, value in (
            ("connector-skips-errors", "errors.tolerance", "all"),
            ("connector-rounds-numbers", "decimal.handling.mode", "double"),
            ("connector-differs", "max.batch.size", "100"),
        ):
            connect.put(name, {**config, setting: value})
            codes[code] = clinic.troubles()
            clinic.carry_out_fixes()
            assert (code, clinic.troubles()) == (code, [])
    return codes


def _topic_faults(clinic: Clinic) -> dict[str, list[str]]:
    pipeline, codes = clinic.shop.pipeline, {}
    topic = pipeline.topic("shop.counters")
    with Topics(pipeline.kafka) as topics:
        for code, setting, value in (
            ("topic-retention", "delete.retention.ms", "1000"),
            ("topic-policy", "cleanup.policy", "delete"),
            ("topic-small-records", "max.message.bytes", "1000"),
        ):
            previous = topics.overrides([topic])[topic].get(setting)
            topics.override({topic: {setting: value}})
            codes[code] = clinic.troubles()
            if code in DECIDED_BY_A_PERSON:
                topics.override({topic: {setting: previous}})
            else:
                clinic.carry_out_fixes()
            assert (code, clinic.troubles()) == (code, [])
        topics.remove([topic])
        codes["topic-missing"] = clinic.troubles()
    return codes


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
        "cache-evicts",
        lambda: cache.config_set("maxmemory-policy", "allkeys-lru"),
        lambda: cache.config_set("maxmemory-policy", policy),
    )
    cache.close()
    with server_of(clinic.folder / "state", "--maxmemory-policy", "allkeys-lru") as url:
        state = Redis(type="redis", url=url, prefix="shop")
        evicting = clinic.troubles(state=state), clinic.examine(state=state)
    assert evicting[0] == ["cache-evicts"]
    assert [part.message for part in evicting[1] if part.code == "cache-evicts"] == [
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
    note("warehouse-read-only", lambda: warehouse.write_text("no folder"), warehouse.unlink)
    assert codes == {code: [code] for code in codes}

    dsn = shop.pipeline.source.dsn
    nowhere = shop.pipeline.source.model_copy(
        update={"dsn": dsn.replace(dsn.split("@")[1].split("/")[0], NOWHERE)}
    )
    assert clinic.troubles(source=nowhere) == ["source-unreachable"]
    assert clinic.troubles(connect=f"http://{NOWHERE}") == ["connect-unreachable"]
    assert clinic.troubles(kafka=NOWHERE) == ["kafka-unreachable"]
    assert clinic.troubles() == []


def test_a_second_reader_of_the_slot_is_told(clinic: Clinic) -> None:
    """A slot of the pipeline's name that another program made."""
    shop = clinic.shop
    shop.migrate()
    with source.connect(shop.pipeline.source.dsn) as conn:
        conn.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')",
            [shop.pipeline.pipeline],
        )
        try:
            assert clinic.troubles() == ["slot-foreign"]
        finally:
            with suppress(psycopg.Error):
                shop.drop_slot()
