"""Every command that README and the documentation show is run, against real servers and in an order
in which each can do its work.

Those of `start/own-tables.md` are run by test_first_hour, with what the page says they print.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from pyspark.sql import SparkSession

from cdc.cli import verbs
from cdc.compose.wheels import postgres_bin
from cdc.removal.destroy import Removal
from tests.support import pages
from tests.support.bad_records import produce
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

FIRST_HOUR = "own-tables.md"
ELSEWHERE = {
    "up --stack compose": "needs a Docker engine: tests/containers",
    "run": "starts its own Spark: test_outages, test_rebuild; here it runs in this process",
    "run --master spark://spark:7077": "names a cluster: see test_cluster.py",
    "up": "starts servers of its own: the fixture of all tests does, and test_first_hour",
    "down": "stops them: the same",
    "up --secured": "starts servers of its own: test_secured",
    "-p sample/secured.yaml up --secured": "the same",
    "-p sample/secured.yaml migrate --sample": "needs those servers: test_secured",
    "-p sample/secured.yaml register": "the same",
    "serve --address 10.0.0.7 --token-file token": "names an address of another machine",
    "serve --address 0.0.0.0 --name cdc.example.com --token-file token": "listens to others",
    "run --metrics 9104 --metrics-address 10.0.0.7": "names an address of another machine",
    "status --watch": "goes on until Ctrl-C: test_screens",
    "register --new-snapshot": "asks for the pipeline's name: test_consent, test_register",
    "destroy": "asks for the pipeline's name: test_destroy",
    "views plan": "needs a file with views: test_documents",
    "chaos --minutes 0 --seed 7 --only postgres --only workers --only session": (
        "needs a file that says staging, and writes: test_chaos_verb"
    ),
}
"""Commands that can't be run here, and where they are."""
AT_WORK = ("topics audit", "register", "pause", "resume", "operations")
"""Beginnings of commands that work while `cdc run` is at work, in any order."""
FINDINGS = ("status", "doctor")
"""Verbs whose exit code is what they found."""
SHELL = "curl", "psql", "java", "df", "ls", "ps", "redis-cli"
"""Programs of runbooks that these tests can run, or can say the same as."""


def documented() -> list[str]:
    """The distinct `cdc` commands of all pages, without the file's name."""
    texts = [page.read_text() for page in pages.PAGES if page.name != FIRST_HOUR]
    lines = {" ".join(words) for text in texts for words in pages.commands(text)}
    return sorted(line.removeprefix("-p shop.yaml ") for line in lines)


def shell_lines() -> list[str]:
    """The distinct lines of shell blocks that call another program than `cdc`."""
    blocks = [
        body
        for page in pages.PAGES
        for kind, body in pages.blocks(page.read_text())
        if kind == "sh"
    ]
    lines = {line for body in blocks for line in body.splitlines()}
    return sorted(line for line in lines if line.split(" ")[0] in SHELL)


class Reader:
    """Somebody who types what the pages show, in a folder that has `shop.yaml`."""

    def __init__(self, world: "World", monkeypatch: pytest.MonkeyPatch) -> None:
        self._world, self._monkeypatch = world, monkeypatch
        self.words = {"T": "public.orders", "S": "cache", "$SHOP_POSTGRES": world.dsn}
        lines = [line for line in documented() if line not in ELSEWHERE]
        # Two pages may name one table differently: that is one command.
        self.remaining = [*{" ".join(self._words(line)): line for line in lines}.values()]

    def type(self, line: str, folder: Path | None = None) -> None:
        """Run a command in this process, whose Spark is warm.

        Raises:
            AssertionError: it ended with another code than 0.
        """
        self.remaining.remove(line)
        self._monkeypatch.chdir(folder or self._world.folder)
        words = ["-p", "shop.yaml", *self._words(line)]
        self._monkeypatch.setattr(sys, "argv", ["cdc", *words])
        with pytest.raises(SystemExit) as ended:
            verbs.main()
        expected = range(3, 9) if line in FINDINGS else ()
        assert ended.value.code == 0 or ended.value.code in expected, line

    def type_until(self, line: str, ready: Callable[[], object]) -> None:
        """Run a command in this process that SIGTERM ends once something is so."""
        self.remaining.remove(line)
        self._world.run_until(lambda _: ready(), *self._words(line)[1:])

    def type_all(self, verb: str) -> None:
        """Run all remaining commands of a verb."""
        lines = [line for line in self.remaining if line.split(" ")[0] == verb]
        assert lines
        for line in lines:
            self.type(line)

    @contextmanager
    def background(self, *lines: str) -> Iterator[None]:
        """Run `serve` commands as processes until the block ends; they have to end cleanly."""
        command = [sys.executable, "-m", "cdc.entry", "-p", "shop.yaml"]
        processes = []
        for line in lines:
            self.remaining.remove(line)
            words = [*command, *self._words(line)]
            processes.append(subprocess.Popen(words, cwd=self._world.folder))
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            codes = [process.wait(300) for process in processes]
        assert set(codes) == {0}, lines

    def _words(self, line: str) -> list[str]:
        return [self.words.get(word, word) for word in line.split(" ")]


