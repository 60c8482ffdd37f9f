"""The running pipeline with its writer and readers, and the checks at a quiet point."""

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg

from cdc.kafka.clients import connection_settings, kafka
from cdc.kafka.topics import Topics
from chaos import checks
from chaos.checks import Alert, Seen
from chaos.links import Link
from chaos.stack import Run, Stack, cdc
from chaos.views import UNREADABLE, Cache, Index, View, Warehouse, Watch, source_rows, wait_until
from chaos.writer import ACCOUNTS, BALANCE, SCHEMA, WATCHED, Writer

PIPELINE = "chaos"
SINKS = ("search", "cache", "warehouse")
TABLES = ("accounts", "items", "ledger", "batches")
ALERTS = "view.overdrawn"
ALERTED = ("search", "cache")
OVERDRAWN = "SELECT id, balance, ver FROM accounts WHERE balance < 0"
FILE = """\
pipeline: chaos
source:
  dsn: postgresql://postgres@127.0.0.1:{postgres}/postgres
  tables: [public.accounts, public.items, public.ledger, public.batches]
sinks:
  search: {{type: elasticsearch, url: "http://127.0.0.1:{elasticsearch}"}}
  cache: {{type: redis, url: "redis://127.0.0.1:{redis}/0", prefix: chaos}}
  warehouse: {{type: delta, path: "{warehouse}"}}
kafka: 127.0.0.1:{kafka}
connect: http://127.0.0.1:{connect}
state: {{type: redis, url: "redis://127.0.0.1:{redis}/8", prefix: chaos}}
views:
  item_docs:
    root: public.items
    columns: [ver, note]
    include:
      owner: {{table: public.accounts, on: {{account: id}}, columns: [balance, ver]}}
    to: [search, cache, warehouse]
  overdrawn:
    root: public.accounts
    where: balance < 0
    alerts: true
    columns: [balance, ver]
    to: [search, cache, topic]
"""
CURRENT_S = 300.0
"""The longest time until all views hold what was committed once all is well again."""
VERB_S = 600.0


class Violated(Exception):
    """Something doesn't hold; `violations` say what, the first first."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(violations[0])
        self.violations = violations


class History:
    """Events as JSON lines: `what` happened, and when, in seconds since the begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 2)

    def note(self, what: str, **facts: Any) -> None:
        line = json.dumps({"at_s": self.seconds, "what": what, **facts})
        with self._lock, self.path.open("a") as file:
            print(line, file=file)


