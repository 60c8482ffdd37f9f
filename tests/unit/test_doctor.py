"""Checks of `cdc doctor` as rules over facts: a planted fault gives exactly its finding."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from cdc.cli import console, verbs
from cdc.cli.status import doctor_document
from cdc.connectors.debezium import TEMPLATE
from cdc.errors import TableRefused
from cdc.model.address import is_loopback
from cdc.model.finding import Finding, find, is_command, worst_first
from cdc.model.finding_codes import DOCTOR, KINDS, code_of
from cdc.model.table import CONTROL_TABLES
from cdc.observe.examination import (
    DANGEROUS,
    LogFacts,
    MachineFacts,
    TopicFacts,
    check_clock,
    check_connect,
    check_log,
    check_machine,
    without_consequences,
)
from cdc.readiness.checks import check_source
from cdc.readiness.facts import PublicationFacts, RoleFacts, Slot, SourceFacts, TableFacts
from cdc.sinks.delta.sink import check_folder
from cdc.sinks.elasticsearch.sink import IndexFacts, check_cluster
from cdc.sinks.redis.health import check_info
from docs.generate import FOLDER
from tests.support.pipelines import unreachable_file

TABLE = "public.orders"
ORDERS = TableFacts(schema="public", name="orders", owner="owner")
SETTINGS = {
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    "max_slot_wal_keep_size": "1000",
    "wal_sender_timeout": "60000",
}
SLOT = Slot(
    True,
    1,
    None,
    None,
    "reserved",
    0,
    0,
    None,
    "pgoutput",
    "db",
    None,
    None,
    "shop",
    failover=False,
)
SOURCE = SourceFacts(
    pipeline="shop",
    version=180000,
    wal_level="logical",
    encoding="UTF8",
    database="db",
    user="owner",
    in_recovery=False,
    settings=SETTINGS,
    slots=(SLOT,),
    senders=1,
    standbys=0,
    transaction_s=None,
    prepared_s=None,
    control=True,
    beats=True,
    role_name="cdc_shop",
    role=RoleFacts(),
    publication=PublicationFacts(
        "owner", owned=True, everything=False, complete=True, tables=(TABLE, *CONTROL_TABLES)
    ),
    tables={TABLE: ORDERS},
    refused={},
    unidentified={},
)


def source(**changes: Any) -> Iterable[Finding]:
    return [fault.finding for fault in check_source(replace(SOURCE, **changes))]


def settings(**changes: str) -> Iterable[Finding]:
    return source(settings={**SETTINGS, **changes})


def own_slot(**changes: Any) -> Iterable[Finding]:
    return source(slots=(replace(SLOT, **changes),))


def role(**changes: Any) -> Iterable[Finding]:
    return source(role=RoleFacts(**changes))


def publication(**changes: Any) -> Iterable[Finding]:
    assert SOURCE.publication
    return source(publication=replace(SOURCE.publication, **changes))


def table(**marks: Any) -> Iterable[Finding]:
    return source(tables={TABLE: replace(ORDERS, **marks)})


def differs(name: str, of: str = "") -> tuple[str, str]:
    setting = name.partition("=")[0]
    return f"setting-differs/{name}", f"{setting} of {of}" if of else setting


Faults = dict[tuple[str, str], Callable[[], Iterable[Finding]]]
"""By key of the catalogue and subject."""
OTHERS = tuple(replace(SLOT, name=f"other{number}") for number in range(10))
IDLE = replace(SLOT, name="old", active=False, retained_bytes=2 << 30)
SOURCE_FAULTS: Faults = {
    ("source-unfit/version", "Postgres"): lambda: source(version=130010),
    differs("wal_level"): lambda: source(wal_level="replica"),
    ("source-unfit/encoding", "server_encoding"): lambda: source(encoding="SQL_ASCII"),
    ("source-unfit/standby", "Postgres"): lambda: source(in_recovery=True),
    ("slots-exhausted", "max_replication_slots"): lambda: source(slots=OTHERS),
    ("slots-exhausted/senders", "max_wal_senders"): lambda: source(
        senders=10, slots=(replace(SLOT, active=False),)
    ),
    ("slot-foreign", "shop"): lambda: own_slot(plugin="wal2json"),
    ("slot-foreign/in-use", "shop"): lambda: source(connected=False),
    ("slot-lost", "shop"): lambda: own_slot(wal_status="lost"),
    ("slot-at-risk", "shop"): lambda: own_slot(safe_wal_size=10, retained_bytes=90),
    differs("max_slot_wal_keep_size"): lambda: settings(max_slot_wal_keep_size="-1"),
    differs("idle_replication_slot_timeout"): lambda: settings(idle_replication_slot_timeout="600"),
    ("log-held/slot", "old"): lambda: source(slots=(SLOT, IDLE)),
    differs("failover", "shop"): lambda: source(standbys=1),
    ("log-held/transaction", "pg_stat_activity"): lambda: source(transaction_s=301.0),
    ("log-held/prepared", "pg_prepared_xacts"): lambda: source(prepared_s=301.0),
    differs("sslmode", "source.dsn"): lambda: source(encrypted=False),
    ("disk-low/source", "Postgres"): lambda: source(disk_free_share=0.05),
    ("control-missing", "cdc"): lambda: source(control=False, role=None, publication=None),
    ("role-unfit/missing", "cdc_shop"): lambda: source(role=None),
    ("role-unfit", "cdc_shop"): lambda: role(can_replicate=False),
    ("role-unfit/superuser", "cdc_shop"): lambda: role(superuser=True),
    ("role-unfit/shared", "cdc_shop"): lambda: source(user="cdc_shop"),
    ("role-unfit/unreadable", "cdc_shop"): lambda: role(unreadable=(TABLE,)),
    ("reader-unfit", "reader"): lambda: source(
        reader_name="reader", missing_grants=("GRANT SELECT ON public.orders TO reader",)
    ),
    ("row-security", TABLE): lambda: table(hidden_by="permissive"),
    ("publication-differs/missing", "shop"): lambda: source(publication=None),
    ("publication-foreign", "shop"): lambda: publication(owned=False),
    ("publication-differs", "shop"): lambda: publication(tables=CONTROL_TABLES),
    ("publication-differs/partial", "shop"): lambda: publication(partial=(TABLE,)),
    ("publication-differs/extra", "shop"): lambda: publication(
        tables=(TABLE, "public.old", *CONTROL_TABLES)
    ),
    ("publication-differs/truncates", "shop"): lambda: publication(truncates=False),
    ("table-refused", TABLE): lambda: source(
        refused={TABLE: TableRefused("No key.", hint="add one")}
    ),
    ("table-unlogged", TABLE): lambda: table(unlogged=TABLE),
    ("identity-unfit", TABLE): lambda: source(
        unidentified={TABLE: TableRefused("No key.", hint="cdc -p FILE migrate")}
    ),
    ("identity-unfit/partial", TABLE): lambda: table(toastable=True, lean=True),
    ("trigger-missing/truncation", TABLE): lambda: table(unwatched=True),
    ("trigger-missing/events", TABLE): lambda: table(unguarded=True),
    ("control-missing", "cdc.heartbeat"): lambda: source(beats=False),
}

CONFIG = {**TEMPLATE, "heartbeat.interval.ms": "2000", "heartbeat.action.query": "UPDATE"}
CONNECT = {"plugin": "3.7.0.Final", "refusal": None, "current": CONFIG, "expected": CONFIG}


def connect(**changes: Any) -> Iterable[Finding]:
    return check_connect("shop", **{**CONNECT, **changes})


def setting(name: str, value: str = "another") -> Iterable[Finding]:
    return connect(current={**CONFIG, name: value})


CONNECT_FAULTS: Faults = {
    ("plugin-unfit", "plugin.path"): lambda: connect(plugin=None),
    ("plugin-unfit/loses-rows", "Debezium"): lambda: connect(plugin="3.6.1.Final"),
    differs("exactly.once.source.support"): lambda: connect(
        refusal="exactly.once.support: not enabled"
    ),
    differs("connector.client.config.override.policy"): lambda: connect(
        refusal="producer.override.linger.ms: not allowed"
    ),
    ("connector-refused", "the connector"): lambda: connect(refusal="database.hostname: no login"),
    differs("heartbeat.interval.ms"): lambda: setting("heartbeat.interval.ms", "0"),
    differs("column.mask"): lambda: setting("column.mask.hash.v2.SHA-256.with.salt.s", "t"),
    ("connector-differs", "shop"): lambda: setting("max.batch.size", "1"),
    **{differs(name): partial(setting, name) for name in DANGEROUS},
}

RETENTION = {"delete.retention.ms": "3600000", "min.compaction.lag.ms": "3600000"}
SIZED = {**RETENTION, "max.message.bytes": "1000"}
TOPIC = TopicFacts(1, 1, 1, 0, 0, {"cleanup.policy": "compact", **SIZED}, 1, SIZED)
NAME = f"shop.{TABLE}"
LOG = LogFacts({NAME: TOPIC}, frozenset({NAME}), 1, {}, True)


def topic(brokers: int = 1, **changes: Any) -> Iterable[Finding]:
    changed = replace(TOPIC, **changes)
    return check_log(replace(LOG, topics={NAME: changed}, brokers=brokers))


def topic_setting(name: str, value: str) -> Iterable[Finding]:
    return topic(settings={**TOPIC.settings, name: value})


def copies(in_sync: int, least: str) -> Iterable[Finding]:
    settings = {**TOPIC.settings, "min.insync.replicas": least}
    return topic(3, copies=3, in_sync=in_sync, settings=settings)


def broker(name: str, value: str) -> Iterable[Finding]:
    return check_log(replace(LOG, broker_settings={name: value}))


LOG_FAULTS: Faults = {
    differs("auto.create.topics.enable"): lambda: broker("auto.create.topics.enable", "true"),
    differs("log.cleaner.enable"): lambda: broker("log.cleaner.enable", "false"),
    ("topic-missing", NAME): lambda: check_log(replace(LOG, topics={NAME: None})),
    ("topic-unfit/partitions", NAME): lambda: topic(partitions=2),
    ("topic-unfit/policy", NAME): lambda: topic_setting("cleanup.policy", "delete"),
    ("topic-unfit/truncated", NAME): lambda: topic(truncated=1),
    differs("delete.retention.ms", NAME): lambda: topic_setting("delete.retention.ms", "1000"),
    differs("min.compaction.lag.ms", NAME): lambda: topic_setting("min.compaction.lag.ms", "0"),
    differs("max.message.bytes", NAME): lambda: topic_setting("max.message.bytes", "10"),
    ("topic-copies/single", NAME): lambda: topic(3),
    ("topic-copies/fewer", NAME): lambda: topic(3, expected_copies=3),
    differs("min.insync.replicas=all", NAME): lambda: copies(3, "3"),
    differs("min.insync.replicas=1", NAME): lambda: copies(3, "1"),
    ("topic-copies/out-of-sync", NAME): lambda: copies(2, "2"),
    ("topic-copies/leaderless", NAME): lambda: topic(leaderless=1),
    differs("unclean.leader.election.enable", NAME): lambda: topic_setting(
        "unclean.leader.election.enable", "true"
    ),
}

INFO = {"redis_version": "7.4.0", "role": "master", "maxmemory_policy": "noeviction"}
INDEX = IndexFacts("Elasticsearch", ("8.19.21",), "green", 10, 1000, {"a": 0.5}, 0.85, (), ())
MACHINE = MachineFacts(17, True, 8 << 30, 8 << 30, "/state")


def cache(**changes: Any) -> Iterable[Finding]:
    return check_info("cache", "redis://localhost/0", {**INFO, **changes})


def index(**changes: Any) -> Iterable[Finding]:
    return check_cluster("search", replace(INDEX, **changes))


def machine(**changes: Any) -> Iterable[Finding]:
    return check_machine(replace(MACHINE, **changes))


OTHER_FAULTS: Faults = {
    differs("maxmemory-policy"): lambda: cache(maxmemory_policy="allkeys-lru"),
    ("sink-unfit/redis", "redis_version"): lambda: cache(redis_version="6.2.1"),
    ("sink-unfit/cluster", "cluster-enabled"): lambda: cache(redis_mode="cluster"),
    ("sink-unfit/replica", "role"): lambda: cache(role="slave"),
    ("memory-low/cache", "maxmemory"): lambda: cache(used_memory=90, maxmemory=100),
    ("cache-save-failing", "persistence"): lambda: cache(rdb_last_bgsave_status="err"),
    ("sink-unfit/elasticsearch", "version"): lambda: index(versions=("7.17.29",)),
    ("index-red", "cluster"): lambda: index(status="red"),
    ("index-shards-full", "cluster.max_shards_per_node"): lambda: index(shards=950),
    ("disk-low/index", "a"): lambda: index(disk_used={"a": 0.9}),
    ("index-blocked", "shop-public.orders@1"): lambda: index(blocked=("shop-public.orders@1",)),
    ("index-shadows-alias", "shop-public.orders"): lambda: index(shadowed=("shop-public.orders",)),
    ("sink-unfit/folder", "/warehouse"): lambda: check_folder("lake", "/warehouse", False, 0.5),
    ("disk-low/warehouse", "/warehouse"): lambda: check_folder("lake", "/warehouse", True, 0.01),
    ("machine-unfit/java", "java"): lambda: machine(java=None),
    ("machine-unfit/old-java", "java"): lambda: machine(java=11),
    ("machine-unfit/spark", "pyspark"): lambda: machine(spark=False),
    ("memory-low/machine", "memory"): lambda: machine(memory_free=1 << 20),
    ("disk-low/state", "/state"): lambda: machine(state_free=1 << 20),
    ("clock-off", "Postgres"): lambda: check_clock("Postgres", -3.0),
}
FAULTS = {**SOURCE_FAULTS, **CONNECT_FAULTS, **LOG_FAULTS, **OTHER_FAULTS}


def test_healthy_facts_give_no_finding() -> None:
    findings = [
        *source(),
        *connect(),
        *check_log(LOG),
        *copies(3, "2"),
        *cache(),
        *index(),
        *check_folder("lake", "/warehouse", True, 0.5),
        *machine(),
        *check_clock("Postgres", 1.0),
    ]
    assert findings == []


def test_there_is_no_finding_on_what_register_would_make() -> None:
    """Before the first `register`: no slot, no connector, no topic."""
    log = check_log(replace(LOG, topics={NAME: None}, registered=False))
    assert [*source(slots=(), connected=False), *connect(current=None), *log] == []


def test_every_case_has_a_fault() -> None:
    missing = set(DOCTOR) - {key for key, _ in FAULTS}
    elsewhere = {"view-refused", "state-too-large", "machine-unfit", "setting-differs/index"}
    assert missing == elsewhere
    assert len(FAULTS) >= 89


@pytest.mark.parametrize(("key", "subject"), FAULTS)
def test_a_planted_fault_gives_exactly_its_finding(key: str, subject: str) -> None:
    (finding,) = FAULTS[key, subject]()
    kind = KINDS[key]
    assert (finding.code, finding.subject) == (code_of(key), subject)
    assert (finding.severity, finding.why) == (kind.severity, kind.why)
    assert finding.message.endswith(".")
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
    monkeypatch.setattr(console.call, "answered", False)
    with pytest.raises(SystemExit):
        verbs.main()
    findings = json.loads(capsys.readouterr().out)["findings"]
    codes = [finding["code"] for finding in findings]
    away = sorted(code for code in codes if code.endswith("-unreachable"))
    assert away == [f"{part}-unreachable" for part in ("connect", "kafka", "sink", "source")]


@pytest.mark.parametrize(
    ("cause", "remaining"),
    [
        (differs("wal_level"), 1),
        (("role-unfit", "cdc_shop"), 1),
        (("publication-differs/missing", "shop"), 1),
        (differs("max_slot_wal_keep_size"), 2),
        (("role-unfit/superuser", "cdc_shop"), 2),
        (("publication-differs/extra", "shop"), 2),
        (("publication-differs/truncates", "shop"), 2),
    ],
)
def test_a_refused_connector_follows_from_what_register_refuses(
    cause: tuple[str, str], remaining: int
) -> None:
    findings = [*FAULTS["connector-refused", "the connector"](), *FAULTS[cause]()]
    assert len(without_consequences(findings)) == remaining


def test_hosts_of_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "/run/pg")))
    assert not is_loopback("db.shop")


def test_the_document_is_as_its_schema_says() -> None:
    findings = worst_first(find(key, "it", "So.", "cdc -p FILE doctor") for key in DOCTOR)
    schema = json.loads((FOLDER / "reference" / "doctor.schema.json").read_text())
    printed = doctor_document("shop", findings)
    printed["findings"] = [vars(finding) for finding in findings]
    jsonschema.validate(json.loads(json.dumps(printed)), schema)
    assert printed["verdict"] == "down"
