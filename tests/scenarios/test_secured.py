"""The demo's file, with some of its views, on servers that all ask who it is, `cdc up --secured`, from the snapshot to
the removal; and a search for the secrets wherever somebody who may not have them could look.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest

from cdc.cli.destroy import prepare
from cdc.compose import secured, stack
from cdc.compose.stack_state import StackState
from cdc.kafka.topics import Topics
from cdc.model import secrets
from cdc.model.login import Address, Login
from cdc.runtime.context import Context
from cdc.verify import barrier
from tests.conftest import Stack
from tests.scenarios.conftest import World
from tests.support.server_control import ProcessControl
from tests.support.shop import read_records
from tests.support.verbs import run_verb
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE = Path(__file__).parents[2] / "sample/secured.yaml"
VIEWS = ("flight_docs", "disruptions", "overdue")
"""Of the demo's: one of several tables, one with windows, one with a clock."""
HOLDERS = ("secrets", "connect/conf/server.properties")
"""What may hold secrets in the stack's folder."""
UNREAD = ("postgres/data", "kafka/data", "elasticsearch/data")
"""Gigabytes whose content is searched as records and documents, and Postgres' tables."""
WRONG = "not-the-secret-4711"
VERBS = (
    "status",
    "status --json",
    "doctor",
    "plan",
    "operations",
    "generations",
    "views list",
    "quarantine list",
)
PAGES = ("/", "/api/status", "/api/quarantine", "/metrics")
SPARK_PAGES = ("/environment/", "/SQL/", "/jobs/", "/stages/", "/executors/")
WITH_SPARK = """
import json, sys
from unittest import mock
import httpx
from pyspark.sql import SparkSession
from cdc.spark import session
from tests.support.verbs import run_with_spark
verbs, pages = map(json.loads, sys.argv[1:])
with mock.patch.dict(session.SETTINGS, {"spark.ui.enabled": "true"}):
    ended = [run_with_spark(words) for words in verbs]
spark = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
url = spark.sparkContext.uiWebUrl
api = f"/api/v1/applications/{spark.sparkContext.applicationId}"
shown = [httpx.get(url + page, timeout=60, follow_redirects=True).raise_for_status().text
         for page in (*pages, f"{api}/environment", f"{api}/sql?length=1000&details=true")]
spark.stop()
print(json.dumps({"verbs": [[one.returncode, one.stdout + one.stderr] for one in ended], "pages": shown}))
"""


