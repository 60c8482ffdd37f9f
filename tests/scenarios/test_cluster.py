"""A standalone Spark cluster: its nodes have nothing of the driver's host but what the documentation names."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import redis

from cdc.spark.session import SHIPPED
from tests.support.cluster import SPARK_HOME, Cluster, Node, cluster, daemons
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

WITH_SPARK = """
import json, sys
from tests.support.verbs import run_with_spark
from pyspark.sql import SparkSession
ended = [run_with_spark(words) for words in json.loads(sys.argv[1])]
partitions = SparkSession.getActiveSession().conf.get("spark.sql.shuffle.partitions")
print(json.dumps({"verbs": [[one.returncode, one.stdout, one.stderr] for one in ended], "partitions": partitions}))
"""


@contextmanager
def writes_held(address: str) -> "Iterator[redis.Redis]":
    """Let a cache's writes wait, so that a batch stays in its middle until the block ends."""
    with closing(redis.Redis.from_url(address)) as server:
        server.client_pause(600_000, all=False)
        try:
            yield server
        finally:
            server.client_unpause()


def find_holder(server: redis.Redis, spark: Cluster) -> tuple[Node, psutil.Process]:
    """Wait for an executor, one of whose Python workers waits for a write. Return it with its node."""
    found = list[tuple[Node, psutil.Process]]()

    def look() -> bool:
        waiting = {client["addr"] for client in server.client_list() if "b" in client["flags"]}
        for node in spark.nodes:
            # One that ends meanwhile is looked for again.
            with suppress(psutil.NoSuchProcess):
                found.extend((node, it) for it in node.executors() if waiting & connections(it))
        return bool(found)

    wait_until(look, 60, "an executor to be held in mid-batch")
    return found[0]


def connections(executor: psutil.Process) -> set[str]:
    """The addresses from which the Python workers of an executor are connected to servers."""
    workers = [worker for daemon in daemons(executor) for worker in daemon.children()]
    links = [link.laddr for worker in workers for link in worker.net_connections("tcp")]
    return {f"{address.ip}:{address.port}" for address in links if address}


def test_a_cluster_goes_on_without_an_executor_and_without_a_worker(
    world: "World", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.begin("public.items")
    insert = "INSERT INTO items SELECT n, 0 FROM generate_series({}, {}) n"
    world.sql(insert.format(1, 500))
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster") as spark:
        for name, value in spark.environment.items():
            monkeypatch.setenv(name, value)
        master = ("--master", spark.url)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
        with world.process(*master):
            world.settle()
            assert_python_is_sent(spark)
            with writes_held(world.cache) as server:
                world.sql("UPDATE items SET n = 1", "DELETE FROM items WHERE id % 5 = 0")
                _, executor = find_holder(server, spark)
                executor.kill()
                executor.wait(30)
                # Another executor has the same batch: now its node loses its worker.
                node, executor = find_holder(server, spark)
                node.kill()
                wait_until(lambda: not executor.is_running(), 60, "its executor to end")
                find_holder(server, spark)
            world.settle()
            world.sql(insert.format(501, 600))
            world.settle()
        # On the node that is left. A rebuild compares what it has made before readers see it.
        verbs = [
            world.words("rebuild", "search", *master),
            world.words("verify", "--json", *master),
        ]
        command = [sys.executable, "-c", WITH_SPARK, json.dumps(verbs)]
        with closing(redis.Redis.from_url(world.cache)) as server:
            lost = f"{world.name}:public.items:501"
            row = server.get(lost)
            assert row
            server.delete(lost)
            ended = subprocess.run(command, check=False, capture_output=True, text=True)
            server.set(lost, row)
        assert ended.returncode == 0, ended.stderr
        answer = json.loads(ended.stdout.splitlines()[-1])
        rebuilt, verified = answer["verbs"]
        assert rebuilt[0] == 0, rebuilt
        missing = {part["sink"]: part["missing"] for part in json.loads(verified[1])["views"]}
        assert (verified[0], missing) == (8, {"search": 0, "cache": 1, "warehouse": 0})
        assert answer["partitions"] == "2"
        assert list(temporary.iterdir()) == []
    world.assert_equal()


def assert_python_is_sent(spark: Cluster) -> None:
    """Assert that executors look for modules in Spark's own folder and in what the driver has sent."""
    executors = [executor for node in spark.nodes for executor in node.executors()]
    assert len(executors) == 2
    for executor in executors:
        for daemon in daemons(executor):
            places = daemon.environ()["PYTHONPATH"].split(":")
            assert {path for path in places if not path.startswith(str(SPARK_HOME))} == {SHIPPED}
