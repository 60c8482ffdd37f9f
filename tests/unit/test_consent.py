"""Data is removed only after somebody has typed a word, or said so on the command line."""

import io
import sys
from pathlib import Path

import pytest

from cdc.cli import verbs
from cdc.cli.console import require_consent
from cdc.errors import SettingsError
from tests.support.pipelines import unreachable_file


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nobody_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("shop\n"))
    with pytest.raises(SettingsError, match="no terminal") as caught:
        require_consent("All of it goes", "shop", yes=False)
    assert "--yes" in caught.value.hint
    require_consent("All of it goes", "shop", yes=True)


def test_register_asks_before_it_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = unreachable_file(tmp_path, "public.orders")
    monkeypatch.setattr("sys.stdin", io.StringIO("shop\n"))
    words = ["cdc", "-p", str(path), "--state", str(tmp_path), "register", "--new-snapshot"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        verbs.main()
    assert "all rows are sent again, and there is no terminal to ask at" in capsys.readouterr().err


def test_only_the_word_itself_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("shop\n"))
    require_consent("All of it goes", "shop", yes=False)
    for word in ("shop2", "y"):
        monkeypatch.setattr("sys.stdin", Terminal(f"{word}\n"))
        with pytest.raises(SettingsError, match="nothing was removed"):
            require_consent("All of it goes", "shop", yes=False)
