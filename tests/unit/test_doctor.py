"""Checks of `cdc doctor` as rules over facts: a planted fault gives exactly its finding, healthy
facts give none.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from cdc.cli import console, verbs
from cdc.cli.doctor import document
from cdc.config.settings import CONTROL_TABLES
from cdc.connectors.debezium import TEMPLATE
from cdc.doctor.connect import DANGEROUS, ConnectFacts, check_connect
from cdc.doctor.machine import MachineFacts, check_clock, check_machine, is_loopback
from cdc.doctor.source_checks import check_source
from cdc.doctor.source_facts import (
    PublicationFacts,
    RoleFacts,
    SlotFacts,
    SourceFacts,
    TableFacts,
)
from cdc.doctor.topics import LogFacts, TopicFacts, check_log
from cdc.model.finding import Finding, find, is_command, worst_first
from cdc.model.finding_codes.catalogue import DOCTOR
from cdc.sinks.delta.health import WarehouseFacts, check_folder
from cdc.sinks.elasticsearch.health import IndexFacts, check_cluster
from cdc.sinks.redis.health import check_info
from docs.generate import FOLDER
from tests.support.pipelines import unreachable_file

TABLE = "public.orders"
SETTINGS = {
    "wal_level": "logical",
    "server_encoding": "UTF8",
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    "max_slot_wal_keep_size": "1000",
    "wal_sender_timeout": "60000",
}
SLOT = SlotFacts("shop", database="db")
SOURCE = SourceFacts(
    "shop",
    180000,
    "db",
    False,
    SETTINGS,
    (SLOT,),
    1,
    0,
    None,
    None,
    True,
    True,
    "cdc_shop",
    RoleFacts(),
    PublicationFacts("owner", True, True, (TABLE, *CONTROL_TABLES)),
    {TABLE: TableFacts()},
    {},
    {},
)


def source(**changes: Any) -> Iterable[Finding]:
    return check_source(replace(SOURCE, **changes))


def settings(**changes: str) -> Iterable[Finding]:
    return source(settings={**SETTINGS, **changes})


def own_slot(**changes: Any) -> Iterable[Finding]:
    return source(slots=(replace(SLOT, **changes),))


def role(**changes: Any) -> Iterable[Finding]:
    return source(role=replace(RoleFacts(), **changes))


def publication(**changes: Any) -> Iterable[Finding]:
    assert SOURCE.publication
    return source(publication=replace(SOURCE.publication, **changes))


def table(**marks: Any) -> Iterable[Finding]:
    return source(tables={TABLE: TableFacts(**marks)})


OTHERS = tuple(SlotFacts(f"other{number}") for number in range(10))
IDLE = SlotFacts("old", active=False, retained_bytes=2 << 30)
SOURCE_FAULTS: dict[str, Callable[[], Iterable[Finding]]] = {
    "postgres-too-old": lambda: source(version=130010),
    "wal-level": lambda: settings(wal_level="replica"),
    "source-encoding": lambda: settings(server_encoding="SQL_ASCII"),
    "source-read-only": lambda: source(in_recovery=True),
    "slots-exhausted": lambda: source(slots=OTHERS),
    "senders-exhausted": lambda: source(senders=10, slots=(replace(SLOT, active=False),)),
    "slot-foreign": lambda: own_slot(plugin="wal2json"),
    "slot-in-use": lambda: source(connected=False),
    "slot-lost": lambda: own_slot(wal_status="lost"),
    "slot-at-risk": lambda: own_slot(safe_bytes=10, retained_bytes=90),
    "slot-unlimited": lambda: settings(max_slot_wal_keep_size="-1"),
    "slot-idle-limit": lambda: settings(idle_replication_slot_timeout="600"),
    "slot-of-others-idle": lambda: source(slots=(SLOT, IDLE)),
    "slot-not-failover": lambda: source(standbys=1),
    "transaction-long": lambda: source(transaction_s=301.0),
    "transaction-prepared": lambda: source(prepared_s=301.0),
    "source-unencrypted": lambda: source(encrypted=False),
    "source-disk-low": lambda: source(disk_free_share=0.05),
    "control-missing": lambda: source(control=False, role=None, publication=None),
    "role-missing": lambda: source(role=None),
    "role-unfit": lambda: role(can_replicate=False),
    "role-superuser": lambda: role(superuser=True),
    "role-unreadable": lambda: role(unreadable=(TABLE,)),
    "row-security": lambda: table(hidden_by="permissive"),
    "publication-missing": lambda: source(publication=None),
    "publication-foreign": lambda: publication(owned=False),
    "publication-incomplete": lambda: publication(tables=CONTROL_TABLES),
    "publication-partial": lambda: publication(partial=(TABLE,)),
    "publication-extra": lambda: publication(tables=(TABLE, "public.old", *CONTROL_TABLES)),
    "table-refused": lambda: source(refused={TABLE: ("No key.", "add one")}),
    "table-unlogged": lambda: table(unlogged=TABLE),
    "identity-without-key": lambda: source(
        unidentified={TABLE: ("No key.", "cdc -p FILE migrate")}
    ),
    "identity-partial": lambda: table(partial=True),
    "truncation-unwatched": lambda: table(unwatched=True),
    "events-unguarded": lambda: table(unguarded=True),
    "heartbeat-row-missing": lambda: source(beats=False),
}

CONFIG = {**TEMPLATE, "heartbeat.interval.ms": "2000", "heartbeat.action.query": "UPDATE"}
CONNECT = ConnectFacts("shop", "3.7.0.Final", None, CONFIG, CONFIG)


def connect(**changes: Any) -> Iterable[Finding]:
    return check_connect(replace(CONNECT, **changes))


def setting(name: str, value: str = "another") -> Iterable[Finding]:
    return connect(current={**CONFIG, name: value})


CONNECT_FAULTS: dict[str, Callable[[], Iterable[Finding]]] = {
    "plugin-missing": lambda: connect(plugin=None),
    "plugin-loses-rows": lambda: connect(plugin="3.6.1.Final"),
    "worker-not-exactly-once": lambda: connect(refusal="exactly.once.support: not enabled"),
    "worker-refuses-overrides": lambda: connect(refusal="producer.override.linger.ms: not allowed"),
    "connector-refused": lambda: connect(refusal="database.hostname: no login"),
    "connector-without-heartbeat": lambda: setting("heartbeat.interval.ms", "0"),
    "connector-differs": lambda: setting("max.batch.size", "1"),
    **{
        code: lambda name=name: setting(name)  # type: ignore[misc]
        for name, (code, *_) in DANGEROUS.items()
    },
}

RETENTION = {"delete.retention.ms": "3600000", "min.compaction.lag.ms": "3600000"}
SIZED = {**RETENTION, "max.message.bytes": "1000"}
TOPIC = TopicFacts(1, 1, 1, 0, 0, {"cleanup.policy": "compact", **SIZED}, 1, SIZED)
LOG = LogFacts({"shop.public.orders": TOPIC}, frozenset({"shop.public.orders"}), 1, {}, True)


def topic(brokers: int = 1, **changes: Any) -> Iterable[Finding]:
    changed = replace(TOPIC, **changes)
    return check_log(replace(LOG, topics={"shop.public.orders": changed}, brokers=brokers))


def topic_setting(name: str, value: str) -> Iterable[Finding]:
    return topic(settings={**TOPIC.settings, name: value})


def copies(in_sync: int, least: str) -> Iterable[Finding]:
    settings = {**TOPIC.settings, "min.insync.replicas": least}
    return topic(3, copies=3, in_sync=in_sync, settings=settings)


def broker(name: str, value: str) -> Iterable[Finding]:
    return check_log(replace(LOG, broker_settings={name: value}))


LOG_FAULTS: dict[str, Callable[[], Iterable[Finding]]] = {
    "broker-creates-topics": lambda: broker("auto.create.topics.enable", "true"),
    "broker-never-compacts": lambda: broker("log.cleaner.enable", "false"),
    "topic-missing": lambda: check_log(replace(LOG, topics={"shop.public.orders": None})),
    "topic-partitions": lambda: topic(partitions=2),
    "topic-policy": lambda: topic_setting("cleanup.policy", "delete"),
    "topic-truncated": lambda: topic(truncated=1),
    "topic-retention": lambda: topic_setting("delete.retention.ms", "1000"),
    "topic-compaction-lag": lambda: topic_setting("min.compaction.lag.ms", "0"),
    "topic-small-records": lambda: topic_setting("max.message.bytes", "10"),
    "topic-single-copy": lambda: topic(3),
    "topic-needs-all-copies": lambda: copies(3, "3"),
    "topic-stores-once": lambda: copies(3, "1"),
    "topic-under-replicated": lambda: copies(2, "2"),
    "topic-leaderless": lambda: topic(leaderless=1),
    "topic-unclean-leader": lambda: topic_setting("unclean.leader.election.enable", "true"),
}

INFO = {"redis_version": "7.4.0", "role": "master", "maxmemory_policy": "noeviction"}
INDEX = IndexFacts(("8.19.21",), "green", 10, 1000, {"a": 0.5}, 0.85, (), ())
WAREHOUSE = WarehouseFacts("/warehouse", True, 0.5)
MACHINE = MachineFacts(17, True, 8 << 30, 8 << 30, "/state")


def cache(**changes: Any) -> Iterable[Finding]:
    return check_info("cache", "redis://localhost/0", {**INFO, **changes})


def index(**changes: Any) -> Iterable[Finding]:
    return check_cluster("search", replace(INDEX, **changes))


def machine(**changes: Any) -> Iterable[Finding]:
    return check_machine(replace(MACHINE, **changes))


OTHER_FAULTS: dict[str, Callable[[], Iterable[Finding]]] = {
    "cache-evicts": lambda: cache(maxmemory_policy="allkeys-lru"),
    "cache-too-old": lambda: cache(redis_version="6.2.1"),
    "cache-clustered": lambda: cache(redis_mode="cluster"),
    "cache-replica": lambda: cache(role="slave"),
    "cache-memory-high": lambda: cache(used_memory=90, maxmemory=100),
    "cache-save-failing": lambda: cache(rdb_last_bgsave_status="err"),
    "index-version": lambda: index(versions=("9.1.0",)),
    "index-red": lambda: index(status="red"),
    "index-shards-full": lambda: index(shards=950),
    "index-disk-high": lambda: index(disk_used={"a": 0.9}),
    "index-blocked": lambda: index(blocked=("shop-public.orders@1",)),
    "index-shadows-alias": lambda: index(shadowed=("shop-public.orders",)),
    "warehouse-read-only": lambda: check_folder("lake", replace(WAREHOUSE, writable=False)),
    "warehouse-disk-low": lambda: check_folder("lake", replace(WAREHOUSE, free_share=0.01)),
    "java-missing": lambda: machine(java=None),
    "java-too-old": lambda: machine(java=11),
    "spark-missing": lambda: machine(spark=False),
    "memory-low": lambda: machine(memory_free=1 << 20),
    "state-disk-low": lambda: machine(state_free=1 << 20),
    "clock-off": lambda: check_clock("Postgres", -3.0),
}
FAULTS = {**SOURCE_FAULTS, **CONNECT_FAULTS, **LOG_FAULTS, **OTHER_FAULTS}
ONLY_WITH_SERVERS = {"view-refused", "view-unfit", "state-too-large", "machine-unreadable"}


def test_healthy_facts_give_no_finding() -> None:
    findings = [
        *source(),
        *connect(),
        *check_log(LOG),
        *copies(3, "2"),
        *cache(),
        *index(),
        *check_folder("lake", WAREHOUSE),
        *machine(),
        *check_clock("Postgres", 1.0),
    ]
    assert findings == []


def test_there_is_no_finding_on_what_register_would_make() -> None:
    """Before the first `register`: no slot, no connector, no topic."""
    log_before = replace(LOG, topics={"shop.public.orders": None}, registered=False)
    findings = [
        *source(slots=(), connected=False),
        *connect(current=None),
        *check_log(log_before),
    ]
    assert findings == []


@pytest.mark.parametrize("code", FAULTS)
def test_a_planted_fault_gives_exactly_its_finding(code: str) -> None:
    findings = list(FAULTS[code]())
    assert [finding.code for finding in findings] == [code]
    (finding,) = findings
    assert finding.message.endswith(".")
    assert finding.why
    assert is_command(finding.fix)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://u:secret@h:6390/4", "-h h -p 6390 --user u --askpass"),
        ("redis://:secret@h:6390/4", "-h h -p 6390 --askpass"),
        ("redis://h", "-h h -p 6379"),
        ("rediss://h:6380/0?ssl_ca_certs=/a%20b.pem", "-h h -p 6380 --tls --cacert '/a b.pem'"),
        ("unix://u:secret@/run/a.sock?db=4", "-s /run/a.sock --user u --askpass"),
    ],
)
def test_the_fix_for_a_cache_speaks_to_its_own_server(url: str, words: str) -> None:
    (finding,) = check_info("cache", url, {**INFO, "maxmemory_policy": "allkeys-lru"})
    assert finding.fix == f"redis-cli {words} CONFIG SET maxmemory-policy noeviction"
    assert is_command(finding.fix)


def test_with_every_server_away_a_file_with_patterns_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unreachable_file(tmp_path, "public.*")
    words = ["cdc", "-p", str(path), "--state", str(tmp_path), "doctor", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(console, "documents", console.Documents())
    with pytest.raises(SystemExit):
        verbs.main()
    findings = json.loads(capsys.readouterr().out)["findings"]
    away = [finding["code"] for finding in findings if finding["code"].endswith("-unreachable")]
    assert sorted(away) == [
        f"{part}-unreachable" for part in ("connect", "kafka", "sink", "source")
    ]


def test_every_code_has_a_fault() -> None:
    assert set(DOCTOR) - set(FAULTS) == ONLY_WITH_SERVERS
    assert len(FAULTS) >= 50


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("/run/pg", True),
        ("db.shop", False),
    ],
)
def test_hosts_of_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_document_is_as_its_schema_says() -> None:
    findings = worst_first(find(code, "it", "So.", "cdc -p FILE doctor") for code in DOCTOR)
    schema = json.loads((FOLDER / "reference" / "doctor.schema.json").read_text())
    printed = document("shop", findings)
    printed["findings"] = [vars(finding) for finding in findings]
    jsonschema.validate(json.loads(json.dumps(printed)), schema)
    assert printed["verdict"] == "down"
