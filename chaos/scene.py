"""The running pipeline with its writer and readers, and the checks at a quiet point."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psycopg

from chaos import checks
from chaos.checks import Alert, Seen
from chaos.links import Link
from chaos.stack import Run, Stack
from chaos.views import UNREADABLE, Cache, Index, View, Warehouse, Watch, source_rows, wait_until
from chaos.writer import ACCOUNTS, BALANCE, SCHEMA, Writer
from tests.support.shop import read

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
kafka: 127.0.0.1:{kafka_run}
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
    """Something doesn't hold; `violations` say what, in the order of time."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(violations[0])
        self.violations = violations


class History:
    """Events as JSON lines: `what` happened, and when, in seconds since the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 2)

    def note(self, what: str, **facts: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"at_s": self.seconds, "what": what, **facts}) + "\n")


class Scene:
    """What faults act on. `close` ends everything but the servers."""

    def __init__(
        self, folder: Path, seed: int, links: Mapping[str, Link], history: History
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.links = links
        self.history = history
        self.seen: list[Seen] = []
        self.watches: dict[str, Watch] = {}
        self._ending = ExitStack()
        self.warehouse_folder = folder / "warehouse"
        self.stack = Stack(folder / "servers", links)
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
        self.stack.start()
        ports = {name.replace("-", "_"): link.port for name, link in self.links.items()}
        connect = self.stack.ports["connect"]
        self.file.write_text(FILE.format(**ports, connect=connect, warehouse=self.warehouse_folder))
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
        self.writer = Writer(self.stack.dsn, self.seed, self.history.note)
        self._ending.callback(self.writer.close)
        self.recover()
        for sink, view in self.views.items():
            self.watches[sink] = Watch(sink, view, self._note)
            self._ending.callback(self.watches[sink].close)

    def _note(self, seen: Seen) -> None:
        self.history.note("seen", **asdict(seen))
        self.seen.append(seen)

    def close(self) -> None:
        """End readers, writer and `cdc run`."""
        self._ending.close()

    def command(self, *words: str) -> list[str]:
        options = ["-p", str(self.file), "--state", str(self.folder)]
        return [sys.executable, "-m", "cdc.entry", *options, *words]

    def ask(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a verb to its end."""
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=VERB_S
        )

    def cdc(self, *words: str) -> str:
        """Run a verb, which must succeed; return what it has printed."""
        began = time.monotonic()
        answer = self.ask(*words)
        took_s = round(time.monotonic() - began, 1)
        self.history.note("cdc", words=words, code=answer.returncode, took_s=took_s)
        if answer.returncode:
            output = f"{answer.stdout}\n{answer.stderr}".strip()[-2000:]
            raise Violated([f"cdc {' '.join(words)} ends with {answer.returncode}: {output}"])
        return answer.stdout

    def recover(self) -> dict[str, float]:
        """Wait until each view has a transaction that was committed after this call: seconds by sink."""
        began = time.monotonic()
        number = self.writer.number + 1
        took_s: dict[str, float] = {}

        def arrived() -> bool:
            self.check_alive()
            for sink, view in self.views.items():
                if sink not in took_s and view.versions("ledger", [number])[number]:
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

    def check(self) -> None:
        """Check everything while the writer pauses. Raises Violated."""
        with self.writer.pause:
            began = time.monotonic()
            self.check_alive()
            wait_until(lambda: not self._differences(), CURRENT_S, 1)
            violations = self._differences() or self._violations()
            took_s = round(time.monotonic() - began, 1)
            writes = self.writer.acknowledged
            self.history.note("quiet", violations=violations, writes=writes, took_s=took_s)
            if violations:
                raise Violated(violations)
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
        # Only the waiting changes are read here, whatever `cdc status` finds.
        status = json.loads(self.ask("status", "--json").stdout)
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

    def _alerts(self) -> list[Alert]:
        """Read the alerts' topic from its first record on, as an application does."""
        changes = read(self.kafka, f"{PIPELINE}.{ALERTS}")
        return [
            Alert(str(*change.key.values()), change.op, json.dumps(change.after, sort_keys=True))
            for change in changes
        ]
