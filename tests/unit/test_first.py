"""The first pipeline file: accepted as it is, whatever tables are called."""

import sys
from pathlib import Path
from typing import Any

import pytest

from cdc.cli import console, verbs
from cdc.cli.init import PipelineDraft, draft_text, dsn_reference, name_for, write_draft
from cdc.compose.stack_state import Endpoints
from cdc.config import settings
from cdc.errors import SettingsError

SERVERS = Endpoints(
    "postgresql://x", "x:1", "http://x:2", "http://x:3", "redis://x:4/0", "/x", "/state"
).environment()


def loaded(path: Path, first: PipelineDraft, **environment: str) -> settings.Pipeline:
    path.write_text(draft_text(first))
    return settings.load(path, {**SERVERS, **environment})


@pytest.mark.parametrize("name", ["shop", "true", "no", "null"])
@pytest.mark.parametrize(
    "tables", [["public.*"], ["public.items", "public.order-s", "a.1"], ["1.2", "public.no"]]
)
def test_it_is_accepted_as_it_is(tmp_path: Path, name: str, tables: list[str]) -> None:
    result = loaded(tmp_path / "first.yaml", PipelineDraft(name, "${CDC_POSTGRES}", tables))
    assert (result.pipeline, result.source.dsn) == (name, "postgresql://x")
    assert [entry.table for entry in result.source.tables] == tables
    assert [sink.type for sink in result.sinks.values()] == ["elasticsearch", "redis", "delta"]
    assert (result.kafka, result.connect) == ("x:1", "http://x:2")


def test_what_is_left_out_is_there_to_read(tmp_path: Path) -> None:
    first = PipelineDraft(
        "shop",
        "postgresql://localhost/shop?options=-c%20x",
        ["public.*", "public.odd"],
        {"public.*": ["public.items"]},
        {"public.loose": "no primary key: list it with one,\n{table: public.loose, key: [...]}"},
        {"public.odd": ("public.odd has a column", "write {table: public.odd, exclude: [c]}")},
    )
    result = loaded(tmp_path / "first.yaml", first)
    assert [entry.table for entry in result.source.tables] == ["public.*"]
    content = draft_text(first)
    odd = "    # - public.odd", "    #   write {table: public.odd, exclude: [c]}"
    assert {"    #   public.items", *odd} <= set(content.splitlines())
    assert "# left out: public.loose: no primary key" in content


@pytest.mark.parametrize(
    ("dsn", "environment", "expected"),
    [
        ("postgresql://me:secret@h/d", {"MY_DB": "postgresql://me:secret@h/d"}, "${MY_DB}"),
        ("postgresql://me:secret@h/d", {}, "${SHOP_POSTGRES}"),
        ("host=h dbname=d password=secret", {}, "${SHOP_POSTGRES}"),
        ("postgresql://me@h/d", {}, "postgresql://me@h/d"),
    ],
)
def test_no_password_is_written(dsn: str, environment: dict[str, str], expected: str) -> None:
    assert dsn_reference(dsn, "shop", environment) == expected


def test_a_name_from_a_file() -> None:
    paths = ("shop.yaml", "My Shop-2.yml", "2nd.yaml", "_.yaml", f"{'a' * 60}.yaml")
    names = [name_for(Path(path)) for path in paths]
    assert names == ["shop", "my_shop_2", "nd", "pipeline", "a" * 48]


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text("mine")
    with pytest.raises(SettingsError, match="is there already"):
        write_draft(path, "theirs")
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "nowhere.yaml")
    with pytest.raises(SettingsError, match="is there already"):
        write_draft(path, "theirs")
    with pytest.raises(SettingsError, match="can't be written"):
        write_draft(tmp_path / "none" / "shop.yaml", "theirs")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(console.call, "answered", False)
    monkeypatch.setattr(sys, "argv", ["cdc", *words])
    with pytest.raises(SystemExit) as exit_info:
        verbs.main()
    return exit_info.value.code


def test_without_a_database_it_is_that_of_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shop.yaml"
    assert run(monkeypatch, "-p", str(path), "init") == 0
    assert f"cdc -p {path} up" in capsys.readouterr().out
    result = settings.load(path, SERVERS)
    assert (result.pipeline, result.source.dsn) == ("shop", "postgresql://x")
    assert result.patterns[0].table == "public.*"
    content = path.read_text()
    assert run(monkeypatch, "-p", str(path), "init", "--tables", "public.items") == 2
    assert path.read_text() == content
    assert run(monkeypatch, "-p", str(path), "init", "--dsn", "postgresql://127.0.0.1:1/x") == 2
    path.unlink()
    capsys.readouterr()
    dsn = "postgresql://me:hunter2@127.0.0.1:1/x"
    assert run(monkeypatch, "-p", str(path), "init", "--dsn", dsn) == 4
    printed = capsys.readouterr()
    assert "can't be reached" in printed.err
    assert "hunter2" not in printed.out + printed.err
    assert not path.exists()
