"""The stage of a run: its own servers, Spark, pipelines, and the ids of their processes."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
from pyspark.sql import DataFrame, SparkSession

from bench.batches import Watched
from bench.output.cost import Meter
from bench.workload import Data
from cdc.apply.stream import Environment, Stream
from cdc.apply.supervisor import supervise
from cdc.compose import artifacts, stack
from cdc.compose.stack_state import StackState
from cdc.config import settings
from cdc.config.view_settings import STATE
from cdc.connectors.client import Connect
from cdc.control.heartbeat import last_heartbeat
from cdc.errors import SinkError
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.sink.contract import Sink
from cdc.sink.factory import open_clocks
from cdc.spark.kafka_source import read_until
from cdc.spark.session import session
from cdc.verify.barrier import WaitOptions, wait_until_current
from cdc.verify.verification import compare

FILE = """\
pipeline: {pipeline}
source:
  dsn: "{postgres}"
  tables: [{tables}]
sinks:
  cache: {{type: redis, url: "{redis}", prefix: {pipeline}}}
  search: {{type: elasticsearch, url: "{elasticsearch}"}}
  warehouse: {{type: delta, path: "{warehouse}"}}
kafka: "{kafka}"
connect: "{connect}"
"""
STATE_LINE = 'state: {{type: redis, url: "{state}", prefix: {pipeline}}}\n'
QUIET_S = 0.5
SETTLE_S = 3600.0


class Servers:
    """The servers and the Spark session that all pipelines share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoints = stack.up(folder / "stack", progress=lambda _: None)
        master = f"local[{3 * (os.cpu_count() or 2)}]"
        # Many pipelines, one after the other: `cdc run`, with its own 1 GB, is a process that is
        # measured alone.
        settings = {"spark.driver.memory": "2g"}
        self.spark: SparkSession = session(master, artifacts.spark_jars(), settings)

    def close(self) -> None:
        self.spark.stop()
        stack.down(self.folder / "stack", progress=lambda _: None)

    def meter(self) -> Meter:
        record = StackState.load(self.folder / "stack")
        alive = filter(record.alive, record.processes)
        return Meter({name: record.processes[name].pid for name in alive})


