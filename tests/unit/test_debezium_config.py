"""The connector's configuration, and what its client says, without a server."""

import json
import re
from collections.abc import Iterator

import pytest

from cdc.capture.configuration import configuration, placeholder
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect, redacted
from cdc.connectors.debezium import parse_names
from cdc.errors import ConnectorError, SettingsError
from cdc.model.table import Table
from tests.support.faulty import Proxy, json_answer
from tests.support.pipelines import NOWHERE, pipeline

DSN = "postgresql://owner:owner-secret@db.example:6432/shop"
VERSION = 180000
ORDERS = Table("public", "orders", (), ("id",), "shop.public.orders")


def shop(dsn: str = DSN, **settings: object) -> Pipeline:
    return pipeline("shop", dsn, {"table": "public.orders", "exclude": ["note", "a,b"]}, **settings)


def config(dsn: str = DSN, **settings: object) -> dict[str, str]:
    return configuration(
        shop(dsn, **settings), tables=[ORDERS], server_version=VERSION, cluster_id="cluster"
    )


def test_the_promises_are_in_the_template() -> None:
    promises = {
        "plugin.name": "pgoutput",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "initial",
        "offset.mismatch.strategy": "trust_offset",
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
        "tombstones.on.delete": "true",
        "skipped.operations": "t",
        "decimal.handling.mode": "string",
        "time.precision.mode": "microseconds",
        "event.converting.failure.handling.mode": "fail",
        "interval.handling.mode": "string",
        "binary.handling.mode": "bytes",
        "errors.tolerance": "none",
        "poll.interval.ms": "50",
        "producer.override.compression.type": "lz4",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
    }
    assert promises.items() <= config().items()


def test_one_name_for_slot_publication_topics_and_connector() -> None:
    names = ("name", "slot.name", "publication.name", "topic.prefix")
    assert {config()[name] for name in names} == {"shop"}


def test_the_address_is_the_dsns_and_the_login_is_the_replication_roles() -> None:
    properties = config(source_replication_password="p%s${file:/run/x}")
    expected = {
        "database.hostname": "db.example",
        "database.port": "6432",
        "database.dbname": "shop",
        "database.user": "shop_replication",
        "database.password": "p%s${directory:/run:x}",
    }
    assert expected.items() <= properties.items()
    assert "owner-secret" not in json.dumps(properties)


@pytest.mark.parametrize("mode", ["require", "verify-full"])
def test_tls_settings_are_passed_on(mode: str) -> None:
    expected = {"database.sslmode": mode, "database.sslrootcert": "/etc/ca.pem"}
    assert expected.items() <= config(f"{DSN}?sslmode={mode}&sslrootcert=/etc/ca.pem").items()
    assert "database.sslmode" not in config()


def test_the_owners_certificate_stays_with_the_owner() -> None:
    owners = (
        f"{DSN}?sslmode=verify-full&sslcert=/etc/owner.pem&sslkey=/etc/owner-key.pem&sslpassword=x"
    )
    assert (
        not {"database.sslcert", "database.sslkey", "database.sslpassword"} & config(owners).keys()
    )
    own = {"certificate": "/etc/connector.pem", "key": "/etc/connector-key.pem"}
    expected = {"database.sslcert": own["certificate"], "database.sslkey": own["key"]}
    assert expected.items() <= config(owners, source_replication_certificate=own).items()


def test_defaults_of_a_short_dsn() -> None:
    properties = config("host=localhost dbname=shop")
    assert (properties["database.hostname"], properties["database.port"]) == ("localhost", "5432")


@pytest.mark.parametrize("host", ["/var/run/postgresql", "a,b"])
def test_a_dsn_that_only_libpq_can_use_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="one host over TCP"):
        config(f"host={host} dbname=shop")


def test_an_unreadable_dsn_is_refused_without_quoting_it() -> None:
    with pytest.raises(SettingsError) as caught:
        config("postgresql://owner:s3cr3t@@ x/shop")
    assert "s3cr3t" not in caught.value.message + caught.value.hint


def test_names_are_patterns_that_match_themselves_only() -> None:
    setting = config()["table.include.list"]
    included = setting.split(",")
    assert [p for p in included if re.fullmatch(p, "public.orders")] == [included[0]]
    others = ("publicxorders", "public.orders2")
    assert not any(re.fullmatch(p, name) for p in included for name in others)
    control = [f"cdc.{table}" for table in ("heartbeat", "truncation", "ddl", "signal")]
    assert all(any(re.fullmatch(p, table) for p in included) for table in control)
    assert parse_names(setting) == ["public.orders", *control]