@pytest.fixture
def reader(world: "World", monkeypatch: pytest.MonkeyPatch) -> Reader:
    world.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, state text)",
        "INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 500) n",
    )
    world.write_file("{table: public.orders, partitions: 1}")
    (world.folder / "shop.yaml").write_text(world.file.read_text())
    monkeypatch.setenv("CDC_STATE", str(world.folder))
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    # A slot that a worker makes again while `destroy` watches it: test_destroy.
    monkeypatch.setattr(Removal, "run", partialmethod(Removal.run, watch_s=0.0))
    return Reader(world, monkeypatch)


def test_every_documented_command_works(world: "World", reader: Reader, tmp_path: Path) -> None:
    for number, line in enumerate(documented()):
        if line.split(" ")[0] == "init":
            folder = tmp_path / f"init{number}"
            folder.mkdir()
            reader.type(line, folder)
    for line in ("plan", "migrate --dry-run", "migrate", "register", "topics"):
        reader.type(line)

    for line, sink in (
        ("run --sink cache", "cache"),
        ("run --sink search", "search"),
        ("run --master local[8]", "warehouse"),
    ):
        reader.type_until(line, lambda sink=sink: world.offsets(sink) >= 500)  # type: ignore[misc]

    produce(
        world.stack.endpoints.kafka, f"{world.name}.public.orders", [(b'{"id":1}', b"not json")]
    )
    with world.running():
        world.settle()
        (place, *_) = (entry["place"] for entry in world.quarantine())
        reader.words["PLACE"] = place
        reader.type_all("status")
        reader.type_all("doctor")
        for line in ("list", "show PLACE", "redrive PLACE", "redrive", "discard PLACE"):
            reader.type(f"quarantine {line}")
        world.sql("UPDATE orders SET state = 'sent' WHERE id = 1")
        world.settle()
        reader.type_all("verify")
        reader.type("rebuild cache --table public.orders")
        reader.type("rebuild search --table T")
        reader.type("rollback search")
        reader.type_all("generations")
        for line in [line for line in reader.remaining if line.startswith(AT_WORK)]:
            reader.type(line)
        with reader.background("serve", "serve --port 9000"):
            for port in (8350, 9000):
                await_answer(f"http://127.0.0.1:{port}/livez")
    # A recreated topic ends the streams that read it.
    reader.type_all("topics")
    reader.type_all("destroy")
    assert reader.remaining == []


def await_answer(address: str) -> None:
    def answers() -> bool:
        command = ["curl", "-sf", address]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    wait_until(answers, 60, f"{address} to answer")


def test_every_line_for_the_shell_works(world: "World") -> None:
    """Programs of a shell run as they are; what a page types to `redis-cli` is said to the cache by
    its client, since the program isn't on every machine.
    """
    environment = {
        **os.environ,
        "PATH": f"{postgres_bin()}:{os.environ['PATH']}",
        "CDC_POSTGRES": world.dsn,
    }
    failures = []
    with redis.Redis.from_url(world.cache) as cache:
        for line in shell_lines():
            program, *words = shlex.split(line)
            if program == "redis-cli":
                cache.execute_command(*words)
                continue
            text = line.replace("/path/of/the/warehouse", str(world.folder))
            # With -f curl tells a server's refusal by its exit code.
            shell = ["bash", "-euo", "pipefail", "-c", text.replace("curl -s ", "curl -sf ")]
            process = subprocess.run(
                shell, check=False, capture_output=True, text=True, env=environment
            )
            if process.returncode:
                failures.append(f"{line}: {process.returncode} {process.stderr}")
    assert failures == []
