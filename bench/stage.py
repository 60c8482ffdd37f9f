"""What a run needs: servers of its own, one pipeline with one table, Spark; and where its processes are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
from pyspark.sql import DataFrame, SparkSession

from bench.cost import Meter
from bench.workload import Bench
from cdc import settings, source
from cdc.change import Position
from cdc.context import Context
from cdc.log import records
from cdc.session import session
from cdc.sink import Sink
from cdc.stream import Stream
from cdc.topics import Topics
from cdc.verify import compare
from compose import artifacts, stack

FILE = """\
pipeline: bench
source:
  dsn: "{postgres}"
  tables: [{{table: public.bench, partitions: 4}}]
sinks:
  cache: {{type: redis, url: "{redis}", prefix: bench}}
  search: {{type: elasticsearch, url: "{elasticsearch}"}}
  warehouse: {{type: delta, path: "{warehouse}"}}
kafka: "{kafka}"
connect: "{connect}"
"""
QUIET_S = 2.0


class Stage:
    def __init__(self, folder: Path, rows: int) -> None:
        """Start everything and take the snapshot of a table of so many rows."""
        self.folder = folder
        self.endpoints = stack.up(folder / "stack", progress=lambda _: None)
        self.file = folder / "bench.yaml"
        self.file.write_text(FILE.format(**self.endpoints.to_dict()))
        self.dsn = self.endpoints.postgres
        self.bench = Bench(self.dsn, rows)
        self.verb("migrate")
        self.verb("register")
        self.context = Context(self.file, folder / "stack")
        self.pipeline = settings.load(self.file, os.environ)
        with source.connect(self.dsn) as connection:
            (self.table,) = source.describe(connection, self.pipeline)
        self.spark: SparkSession = session(f"local[{3 * (os.cpu_count() or 2)}]", artifacts.spark_jars())
        self.drained()

    def close(self) -> None:
        self.spark.stop()
        stack.down(self.folder / "stack", progress=lambda _: None)

    def verb(self, *words: str) -> None:
        """Run a verb of the command line."""
        command = [sys.executable, "-m", "cdc.cli", "-p", str(self.file), "--state", str(self.folder / "stack"), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def meter(self) -> Meter:
        return Meter({name: one["pid"] for name, one in stack.status(self.folder / "stack").items() if one["pid"]})

    def ends(self) -> Position:
        with Topics(self.pipeline.kafka) as kafka:
            return kafka.ends([self.table.topic])[self.table.topic]

    def drained(self) -> list[tuple[float, int]]:
        """Wait until nothing comes any more; when the topic's end was where."""
        seen = [(time.monotonic(), 0)]
        with Topics(self.pipeline.kafka) as kafka:
            while True:
                end = sum(kafka.ends([self.table.topic])[self.table.topic].offsets)
                now = time.monotonic()
                if end != seen[-1][1]:
                    seen.append((now, end))
                elif end and now - seen[-1][0] > QUIET_S:
                    return seen
                # Looking costs the connector's cores.
                time.sleep(0.1)

    def records(self) -> int:
        """How many records the topic holds: markers between them have offsets as well."""
        return self.log().count()

    def rows(self) -> int:
        """How many rows the table has."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute("SELECT count(*) FROM public.bench").fetchone()
        assert found
        return int(found[0])

    def log(self) -> DataFrame:
        """The topic as Spark reads it."""
        return records(self.spark, self.pipeline.kafka, {self.table.topic: self.ends()})

    def apply(self, sink: Sink) -> None:
        """What `cdc run --until-caught-up` does for one sink, in a Spark that is warm."""
        Stream(self.spark, sink, self.pipeline, self.context.follower, self.context.placeholder).run(
            until_caught_up=True
        )

    def equal(self, sink: Sink) -> bool:
        return all(one.equal for one in compare(self.spark, self.table, self.dsn, [sink]))