def excluded(file: Pipeline, *unpublished: str) -> str:
    columns = {"public.orders": unpublished}
    properties = configuration(file, tables=[ORDERS], server_version=VERSION, unpublished=columns)
    return properties["column.exclude.list"]


def test_excluded_and_unpublished_columns_are_left_out() -> None:
    # Debezium splits at a comma unless a backslash stands before it.
    patterns = re.split(r"(?<!\\),", excluded(shop(), "total"))
    names = [f"public.orders.{column}" for column in ("note", "a,b", "total")]
    matching = [p.replace(r"\,", ",") for p in patterns]
    assert [next(n for n in names if re.fullmatch(p, n)) for p in matching] == names


ODD = ["Note", "a,b", " lead", "trail ", "a b", "x\\", "a:b", "(", "$", "tab\t", "new\n", "#"]


@pytest.mark.parametrize("column", [*ODD, "straße", "日本", "\U0001f600"])
def test_a_pattern_is_of_one_name_whatever_is_in_it(column: str) -> None:
    """Debezium splits at commas, trims, and compares without case."""
    entry = {"table": "public.orders", "exclude": [column]}
    pattern_text = excluded(pipeline("shop", DSN, entry))
    (pattern,) = (part.strip() for part in pattern_text.split(","))
    matching = re.compile(pattern, re.IGNORECASE)
    assert matching.fullmatch(f"public.orders.{column}")
    other_names = {column.swapcase(), column.strip(), f"{column}x", column[:-1]} - {column}
    assert not any(matching.fullmatch(f"public.orders.{name}") for name in other_names)
    assert parse_names(pattern_text) == [f"public.orders.{column}"]


def test_the_heartbeat_beats_the_pipelines_own_row() -> None:
    properties = config(source_heartbeat_s=0.5)
    assert properties["heartbeat.interval.ms"] == "500"
    assert properties["heartbeat.action.query"].endswith("WHERE pipeline = 'shop'")


def test_the_placeholder_belongs_to_the_cluster_and_the_pipeline() -> None:
    assert placeholder("shop", "a") == placeholder("shop", "a")
    assert len({placeholder("shop", "a"), placeholder("shop", "b"), placeholder("other", "a")}) == 3


@pytest.mark.parametrize(
    "text",
    [
        'bad value "s3cret pw" here',
        "login with password=hidden5 failed",
        '{"database.password":"hidden5"}',
        "postgresql://owner:hidden5@host/db is down",
    ],
)
def test_what_is_said_holds_no_password(text: str) -> None:
    message = redacted(text, {"database.password": "s3cret pw"})
    assert "***" in message
    assert "s3cret" not in message
    assert "hidden5" not in message


@pytest.fixture
def worker() -> Iterator[Proxy]:
    """Answers 409 until it is changed, as a worker does while the group changes."""
    with Proxy(f"http://{NOWHERE}") as worker:
        worker.rule = lambda _: json_answer(409, {})
        yield worker


def test_a_rebalance_is_waited_out(worker: Proxy) -> None:
    statuses = iter([409, 409, 200])
    worker.rule = lambda _: json_answer(next(statuses), {"name": "shop"})
    with Connect(worker.url) as connect:
        assert connect.config("shop") == {"name": "shop"}


def test_a_worker_that_could_not_write_to_its_topic_is_asked_again(
    worker: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Failed to write to config topic; this may be due to a transient error and the request can be safely retried"
    statuses = iter([500, 200])
    worker.rule = lambda _: json_answer(next(statuses), {"message": text})
    with Connect(worker.url) as connect:
        assert connect.config("shop") == {"message": text}
        worker.rule = lambda _: json_answer(500, {"message": text})
        monkeypatch.setattr("cdc.connectors.client.REBALANCE_S", 0.5)
        with pytest.raises(ConnectorError, match="answers 500: Failed to write"):
            connect.config("shop")


def test_an_endless_rebalance_ends(worker: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc.connectors.client.REBALANCE_S", 0.5)
    with Connect(worker.url) as connect, pytest.raises(ConnectorError, match="rebalancing"):
        connect.config("shop")


def test_a_worker_that_is_down() -> None:
    url = f"http://user:s3cret@{NOWHERE}"
    with Connect(url) as connect, pytest.raises(ConnectorError) as caught:
        connect.state("shop")
    assert "127.0.0.1:1" in caught.value.message
    assert "cdc -p FILE up" in caught.value.hint
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1:8083", "nonsense", "http://"])
def test_an_address_that_is_no_url(address: str) -> None:
    with pytest.raises(ConnectorError, match="isn't a URL"):
        Connect(address)