class Processes:
    """The command lines and environments of all processes, as `ps` shows them, from now on."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for folder in Path("/proc").glob("[0-9]*"):
                if folder.name == str(os.getpid()):
                    continue
                for name in ("cmdline", "environ"):
                    try:
                        self.seen.add((folder / name).read_bytes())
                    except OSError:
                        continue

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


class Secured:
    """A pipeline on the secured stack, with all that it shows."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = world.folder
        self.shown: dict[str, str] = {}
        """By what has shown it."""

    def secrets(self) -> set[str]:
        """Every password and key, and the form in which logins by HTTP have a password."""
        folder = self.state / "secrets"
        passwords = [(folder / name).read_text() for name in secured.PASSWORDS]
        passwords += [(folder / name).read_text() for name in secured.OWN_PASSWORDS]
        passwords += [WRONG]
        keys = [file.read_text().splitlines()[1] for file in folder.glob("*.key")]
        logins = [base64.b64encode(f"cdc:{text}".encode()).decode() for text in passwords]
        return {*passwords, *keys, *logins}

    def cdc(self, *words: str, code: int | None = 0) -> str:
        """Run a verb that starts no Spark; None for any exit code. Returns what it prints. One that has found
        a server too busy to answer is run again.
        """

        def answer() -> "subprocess.CompletedProcess[str] | None":
            ended = run_verb(self.world.words(*words))
            text = ended.stdout + ended.stderr
            self.note(f"cdc {' '.join(words)}", text)
            is_late = code == 0 != ended.returncode and "gives no answer within" in text
            return None if is_late else ended

        ended = wait_until(answer, 120, f"all servers to answer {words}", 0.5)
        assert ended
        text = ended.stdout + ended.stderr
        assert code in (None, ended.returncode), f"{words}: {text}"
        return text

    def load(self, *options: str) -> str:
        words = [sys.executable, "-m", "cdc.sample.load", *self.world.words(*options)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        self.note("cdc.sample.load", ended.stdout + ended.stderr)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def with_spark(self, *verbs: Sequence[str]) -> None:
        """Run verbs in one process of their own, with Spark's page and its log of events."""
        listed = json.dumps([self.world.words(*words) for words in verbs])
        ended = subprocess.run(
            [sys.executable, "-c", WITH_SPARK, listed, json.dumps(SPARK_PAGES)],
            capture_output=True,
            text=True,
            check=False,
        )
        self.note("Spark's output", ended.stderr)
        assert ended.returncode == 0, ended.stderr[-3000:]
        answer = json.loads(ended.stdout.splitlines()[-1])
        for words, (code, text) in zip(verbs, answer["verbs"], strict=True):
            assert code == 0, f"{words}: {text}"
            self.note(f"cdc {' '.join(words)}", text)
        for number, text in enumerate(answer["pages"]):
            self.note(f"Spark's page {number}", text)
        assert "spark.redaction.regex" in answer["pages"][0]

    def note(self, name: str, text: str) -> None:
        self.shown[name] = self.shown.get(name, "") + text

    def settle(self, *names: str) -> None:
        """Wait until these sinks, or all, hold what is committed now."""
        context = Context(self.world.file, self.state)
        options = barrier.WaitOptions(300)
        tables = context.select_views(None)
        sinks = context.sinks(list(names) or None)
        barrier.wait_until_current(context.load(), tables, sinks, options)

    def take_pages(self) -> None:
        log = self.state / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.world.command("serve", "--port", "0"), stdout=out, stderr=out
            )
        try:
            wait_until(lambda: "serving http" in log.read_text(), 60, log.read_text)
            url = re.findall(r"serving (http://[\d.:]+)", log.read_text())[0]
            with httpx.Client(base_url=url, timeout=60) as client:
                wait_until(lambda: client.get("/readyz").is_success, 60, "the first look")
                for page in PAGES:
                    self.note(f"our page {page}", client.get(page).raise_for_status().text)
        finally:
            process.terminate()
            process.wait(120)

    def topics(self) -> dict[str, bytes]:
        """The contents of all topics, as the broker's administrator reads them."""
        folder = self.state / "secrets"
        login = Login(
            protocol="SSL",
            ca=str(folder / "ca.pem"),
            certificate=str(folder / "server.crt"),
            key=str(folder / "server.key"),
        )
        port = StackState.load(self.state).ports["kafka-certified"]
        brokers = Address(f"localhost:{port}", login)
        with Topics(brokers) as topics:
            names = topics.names()
        return {
            name: b"\n".join(
                part or b""
                for record in read_records(brokers, name)
                for part in (record.key, record.value)
            )
            for name in names
        }

    def index(self) -> httpx.Client:
        """The index as the pipeline's user sees it."""
        endpoints = StackState.load(self.state).endpoints()
        password = (self.state / "secrets/elasticsearch").read_text()
        return httpx.Client(
            base_url=endpoints.elasticsearch, auth=("cdc", password), verify=False, timeout=60
        )