class Scene:
    """All that faults reach for. `close` ends everything but the servers."""

    def __init__(
        self, folder: Path, seed: int, links: Mapping[str, Link], history: History
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.links = links
        self.history = history
        self.chance = random.Random(f"{seed} scene")
        self.seen: list[Seen] = []
        self.snapshot = False
        """Whether a new snapshot fills the views again, so that rows may be missing until the next quiet point."""
        self.watches: dict[str, Watch] = {}
        self._ending = ExitStack()
        self.warehouse_folder = folder / "warehouse"
        self.stack = Stack(folder, links)
        ports = self.stack.ports
        self.kafka = f"127.0.0.1:{ports['kafka']}"
        self.file = folder / "chaos.yaml"
        self.index = Index(ports["elasticsearch"], PIPELINE)
        self.cache = Cache(ports["redis"], PIPELINE)
        self.views: dict[str, View] = {
            "search": self.index,
            "cache": self.cache,
            "warehouse": Warehouse(str(self.warehouse_folder)),
        }

    def start(self) -> None:
        """Start servers, pipeline, writer and readers; return once all views are current."""
        for name in self.stack.servers:
            self.stack.start(name)
        self.file.write_text(
            FILE.format(
                postgres=self.links["postgres"].port,
                elasticsearch=self.links["elasticsearch"].port,
                redis=self.links["redis"].port,
                kafka=self.links["kafka-run"].port,
                connect=self.stack.ports["connect"],
                warehouse=self.warehouse_folder,
            )
        )
        with psycopg.connect(self.stack.dsn) as connection:
            connection.execute(SCHEMA.encode())
        self.cdc("migrate")
        self.cdc("register")
        self.run = Run(
            self.command("run"),
            self.folder / "run.log",
            lambda code: self.history.note("cdc run ended", code=code),
        )
        self._ending.callback(lambda: self.history.note("cdc run closed", code=self.run.close()))
        self.writer = Writer(self.stack.dsn, self.seed, self.history.path.with_suffix(".writes"))
        self._ending.callback(self.writer.close)
        self.recover()
        watched = range(1, WATCHED + 1)
        tables = {"items": watched, "accounts": watched}
        for sink, view in self.views.items():
            self.watches[sink] = Watch(sink, view, tables, self._note)
            self._ending.callback(self.watches[sink].close)

    def close(self) -> None:
        """End readers, writer and `cdc run`."""
        self._ending.close()

    def _note(self, sink: str, table: str, key: int, ver: int | None) -> None:
        if ver is not None or not self.snapshot:
            self.seen.append(Seen(sink, table, key, ver))

    def command(self, *words: str) -> list[str]:
        return cdc(self.file, *words)

    def cdc(self, *words: str) -> str:
        """Run a verb, which must succeed; return what it has printed."""
        ended = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=VERB_S
        )
        self.history.note("cdc", words=words, code=ended.returncode)
        if ended.returncode:
            told = f"{ended.stdout}\n{ended.stderr}".strip()[-2000:]
            raise Violated([f"cdc {' '.join(words)} ends with {ended.returncode}: {told}"])
        return ended.stdout

    def recover(self) -> dict[str, float]:
        """Wait until each view has a transaction that was committed after this call: seconds by sink."""
        began = time.monotonic()
        number = self.writer.number + 1
        took_s: dict[str, float] = {}

        def arrived() -> bool:
            self.check_alive()
            for sink, view in self.views.items():
                if sink not in took_s and view.has("ledger", number):
                    took_s[sink] = round(time.monotonic() - began, 1)
            return len(took_s) == len(self.views)

        if not wait_until(arrived, CURRENT_S):
            self.check_alive()
            missing = ", ".join(set(self.views) - set(took_s))
            raise Violated([f"{missing}: transaction {number} isn't there after {CURRENT_S:g} s"])
        return took_s

    def check_alive(self) -> None:
        if self.run.final is not None:
            raise Violated([f"cdc run ended for good, with {self.run.final}"])
        if self.writer.error is not None:
            raise Violated([f"the writer failed: {self.writer.error!r}"])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Stop the writer until the block ends."""
        self.writer.pause()
        try:
            yield
        finally:
            self.writer.resume()

    def check(self) -> None:
        """Check everything at a quiet point. Raises Violated."""
        with self.quiet():
            began = time.monotonic()
            self.check_alive()
            wait_until(lambda: not self._differences(), CURRENT_S, 1)
            violations = self._differences()
            if not violations:
                violations = self._violations()
            self.history.note(
                "quiet", violations=violations, writes=self.writer.acknowledged,
                took_s=round(time.monotonic() - began, 1),
            )  # fmt: skip
            if violations:
                raise Violated(violations)
            self.snapshot = False
            self.cdc("verify")

    def _differences(self) -> list[str]:
        """Compare each view with Postgres, and Postgres with what it has acknowledged."""
        source = {table: source_rows(self.stack.dsn, f"SELECT * FROM {table}") for table in TABLES}
        overdrawn = source_rows(self.stack.dsn, OVERDRAWN)
        wrong = checks.lost_writes(source, self.writer.rows)
        for sink, view in self.views.items():
            try:
                found = {table: view.rows(table) for table in TABLES}
                alerts = view.rows(ALERTS) if sink in ALERTED else overdrawn
            except UNREADABLE as error:
                wrong.append(f"{sink} can't be read: {error}")
                continue
            for table, rows in found.items():
                wrong += checks.differences(f"{sink}'s {table}", rows, source[table])
            wrong += checks.differences(f"{sink}'s {ALERTS}", alerts, overdrawn)
            wrong += checks.wrong_sum(f"{sink}'s accounts", found["accounts"], ACCOUNTS * BALANCE)
        return wrong

    def _violations(self) -> list[str]:
        status = json.loads(self._status())
        behind = {
            f"{sink['name']}'s {view['table']}": view["lag_records"]
            for sink in status["sinks"]
            for view in sink["views"]
        }
        quarantined = json.loads(self.cdc("quarantine", "list", "--json"))["quarantine"]
        log = (self.folder / "run.log").read_text(errors="replace")
        return [
            *checks.went_back(list(self.seen)),
            *checks.wrong_alerts(self._alerts(), self.index.rows(ALERTS)),
            *checks.unaccounted(log, quarantined, behind),
        ]

    def _status(self) -> str:
        """What `cdc status` finds isn't of interest here, but that it knows of every view."""
        words = self.command("status", "--json")
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=VERB_S
        ).stdout

    def _alerts(self) -> list[Alert]:
        """Read the alerts' topic from its first record on, as an application does."""
        consumer = kafka.KafkaConsumer(
            **connection_settings(self.kafka),
            isolation_level="read_committed",
            group_id=None,
            enable_auto_commit=False,
        )
        topic = f"{PIPELINE}.{ALERTS}"
        with Topics(self.kafka) as topics:
            end = topics.ends([topic])[topic]
        places = [kafka.TopicPartition(topic, number) for number in range(end.partition_count)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        alerts: list[Alert] = []
        while any(consumer.position(place) < end.offsets[place.partition] for place in places):
            for records in consumer.poll(timeout_ms=200).values():
                for record in records:
                    alerts.append(_alert(record.key, record.value))
        consumer.close()
        return alerts

    def write_seen(self) -> Path:
        """Write what readers have seen beside the history."""
        path = self.history.path.with_suffix(".seen")
        path.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in self.seen))
        return path


def _alert(key: bytes, value: bytes | None) -> Alert:
    (name,) = json.loads(key).values()
    if value is None:
        return Alert(str(name), "")
    document = json.loads(value)
    return Alert(str(name), document["op"], json.dumps(document["after"], sort_keys=True))