class Stage:
    """A pipeline: its tables, its topics with their snapshot, three sinks that have applied nothing
    yet. `snapshot` is the cost of the registration.
    """

    def __init__(
        self,
        servers: Servers,
        name: str,
        tables: Sequence[str],
        make: Callable[[Data], object],
        views: str = "",
    ) -> None:
        """`make` makes the tables, schema.table, and their rows. `views`: that part of the file."""
        self.servers, self.name = servers, name
        self.folder, self.endpoints, self.spark = servers.folder, servers.endpoints, servers.spark
        self.dsn, self.meter = self.endpoints.postgres, servers.meter
        self.file = self.folder / f"{name}.yaml"
        text = FILE.format(pipeline=name, tables=", ".join(tables), **vars(self.endpoints))
        state = self.endpoints.environment()["CDC_DOCUMENTS"]
        self.file.write_text(
            text + STATE_LINE.format(state=state, pipeline=name) + views if views else text
        )
        self.data = Data(self.dsn, tables)
        make(self.data)
        self.verb("migrate")
        with self.meter() as meter:
            self.verb("register")
        self.snapshot = meter.cost
        self.context = Context(self.file, self.folder / "stack")
        self._wiring = Streams(self.context)
        self.pipeline = settings.load(self.file, os.environ)
        with source.connect(self.dsn) as connection:
            self.tables = table_survey.describe(connection, self.pipeline)
        self.table = self.tables[0]
        self._streams: list[Stream] = []
        self.drained()

    @contextmanager
    def extra_stage(
        self,
        name: str,
        tables: Sequence[str],
        make: Callable[[Data], object],
        views: str = "",
    ) -> Iterator["Stage"]:
        """Make another pipeline on the same servers, while this one's connector stands still."""
        with Connect(self.endpoints.connect) as connect:
            connect.stop(self.name)
            extra = Stage(self.servers, name, tables, make, views)
            yield extra
            for sink in extra.context.sinks(None):
                for table in extra.all_tables:
                    if table.is_in(sink.name):
                        sink.clear(table)
            connect.reset(name)
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
            connect.resume(self.name)

    def verb(self, *words: str) -> None:
        """Run a verb of the command line."""
        subprocess.run(self.command(*words), check=True, stdout=subprocess.DEVNULL)

    def command(self, *words: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "cdc.entry",
            "-p",
            str(self.file),
            "--state",
            str(self.folder / "stack"),
            *words,
        ]

    def ends(self) -> dict[str, Position]:
        """Return the topics' ends by topic."""
        with Topics(self.pipeline.kafka) as kafka:
            return kafka.ends([table.topic for table in self.tables])

    def log_ends(self) -> dict[str, Position]:
        """Return the same with the records that the connector hasn't committed yet."""
        with Topics(self.pipeline.kafka) as kafka:
            return kafka.log_ends([table.topic for table in self.tables])

    def end(self) -> Position:
        """Return the end of the first table's topic."""
        return self.ends()[self.table.topic]

    def drained(self) -> list[tuple[float, int]]:
        """Wait until all rows committed so far are in the topics; return the sums of the topics'
        ends by the monotonic time of each change, in order.
        """
        with psycopg.connect(self.dsn) as connection:
            (now_ms,) = connection.execute(
                "SELECT extract(epoch FROM now())::float8 * 1000"
            ).fetchone() or (0,)

        def beaten(kafka: Topics) -> bool:
            beat = last_heartbeat(kafka, self.pipeline)
            return beat is not None and beat.committed_ms > now_ms

        ends, topics = [(time.monotonic(), 0)], [table.topic for table in self.tables]
        with Topics(self.pipeline.kafka) as kafka:
            while True:
                end = sum(sum(position.offsets) for position in kafka.ends(topics).values())
                now = time.monotonic()
                if end != ends[-1][1]:
                    ends.append((now, end))
                # The connector sends in the order of commits, and its heartbeat after them.
                elif now - ends[-1][0] > QUIET_S and beaten(kafka):
                    return ends
                # Looking costs the connector's cores.
                time.sleep(0.1)

    def records(self) -> int:
        """Count the records of the topics, because markers between them have offsets as well."""
        return self.log().count()

    def log(self) -> DataFrame:
        """The topics as Spark reads them."""
        return read_until(self.spark, self.pipeline.kafka, self.ends())

    @property
    def all_tables(self) -> list[Table]:
        """What sinks have: the captured tables, and the views of several."""
        return [*self.tables, *self.context.views]

    def stream(self, sink: Sink) -> Watched:
        return Watched(
            Environment.on_spark(self.spark, self.pipeline.kafka, self._wiring.ends),
            sink,
            self.pipeline,
            self._wiring.describe(sink.name),
            self.context.placeholder,
            self.pipeline.sinks[sink.name].trigger_s,
        )

    def apply(self, sink: Sink) -> Watched:
        """Apply the log to one sink as `cdc run --until-caught-up` does, in a warm Spark."""
        stream = self.stream(sink)
        stream.run(until_caught_up=True)
        return stream

    @contextmanager
    def running(self, sinks: Sequence[str] = ()) -> Iterator[list[Watched]]:
        """Run streams of these sinks, of all three without a name, and yield them once they have
        caught up. `documents` is the state of the views, whose stream isn't yielded.
        """
        stopping, names = threading.Event(), list(sinks) or [*self.pipeline.sinks, STATE]
        chosen = [name for name in names if name != STATE]
        streams = [self.stream(sink) for sink in self.context.sinks(chosen)] if chosen else []
        self._streams = [*streams]
        if STATE in names and self.pipeline.views:
            self._streams.append(self._wiring.of_documents(self.spark))
        thread = threading.Thread(target=supervise, args=(self._streams, stopping))
        thread.start()
        try:
            self.settle(streams)
            yield streams
        finally:
            stopping.set()
            thread.join()

    def settle(self, streams: Sequence[Watched]) -> None:
        """Wait until the views hold all that is committed by now."""

        def still(_: str) -> None:
            for stream in self._streams:
                if stream.progress.state == "failed":
                    raise SinkError(
                        f"{stream.sink.name}: {stream.progress.error}",
                        hint=stream.progress.hint or "",
                    )

        sinks, names = [stream.sink for stream in streams], {s.sink.name for s in self._streams}
        tables = self.all_tables if STATE in names else self.tables
        wait_until_current(self.pipeline, tables, sinks, WaitOptions(SETTLE_S, report=still))

    def durable(self, streams: Sequence[Watched]) -> float:
        """The same; when the last batch was durable, Unix seconds."""
        self.settle(streams)
        ends = self.ends()
        return max(stream.batches(ends)[-1].durable for stream in streams)

    def equal(self, *sinks: Sink) -> bool:
        clocks = open_clocks(self.pipeline)().noted if self.pipeline.views else {}
        comparisons = compare(self.spark, self.all_tables, self.dsn, sinks, clocks)
        return all(comparison.equal for comparison in comparisons)