@pytest.fixture
def pipeline(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    state = Path(tempfile.mkdtemp(prefix="cdc-secured-"))
    # Root's servers run as another user.
    state.chmod(0o755)
    (state / "events").mkdir()
    (state / "spark-defaults.conf").write_text(
        f"spark.eventLog.enabled true\nspark.eventLog.dir file://{state}/events\nspark.eventLog.compress false\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(state))
    servers, _, views = FILE.read_text().partition("views:\n")
    kept = [view for view in re.split(r"(?m)^(?=  \w)", views) if view.strip().startswith(VIEWS)]
    file = state / "pipeline.yaml"
    file.write_text("".join([servers, "views:\n", *kept]))
    try:
        ended = run_verb(["-p", str(file), "--state", str(state), "up", "--secured"])
        assert ended.returncode == 0, ended.stderr
        endpoints = StackState.load(state).endpoints()
        running = Stack(endpoints, state, ProcessControl(state))
        dsn = secrets.read(endpoints.postgres)
        yield Secured(World(running, "airport", dsn, state, spark))
    finally:
        stack.down(state, progress=print)
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def processes() -> Iterator[Processes]:
    watched = Processes()
    yield watched
    watched.stop()


@contextmanager
def wrong_passwords(folder: Path) -> Iterator[None]:
    """Have the pipeline log in with passwords that no server accepts."""
    names = ("reader", "kafka", "elasticsearch", "redis")
    right = {name: (folder / name).read_text() for name in names}
    for name in names:
        (folder / name).write_text(WRONG)
    yield
    for name, text in right.items():
        (folder / name).write_text(text)


def refuse_to_start(pipeline: Secured) -> None:
    """With secrets that are gone, and with rights that can't be given."""
    secret = pipeline.state / "secrets/redis"
    aside = secret.rename(secret.with_name("aside"))
    text = pipeline.cdc("up", code=3)
    assert f"{secret.parent} lacks redis: the servers were made with these" in text
    aside.rename(secret)
    rights = pipeline.state / "elasticsearch/conf/roles.yml"
    written = rights.read_text()
    rights.write_text("cut")
    text = pipeline.cdc("up", code=3)
    assert f"{rights} isn't as `cdc up` has written it: " in text
    assert "hint: put it back from a copy" in text
    rights.write_text(written)
    pipeline.cdc("up")


@pytest.mark.own_source
def test_the_demo_on_secured_servers_shows_no_secret(
    processes: Processes, pipeline: Secured
) -> None:
    """The index' password is changed under the run: that is reported, holds up no other sink, and passes
    by itself.
    """
    world = pipeline.world
    state = pipeline.state
    folder = state / "secrets"
    known = pipeline.secrets()
    pipeline.cdc("up")
    refuse_to_start(pipeline)
    pipeline.cdc("migrate", "--sample")
    assert re.search(r"\b8\d\d flights", pipeline.load("--days", "1"))
    pipeline.cdc("register")
    with world.process():
        pipeline.settle()
        changed = secured.hash_for_elasticsearch("another-4711")
        (state / "elasticsearch/conf/users").write_text(f"cdc:{changed}\n")
        wait_until(
            lambda: "doesn't accept the login" in pipeline.cdc("status", code=None),
            60,
            "status to report it",
        )
        with psycopg.connect(world.dsn) as source:
            source.execute("UPDATE flights SET dep_delay = dep_delay + 60 WHERE origin = 'JFK'")
            source.execute("DELETE FROM flights WHERE carrier = 'UA'")
        pipeline.settle("cache", "warehouse")
        (folder / "elasticsearch").write_text("another-4711")
        pipeline.settle()
        pipeline.with_spark(
            ("rebuild", "search", "--table", "public.flights"), ("verify",), ("topics", "audit")
        )
        pipeline.cdc("rollback", "search")
        pipeline.settle()
        pipeline.take_pages()
        for verb in VERBS:
            # `doctor` judges this machine, too.
            pipeline.cdc(*verb.split(), code=None if verb == "doctor" else 0)
    with wrong_passwords(folder):
        for verb in ("status", "doctor", "plan"):
            pipeline.cdc(verb, code=None)
    known |= pipeline.secrets()
    assert find(known, read_all(pipeline, processes)) == []
    # The search finds what is there.
    event_log = next((state / "events").glob("*/events_*"))
    with event_log.open("a") as log:
        log.write((folder / "redis").read_text())
    assert find(known, read_files(state)) == [str(event_log)]
    prepare(Context(world.file, state)).run(lambda _: None, watch_s=0.0)
    with pipeline.index() as client:
        left = client.get("/_cat/indices?h=index").raise_for_status().text.split()
        assert left == ["cdc-position"]
        search = "/cdc-position/_search"
        wait_until(
            lambda: client.get(search).raise_for_status().json()["hits"]["hits"] == [],
            60,
            "the positions to be gone",
        )


def find(known: set[str], searched: Mapping[str, bytes]) -> list[str]:
    """Return the names of what has a secret in it."""
    return [
        name
        for name, content in searched.items()
        if any(secret.encode() in content for secret in known)
    ]


def read_all(pipeline: Secured, processes: Processes) -> dict[str, bytes]:
    """Everything that was shown, sent or stored, by its name."""
    searched = read_files(pipeline.state)
    assert any("eventlog" in name for name in searched), sorted(searched)
    searched |= {name: text.encode() for name, text in pipeline.shown.items()}
    topics = pipeline.topics()
    assert b"${directory:" in topics["cdc-connect-configs"]
    searched |= {f"topic {name}": content for name, content in topics.items()}
    with pipeline.index() as client:
        for index in ("airport-*", "cdc-position"):
            answer = client.get(f"/{index}/_search?size=10000").raise_for_status()
            searched[f"index {index}"] = answer.content
    return searched | {f"process {number}": text for number, text in enumerate(processes.seen)}


def read_files(state: Path) -> dict[str, bytes]:
    """The files of the stack, but those that may hold secrets, which nobody but their owners may read."""
    files = [
        path
        for path in state.rglob("*")
        if path.is_file() and not str(path.relative_to(state)).startswith(UNREAD)
    ]
    holders = [path for path in files if str(path.relative_to(state)).startswith(HOLDERS)]
    # A private key of a server's own.
    holders += [state / name / "conf/server.key" for name in ("postgres", "elasticsearch")]
    assert [path for path in holders if path.stat().st_mode & 0o077] == []
    return {str(path): path.read_bytes() for path in files if path not in holders}
