"""A marked secret in every place that can hold one, and no word of it anywhere: not printed, not
logged, not written.

Nothing answers at these addresses, so that every verb ends on its way to its server.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cdc.cli import console, verbs
from cdc.config import settings
from cdc.errors import CdcError, SettingsError
from cdc.model.table import Column, Table
from cdc.model.trace import trace
from cdc.sink import factory
from cdc.sink.contract import Sink
from cdc.sink.remedy import classify
from tests.support.pipelines import NOWHERE

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
  cache: {{type: redis, url: "{CACHE}", prefix: shop}}
  warehouse: {{type: delta, path: PATH/warehouse}}
kafka: {NOWHERE}
connect: http://worker:{SECRET}@{NOWHERE}
"""
TABLE = Table("public", "items", (Column("id", "integer"),), ("id",), "shop.public.items")
VERBS = (
    "plan", "migrate", "register", "run", "status", "verify", "verify --table public.none", "rebuild search",
    "rebuild cache", "rollback search", "rollback cache", "pause cache", "resume cache", "generations",
    "quarantine list", "quarantine show cache/shop.public.items/0/0", "quarantine redrive", "topics", "topics audit",
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(FILE.replace("PATH", str(tmp_path)))
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
        if path.is_file() and path.name != "pipeline.yaml":
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


@pytest.mark.parametrize("name", ["search", "cache"])
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
