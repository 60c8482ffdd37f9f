"""A marked secret in every place that can hold one, and no word of it anywhere: not printed, not
logged, not written.

Nothing answers at these addresses, so that every verb ends on its way to its server.
"""

import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from cdc.capture.configuration import configuration
from cdc.cli import console, verbs
from cdc.config import settings
from cdc.connectors.client import Connect
from cdc.errors import CdcError, ConnectorError, SettingsError, SourceUnavailable
from cdc.model import secrets
from cdc.model.table import Column, Table
from cdc.model.trace import trace
from cdc.postgres.source import connect_to_read, parse_dsn
from cdc.postgres.table_survey import requirements
from cdc.redis.server import client, forget
from cdc.sink import factory
from cdc.sink.contract import Sink
from cdc.sink.remedy import classify
from cdc.sinks.elasticsearch.connection import read_login
from cdc.sinks.elasticsearch.settings import Elasticsearch
from cdc.sinks.redis.settings import Redis
from tests.support.answering import answering
from tests.support.pipelines import NOWHERE, pipeline

SECRET = "hunter2"
INDEX = f"http://elastic:{SECRET}@{NOWHERE}"
CACHE = f"redis://app:{SECRET}@{NOWHERE}/0"
FILE = f"""\
pipeline: shop
source:
  dsn: postgresql://owner:{SECRET}@{NOWHERE}/shop
  replication_password: {SECRET}
  tables: [public.items]
sinks:
  search: {{type: elasticsearch, url: "{INDEX}"}}
  keyed: {{type: elasticsearch, nodes: ["https://127.0.0.1:2", "https://127.0.0.1:3"], api_key: "{SECRET}"}}
  named: {{type: elasticsearch, nodes: ["http://127.0.0.1:4"], user: elastic, password: "{SECRET}"}}
  cache: {{type: redis, url: "{CACHE}", prefix: shop}}
  guarded:
    {{type: redis, url: "redis:///0", prefix: guarded, sentinels: ["{NOWHERE}"], service: shop, user: app,
     password: "{SECRET}", sentinel_password: "{SECRET}"}}
  warehouse: {{type: delta, path: PATH/warehouse}}
kafka:
  {{brokers: {NOWHERE}, protocol: SASL_PLAINTEXT, mechanism: PLAIN, user: shop, password: "{SECRET}"}}
connect: http://worker:{SECRET}@{NOWHERE}
"""
TABLE = Table("public", "items", (Column("id", "integer"),), ("id",), "shop.public.items")
VERBS = (
    "plan", "migrate", "register", "run", "status", "verify", "verify --table public.none", "rebuild search",
    "rebuild keyed", "rebuild cache", "rebuild guarded", "rollback search", "rollback cache", "pause cache",
    "resume cache", "generations", "quarantine list", "quarantine show cache/shop.public.items/0/0",
    "quarantine redrive", "topics", "topics audit", "doctor", "views list",
)  # fmt: skip


