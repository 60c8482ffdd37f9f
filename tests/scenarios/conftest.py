"""A pipeline of a test's own on the shared servers, driven through the command line as a user would."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis

from cdc.apply.progress import Progress
from cdc.apply.supervisor import supervise
from cdc.cli.rebuild import build
from cdc.config import settings
from cdc.connectors.client import Connect
from cdc.control.definitions import compare_periodically
from cdc.errors import CdcError, SinkUnavailable
from cdc.generations.registry import GenerationBuild, Registry, RetainedView
from cdc.generations.rollback import rollback
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.observe.run_log import RunLog, read_runs
from cdc.postgres import source, table_survey
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.sink import factory
from cdc.sink.contract import GroupScanner, Sink
from cdc.verify import barrier
from cdc.verify.census import take_census
from cdc.verify.comparison import Comparison, Options, View
from cdc.verify.source_rows import SourceReader
from cdc.verify.verification import compare, verify
from tests.support.verbs import run_verb, run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

KEPT_S = 3600.0
SINKS = ("search", "cache", "warehouse")
FILE = """\
pipeline: {name}
source:
  dsn: {dsn}
  heartbeat_s: 0.3
  tables: [{tables}]
sinks:
  search: {{type: elasticsearch, url: "${{CDC_ELASTICSEARCH}}"}}
  cache: {{type: redis, url: "{cache}", prefix: {name}}}
  warehouse: {{type: delta, path: {warehouse}, trigger_s: 1}}
