"""A cache on a cluster keeps the laws of a sink."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest import mock

import pytest

from cdc.sink.lane_run import collect_outcome
from cdc.sinks.redis.cluster_sink import ClusterRedis
from tests.contract import laws
from tests.contract.laws import Harness
from tests.support.cache import ClusterServers, nodes
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with nodes(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(
    law: Callable[[Harness], None], servers: ClusterServers, spark: "SparkSession", unique: str
) -> None:
    harness = Harness(
        spark,
        lambda: ClusterRedis("cache", servers.url, unique),
        table(f"{unique}.public.items"),
    )
    law(harness)
    harness.sink.close()
