"""A smoke test of the shipped compose file: its servers are of the pinned versions."""

from typing import TYPE_CHECKING

import httpx
import psycopg
import redis

from cdc.compose import versions
from cdc.kafka.clients import kafka

if TYPE_CHECKING:
    from tests.conftest import Stack


def test_every_server_answers_with_the_pinned_version(stack: "Stack") -> None:
    with psycopg.connect(stack.endpoints.postgres) as connection:
        major, minor = versions.POSTGRES.split(".")
        assert connection.info.server_version == int(major) * 10_000 + int(minor)
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
    with redis.Redis.from_url(stack.endpoints.redis) as cache:
        assert cache.info("server")["valkey_version"].startswith(f"{versions.VALKEY}.")
    index = httpx.get(stack.endpoints.elasticsearch).raise_for_status().json()
    assert index["version"]["number"] == versions.ELASTICSEARCH
    plugins = httpx.get(f"{stack.endpoints.connect}/connector-plugins").raise_for_status().json()
    connector = "io.debezium.connector.postgresql.PostgresConnector"
    assert {plugin["version"] for plugin in plugins if plugin["class"] == connector} == {
        versions.DEBEZIUM
    }
    with kafka.KafkaAdminClient(bootstrap_servers=stack.endpoints.kafka) as admin:
        assert "cdc-connect-offsets" in admin.list_topics()
