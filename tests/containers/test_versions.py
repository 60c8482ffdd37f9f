"""The version matrix: laws of a sink on other versions of its server, and a source on other
versions of Postgres.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest

from cdc.migrations import migrate, prepare_source
from cdc.migrations.runner import require_capturable
from cdc.postgres import source, table_survey
from cdc.readiness.facts import SourceRequirements
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.redis.sink import Redis
from tests.contract import laws
from tests.support.containers import IMAGES, run_service
from tests.support.envelopes import table
from tests.support.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module", params=IMAGES["redis"])
def cache_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with run_service("redis", request.param) as address:
        yield f"redis://{address}/4"


@pytest.fixture(scope="module", params=IMAGES["elasticsearch"])
def index_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with run_service("elasticsearch", request.param) as address:
        yield f"http://{address}"


@pytest.fixture(scope="module", params=IMAGES["postgres"])
def source_dsn(request: pytest.FixtureRequest) -> Iterator[str]:
    with run_service("postgres", request.param) as address:
        yield f"postgresql://postgres@{address}/postgres"


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law_of_a_cache(
    law: Callable[[laws.Harness], None], spark: "SparkSession", unique: str, cache_url: str
) -> None:
    harness = laws.Harness(
        spark, lambda: Redis("cache", cache_url, unique), table(f"{unique}.public.items")
    )
    law(harness)
    harness.sink.close()


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law_of_an_index(
    law: Callable[[laws.Harness], None], spark: "SparkSession", unique: str, index_url: str
) -> None:
    harness = laws.Harness(
        spark, lambda: Elasticsearch("search", index_url, unique), table(f"{unique}.public.items")
    )
    law(harness)
    harness.sink.close()


def test_a_source_is_prepared_described_and_decoded(source_dsn: str, unique: str) -> None:
    with psycopg.connect(source_dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA shop")
        connection.execute(
            "CREATE TABLE shop.orders (id int PRIMARY KEY, price numeric(10,2) NOT NULL, note text)"
        )
        migrate(connection)
        requirements = SourceRequirements(unique, [("shop", "orders")], f"{unique}_role")
        assert prepare_source(connection, requirements)
        assert prepare_source(connection, requirements) == []
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [unique])
        connection.execute("INSERT INTO shop.orders VALUES (1, 1.50, 'first')")
        messages = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes("
            "%s, NULL, NULL, 'proto_version', '1', 'publication_names', %s)",
            [unique, unique],
        ).fetchall()
        assert any(data.startswith(b"I") and b"first" in data for (data,) in messages)
        connection.execute("SELECT pg_drop_replication_slot(%s)", [unique])
    captured = pipeline(unique, source_dsn, "shop.orders")
    with source.connect(source_dsn) as connection:
        require_capturable(connection)
        (described,) = table_survey.describe(connection, captured)
    assert described.key == ("id",)
    assert [(column.name, column.type) for column in described.columns] == [
        ("id", "integer"),
        ("price", "numeric(10,2)"),
        ("note", "text"),
    ]