@pytest.fixture(params=["written in the file", "in its own file"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "pipeline.yaml"
    text = FILE.replace("PATH", str(tmp_path))
    if "own" in request.param:
        (tmp_path / "secret").write_text(f"{SECRET}\n")
        text = text.replace(SECRET, f"${{file:{tmp_path}/secret}}")
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.call, "answered", False)
    for name in [name for name in os.environ if name.startswith("CDC_")]:
        monkeypatch.delenv(name)


def spoken(
    file: Path, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int | str | None, str]:
    """The exit code of a verb, and all that it printed."""
    options = ["-p", str(file), "--state", str(file.parent / "state")]
    monkeypatch.setattr(sys, "argv", ["cdc", *options, *words.split()])
    with pytest.raises(SystemExit) as exit_info:
        verbs.main()
    printed = capfd.readouterr()
    return exit_info.value.code, printed.out + printed.err


def assert_not_written(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("pipeline.yaml", "secret"):
            assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("words", VERBS)
def test_no_verb_tells_a_secret(
    words: str, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, printed = spoken(file, f"{words} --json", monkeypatch, capfd)
    assert printed
    assert code not in (0, 1, None), printed
    assert SECRET not in printed
    assert_not_written(file.parent)


def calls(sink: Sink) -> Iterator[Callable[[], object]]:
    names = {TABLE.qualified: "20260101t000000000000"}
    for view in (sink, sink.for_generation(names)):
        yield from (
            partial(ask, TABLE)
            for ask in (view.prepare, view.position, view.clear, view.generations)
        )
    yield partial(sink.check_capacity, [TABLE])
    yield partial(sink.promote, [TABLE], names)
    yield partial(sink.drop_unreferenced, [TABLE], {})


@pytest.mark.parametrize("name", ["search", "keyed", "named", "cache", "guarded"])
def test_no_sink_tells_a_secret(name: str, file: Path) -> None:
    sink = factory.build(settings.load(file, {}), name)
    failures = []
    for ask in calls(sink):
        try:
            ask()
        except Exception as error:
            failure = classify(error, name)
            failures.append(f"{failure.message} {failure.hint} {failure.details} {trace(error)}")
            if isinstance(error, CdcError):
                failures.append(str(error))
    assert len(failures) > 6
    assert [failure for failure in failures if SECRET in failure] == []


@pytest.mark.parametrize(
    "line",
    [
        f"dsn: [{SECRET}]",
        f"dsn: 'postgresql://owner:x@{SECRET}@host/shop'",
        f"dsn: 'postgresql://owner:{SECRET}/x@127.0.0.1/shop'",
        f"dsn: 'host=127.0.0.1 port=1 password={SECRET} nonsense'",
        f"dsn: 'host=127.0.0.1 port=1 password={SECRET}'",
        f"dsn: 'host=127.0.0.1 port=1 pasword={SECRET}'",
        f"dsn: *{SECRET}",
        f"dsn: !{SECRET} x",
        f"dsn: 'postgresql://127.0.0.1:1/shop'\n  replication_password: {{a: {SECRET}}}",
        f"dsn: 'postgresql://127.0.0.1:1/shop'\n  password: {SECRET}",
        f"dsn: 'postgresql://127.0.0.1:1/shop'\n  replication_password: \"{SECRET}",
    ],
)
def test_no_wrong_setting_is_quoted(
    line: str, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    head, _, tail = FILE.partition("  dsn:")
    _, _, tail = tail.partition(f"  replication_password: {SECRET}\n")
    file.write_text(f"{head}  {line}\n{tail}")
    code, printed = spoken(file, "migrate", monkeypatch, capfd)
    assert code in (SettingsError.exit_code, 4)
    assert SECRET not in printed


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (INDEX, f"http://elastic:{SECRET}@[::1"),
        (INDEX, f"http://elastic:{SECRET}@127.0.0.1:port"),
        (INDEX, f"http://elastic:x/{SECRET}@127.0.0.1:1"),
        (CACHE, f"redis://:x/{SECRET}@127.0.0.1:1"),
        (CACHE, f"redis://app:{SECRET}@[::1"),
        (CACHE, f"redis://app:{SECRET}@127.0.0.1:port"),
        (CACHE, f"redis://127.0.0.1:1/0?password={SECRET}"),
        (CACHE, f"redis://127.0.0.1:1/{SECRET}"),
        (CACHE, f"unix://app:{SECRET}@/nowhere.sock?db=0"),
        (CACHE, f"{SECRET}://127.0.0.1:1"),
    ],
)
def test_no_wrong_url_is_quoted(
    given: str,
    url: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert FILE.count(given) == 1
    file.write_text(file.read_text().replace(given, url))
    _, printed = spoken(file, "status --json", monkeypatch, capfd)
    assert printed
    assert SECRET not in printed


def test_a_wrong_reader_is_named_and_not_quoted() -> None:
    for login, why in (
        (f"postgresql://reader:{SECRET}@@ half/x", "source.reader isn't"),
        (f"postgresql://reader:{SECRET}/x@{NOWHERE}/shop", "the address in source.reader"),
        (f"postgresql://reader:{SECRET}@{NOWHERE}/shop", f"Postgres at {NOWHERE}"),
    ):
        shop = pipeline("shop", f"postgresql://owner:{SECRET}@x/y", "a.b", source_reader=login)
        assert SECRET not in repr(shop)
        with pytest.raises(CdcError, match=why) as caught:
            connect_to_read(shop.source)
        assert SECRET not in f"{caught.value.message}{caught.value.hint}{caught.value.details}"


def logins(url: str) -> Iterator[tuple[str, ...]]:
    """What a new connection logs in with."""
    provider = client(url).connection_pool.connection_kwargs["credential_provider"]
    yield provider.get_credentials()
    forget(url)


def test_a_url_may_have_the_user_in_a_file_as_well(tmp_path: Path) -> None:
    user = tmp_path / "user"
    password = tmp_path / "password"
    user.write_text("o:wn@er/%41")
    password.write_text("p@ss/w:rd")
    path = tmp_path / "pipeline.yaml"
    text = FILE.replace("PATH", str(tmp_path))
    for name in ("owner", "elastic", "app", "worker"):
        login = f"${{file:{user}}}:${{file:{password}}}@"
        text = text.replace(f"{name}:{SECRET}@", login)
    path.write_text(text)
    pipeline = settings.load(path)
    expected = (user.read_text(), password.read_text())
    dsn = parse_dsn(pipeline.source.dsn)
    assert (dsn["user"], dsn["password"]) == expected
    cache = pipeline.sinks["cache"]
    assert isinstance(cache, Redis)
    assert list(logins(cache.connection_url)) == [expected]
    header = f"Basic {b64encode(':'.join(expected).encode()).decode()}"
    search = pipeline.sinks["search"]
    assert isinstance(search, Elasticsearch)
    assert read_login(search.address) == {"authorization": header}
    requests: list[bytes] = []
    with answering(lambda client: requests.append(client.recv(4096))) as port:
        address = pipeline.connect.replace(NOWHERE, f"127.0.0.1:{port}")
        with Connect(address) as connect, suppress(ConnectorError):
            connect.config("shop")
    assert f"Authorization: {header}".encode() in requests[0]


def test_a_secret_in_the_query_of_a_dsn_is_escaped(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a&b%41c d@/=")
    for dsn in (
        f"postgresql://owner@db/shop?password=${{file:{secret}}}",
        f"postgresql://db/shop?user=me@here&password=${{file:{secret}}}",
    ):
        parameters = parse_dsn(dsn)
        assert parameters["password"] == secret.read_text()
        assert parameters["dbname"] == "shop"


def test_what_is_in_files_is_read_at_each_connection(tmp_path: Path) -> None:
    """By every parser of a URL or a DSN that has a login, also one that would have to be escaped."""
    secret = tmp_path / "secret"
    reference = f"${{file:{secret}}}"
    path = tmp_path / "pipeline.yaml"
    path.write_text(FILE.replace("PATH", str(tmp_path)).replace(SECRET, reference))
    awkward = "p@ss/w:rd '%41\\#"
    secret.write_text(awkward)
    pipeline = settings.load(path)
    assert parse_dsn(pipeline.source.dsn)["password"] == awkward
    secret.write_text("changed")
    assert parse_dsn(pipeline.source.dsn)["password"] == "changed"
    assert parse_dsn(f"host=db password={reference}")["password"] == "changed"
    secret.write_text("postgresql://owner:whole@db/shop")
    assert parse_dsn(reference)["password"] == "whole"
    sinks = (pipeline.sinks["cache"], pipeline.sinks["guarded"])
    for url in (sink.connection_url for sink in sinks if isinstance(sink, Redis)):
        # What executors get: the reference.
        assert awkward not in unquote(url)
        for text in (awkward, "changed"):
            secret.write_text(text)
            (login,) = logins(url)
            assert login == ("app", text)
    assert awkward not in repr(pipeline)
    assert "changed" not in repr(pipeline)


@pytest.mark.parametrize(
    ("name", "content", "key", "expected"),
    [
        ("plain", "a secret\r\n", "", "a secret"),
        ("properties", "# first\nother = 1\npg.password: s=cr\\\\t\n", ":pg.password", "s=cr\\t"),
        ("json", '{"other": 1, "password": "s\\u00fcss"}', ":password", "süss"),
    ],
)
def test_forms_of_secrets(tmp_path: Path, name: str, content: str, key: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    assert secrets.read(f"<${{file:{tmp_path / name}{key}}}>") == f"<{expected}>"


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        (None, "", "can't be read: No such file or directory"),
        (b"\xff", "", "can't be read: it isn't text in UTF-8"),
        (b"\n", "", "is empty"),
        (b"other=hunter2", ":password", "the file has no such key"),
        (b'{"password": 1}', ":password", "the file has no such key"),
        (b"{hunter2", ":password", "the file has no such key"),
    ],
)
def test_a_secret_that_cant_be_read_is_named_with_its_line(
    tmp_path: Path, content: bytes | None, key: str, words: str
) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
    path = tmp_path / "pipeline.yaml"
    reference = f"${{file:{secret}{key}}}"
    written = FILE.replace("PATH", str(tmp_path)).replace(
        f"_password: {SECRET}", f"_password: {reference}"
    )
    path.write_text(written)
    with pytest.raises(SettingsError) as caught:
        settings.load(path)
    assert f"{path}:4: source.replication_password: {reference}" in str(caught.value)
    assert words in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_a_reader_does_without_the_secrets_of_the_owner(tmp_path: Path) -> None:
    """It runs where these files aren't. A verb that connects as the owner names what it lacks."""
    path = tmp_path / "pipeline.yaml"
    text = FILE.replace("PATH", str(tmp_path))
    absent = f"${{file:{tmp_path}/absent}}"
    text = text.replace(f"owner:{SECRET}", f"owner:{absent}")
    text = text.replace(f"_password: {SECRET}\n", f"_password: {absent}\n", 1)
    path.write_text(text)
    with pytest.raises(SettingsError, match="can't be read"):
        settings.load(path)
    reader = f"reader: postgresql://reader@{NOWHERE}/shop"
    path.write_text(text.replace("source:\n", f"source:\n  {reader}\n"))
    pipeline = settings.load(path)
    needed = requirements(pipeline)
    assert (needed.owner, needed.reader) == ("owner", "reader")
    config = configuration(pipeline, tables=[TABLE], server_version=180000)
    assert config["database.password"] == f"${{directory:{tmp_path}:absent}}"
    with pytest.raises(SourceUnavailable, match="absent} can't be read"):
        connect_to_read(pipeline.source, as_owner=True)


def test_the_connectors_password_is_read_by_the_worker(tmp_path: Path) -> None:
    """Its configuration is in Connect's topic, and whoever asks the worker gets it."""
    for reference, expected in (
        (f"${{file:{tmp_path}/pg}}", f"${{directory:{tmp_path}:pg}}"),
        (f"${{file:{tmp_path}/pg:password}}", f"${{file:{tmp_path}/pg:password}}"),
    ):
        (tmp_path / "pg").write_text("password=hunter2")
        path = tmp_path / "pipeline.yaml"
        written = FILE.replace("PATH", str(tmp_path))
        path.write_text(written.replace(f"_password: {SECRET}", f"_password: {reference}"))
        config = configuration(settings.load(path), tables=[TABLE], server_version=180000)
        assert config["database.password"] == expected
        assert SECRET not in str(config)