"""


@dataclass
class World:
    """A pipeline: its database, its file, its verbs."""

    stack: "Stack"
    name: str
    dsn: str
    folder: Path
    spark: "SparkSession"
    tables: list[str] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.yaml"

    @property
    def warehouse(self) -> Path:
        return self.folder / "warehouse"

    @property
    def cache(self) -> str:
        """A database of the pipeline's own; the next one is its spare."""
        return self.stack.endpoints.redis.rsplit("/", 1)[0] + "/2"

    @property
    def pipeline(self) -> settings.Pipeline:
        return Context(self.file, self.folder).pipeline

    @property
    def described(self) -> tuple[Table, ...]:
        with source.connect(self.dsn) as connection:
            return table_survey.describe(connection, self.pipeline)

    @property
    def sinks(self) -> list[Sink]:
        return [factory.build(self.pipeline, name) for name in self.pipeline.sinks]

    def write_file(self, *tables: str, sinks: Sequence[str] = SINKS) -> None:
        listed = ", ".join(tables)
        text = FILE.format(
            name=self.name, dsn=self.dsn, tables=listed, cache=self.cache, warehouse=self.warehouse
        )
        for name in set(SINKS) - set(sinks):
            text = re.sub(rf"  {name}: .*\n", "", text)
        self.file.write_text(text)

    def begin(self, *tables: str, sinks: Sequence[str] = SINKS) -> None:
        """Write the file, prepare the database, and register the connector."""
        self.write_file(*tables, sinks=sinks)
        self.cdc("migrate")
        self.cdc("register")

    def words(self, *words: str) -> list[str]:
        """A verb with the options that all share."""
        return ["-p", str(self.file), "--state", str(self.folder), *words]

    def command(self, *words: str) -> list[str]:
        """A verb as a process of its own."""
        return [sys.executable, "-m", "cdc.entry", *self.words(*words)]

    def cdc(self, *words: str, code: int | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a verb; its exit code must be the one expected, 0 but for `status`, whose code is
        what it has found.

        The file and the state in commands that it names are written as the code has them. A status
        is asked for again where a server was too busy to answer.
        """

        def answer() -> "subprocess.CompletedProcess[str] | None":
            process = run_verb(self.words(*words))
            return (
                None
                if words[0] == "status" and "gives no answer within" in process.stdout
                else process
            )

        process = wait_until(answer, 120, "all servers to answer", 0.5)
        assert process
        expected = 0 if code is None and words[0] != "status" else code
        assert expected in (None, process.returncode), (
            f"{words}: exit {process.returncode}\n{process.stdout}\n{process.stderr}"
        )
        called = f"cdc -p {self.file} --state {self.folder} "
        process.stdout, process.stderr = (
            text.replace(called, "cdc -p FILE ") for text in (process.stdout, process.stderr)
        )
        return process

    def json(self, *words: str, code: int | None = None) -> Any:
        return json.loads(self.cdc(*words, "--json", code=code).stdout)

    def quarantine(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.json("quarantine", "list")["quarantine"]
        return entries

    def sql(self, *statements: str) -> None:
        """Run statements as one transaction."""
        with psycopg.connect(self.dsn) as connection:
            for statement in statements:
                connection.execute(statement)

    def rebuild(
        self,
        name: str,
        table: str | None = None,
        show: Callable[[GenerationBuild], object] = lambda _: None,
    ) -> dict[str, RetainedView]:
        """`cdc rebuild`, in this process; what readers saw before is kept for an hour."""
        context = Context(self.file, self.folder)
        (sink,) = context.sinks([name])
        return build(context, self.spark, sink, context.tables_in(name, table), KEPT_S, show)

    def rollback(self, name: str) -> float:
        """`cdc rollback`, in this process; the seconds that it took."""
        context = Context(self.file, self.folder)
        (sink,), tables = context.sinks([name]), context.tables_in(name)
        with Topics(context.pipeline.kafka) as kafka:
            began = time.monotonic()
            rollback(Registry(context.pipeline, kafka), sink, tables, KEPT_S)
            return time.monotonic() - began

    @contextmanager
    def running(self, *names: str, proves: bool = False) -> Iterator[None]:
        """Run the streams of all sinks, or of these, in this process, whose Spark is warm; they
        must be at work until the end. `proves`: with the continuous proof.
        """
        context, stopping = Context(self.file, self.folder), threading.Event()

        def work() -> list[CdcError]:
            wiring = Streams(context)
            streams = wiring.of_sinks(self.spark, context.sinks(list(names) or None))
            if context.pipeline.views and not names:
                streams.append(wiring.of_documents(self.spark))
            of_sinks = list(names) or list(context.pipeline.sinks)
            with (
                compare_periodically(context.load),
                closing(RunLog(context.pipeline)) as run_log,
                wiring.proving(self.spark, of_sinks) if proves else nullcontext(),
            ):
                return supervise(streams, stopping, on_tick=run_log.publish)

        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(work)
            try:
                yield
            finally:
                is_over = errors.done()
                stopping.set()
                assert errors.result(300) == []
            assert not is_over

    def progress(self) -> Mapping[str, Progress]:
        """What runs do, by sink."""
        with Topics(self.pipeline.kafka) as kafka:
            return read_runs(self.pipeline, kafka).progress

    def run_until(self, ready: Callable[[str], object], *words: str) -> None:
        """`cdc run` in this process, which SIGTERM ends once it is `ready`, as told by what it has
        printed; its end must be clean.
        """
        printed = io.StringIO()

        def end() -> None:
            try:
                wait_until(lambda: ready(printed.getvalue()), 120, printed.getvalue, 0.2)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        former = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            with ThreadPoolExecutor(1) as pool:
                ending = pool.submit(end)
                ended = run_with_spark(self.words("run", *words), printed)
                ending.result()
        finally:
            signal.signal(signal.SIGTERM, former)
        assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr[-3000:]

    @contextmanager
    def process(self, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        """`cdc run` in the background; ended by SIGTERM, which must be clean, unless the test has ended it."""
        log = self.folder / "run.log"
        with log.open("ab") as out:
            offset = out.tell()
            process = subprocess.Popen(self.command("run", *words), stdout=out, stderr=out)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(300)
                log_text = log.read_bytes()[offset:].decode()
                assert process.returncode == 0, log_text[-3000:]
                assert "Traceback" not in log_text, log_text[-3000:]

    def settle(self, timeout_s: float = 300, sinks: Sequence[str] = ()) -> None:
        """Wait until all sinks, or these, hold what is committed now."""
        chosen = [sink for sink in self.sinks if not sinks or sink.name in sinks]
        options = barrier.WaitOptions(timeout_s)
        barrier.wait_until_current(self.pipeline, self.described, chosen, options)

    def census(self) -> dict[View, int]:
        """The views that are proved equal while nothing writes, in one job for all of them, with their rows."""
        sinks = {sink.name: sink for sink in self.sinks if isinstance(sink, GroupScanner)}
        return take_census(SourceReader(self.spark), self.dsn, self.described, sinks, None)

    def compare(self) -> list[Comparison]:
        """Compare all tables while nothing writes: all together, then by itself what isn't proved equal so."""
        tables, sinks, rows = self.described, self.sinks, self.census()
        comparisons, different = list[Comparison](), list[Table]()
        for table in tables:
            counts = {sink.name: rows.get((sink.name, table.qualified)) for sink in sinks}
            if None in counts.values():
                different.append(table)
            else:
                comparisons += [
                    Comparison(name, table.qualified, count or 0, count or 0)
                    for name, count in counts.items()
                ]
        if different:
            comparisons += compare(self.spark, different, self.dsn, sinks)
        assert len(comparisons) == len(tables) * 3
        return comparisons

    def assert_equal(self) -> None:
        assert [comparison.to_dict() for comparison in self.compare() if not comparison.equal] == []

    def verified(self, tables: Sequence[Table] | None = None) -> list[Comparison]:
        """`cdc verify` of all views, or of these, in this process, whose Spark is warm: they must be equal."""
        context = Context(self.file, self.folder)
        chosen = context.select_views(None) if tables is None else tables
        options = Options(timeout_s=180)
        results = verify(self.spark, context.pipeline, chosen, context.sinks(None), options)
        assert [result.to_dict() for result in results if not result.equal] == []
        return results

    def offsets(self, sink: str) -> int:
        """Return the sum of a sink's offsets over all tables; 0 while it can't be asked."""
        built = factory.build(self.pipeline, sink)
        try:
            stored = [built.position(table) for table in self.described]
        except SinkUnavailable:
            return 0
        return sum(sum(checkpoint.position.offsets) for checkpoint in stored if checkpoint)

    def is_current(self) -> bool:
        """Whether `status` knows of every view that it isn't behind."""
        sinks = self.json("status")["sinks"]
        return all(view["lag_records"] == 0 for sink in sinks for view in sink["views"])

    def wait_for(self, sink: str, offset: int, timeout_s: float = 120) -> None:
        wait_until(
            lambda: self.offsets(sink) >= offset, timeout_s, f"{sink} to reach offset {offset}"
        )


@pytest.fixture
def world(
    stack: "Stack",
    postgres_dsn: str,
    unique: str,
    tmp_path: Path,
    spark: "SparkSession",
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    for name, value in stack.endpoints.environment().items():
        monkeypatch.setenv(name, value)
    world = World(stack, unique, postgres_dsn, tmp_path, spark)
    for address in (world.cache, world.cache[:-1] + "3"):
        with redis.Redis.from_url(address) as server:
            server.flushdb()
    yield world
    with Connect(stack.endpoints.connect) as connect:
        connect.delete(unique)
