"""What is shown says no more than what is known, can be copied, and names commands that can be run
as they are.
"""

import io
import os
import re
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from cdc.apply.progress import Progress, RunState
from cdc.cli.console import WIDE, Call
from cdc.cli.quarantine import draw_quarantine
from cdc.cli.run import ProgressLog, draw_progress
from cdc.cli.status import draw_look, draw_status, show_looks
from cdc.cli.verbs import app, hoist_global_options
from cdc.errors import SettingsError
from cdc.model.finding import find
from cdc.model.outcome import Applied
from cdc.model.wording import advice, completed_document, duration, full_stopped
from cdc.observe.sampler import Failure, Sample
from cdc.observe.status import SinkStatus, Status, ViewStatus
from cdc.quarantine.log import QuarantinedRecord, QuarantineKey
from tests.support.pages import ROOT

STARTING = Progress("search")
RUNNING = Progress(
    "search", RunState.APPLYING, Applied(read=5, written=5), lag_records=0, lag_seconds=0.0
)


def shown(renderable: RenderableType, width: int = WIDE) -> str:
    """Return the text that a pipe gets, or a terminal of so many columns."""
    console = Console(file=io.StringIO(), width=width, height=25)
    console.print(renderable)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "progress",
    [
        STARTING,
        replace(RUNNING, lag_records=None, lag_seconds=None),
        replace(RUNNING, looked_s=40.0),
    ],
    ids=["starting", "blind", "hung"],
)
def test_what_nobody_has_read_is_unknown_and_never_zero(progress: Progress) -> None:
    (_, line, *_) = shown(draw_progress([progress])).splitlines()
    assert line.split()[-2:] == ["unknown", "unknown"]
    (log_line, *_) = ProgressLog().lines([progress], 0.0)
    assert "waiting: unknown" in log_line


def test_what_has_been_read_is_reported() -> None:
    behind = replace(RUNNING, lag_records=12, lag_seconds=4.0)
    (_, line) = shown(draw_progress([behind])).splitlines()
    assert line.split()[-3:] == ["12", "4.0", "s"]
    (_, line) = shown(draw_progress([RUNNING])).splitlines()
    assert line.split()[-2:] == ["0", "-"]


def test_a_view_that_was_not_read_is_unknown_in_all_of_its_numbers() -> None:
    sink = SinkStatus("cache", views=(ViewStatus("public.orders"),))
    text = shown(draw_status(Status("shop", sinks=(sink,)), "Nothing was measured."))
    (line,) = (line for line in text.splitlines() if line.startswith("public.orders"))
    assert line.split()[2:] == ["unknown"] * 4
    assert re.search(r"^cache +unknown$", text, re.MULTILINE)
    assert text.startswith("ok: Nothing was measured.")


def test_looks_stand_one_below_the_other_in_a_pipe_and_a_failed_one_says_why() -> None:
    pipe = Console(file=io.StringIO(), width=WIDE, height=25)
    look = Sample(Status("shop", sinks=(SinkStatus("cache"),)), 1000.0, 0.1)
    with show_looks(pipe) as show:
        show(draw_look(None, Failure("shop.yaml has a mistake.", "mend it", 1.0)))
        show(draw_look(look, None))
        show(draw_look(look, Failure("Nobody answers.", "cdc -p FILE status", 2000.0)))
    first, second, third = re.split(r"\n\n(?=ok|Nobody)", pipe.file.getvalue())  # type: ignore[attr-defined]
    assert re.fullmatch(r"shop.yaml has a mistake\. Next: mend it\. \(since .*\)", first)
    assert "as of" in second
    assert third.startswith("Nobody answers. Next: ")
    assert second in third


def test_a_watch_and_one_document_do_not_go_together() -> None:
    result = CliRunner().invoke(app, ["-p", "none.yaml", "status", "--watch", "--json"])
    assert isinstance(result.exception, SettingsError)
    assert "--watch" in result.exception.message


def test_what_waits_says_for_what_and_since_when() -> None:
    progress = replace(
        RUNNING,
        state=RunState.RETRYING,
        error="The index is away.",
        hint="cdc -p FILE up",
        state_since=1000.0,
        aside={"public.t": ["was renamed to public.tags", "cdc -p FILE migrate"]},
        aside_since={"public.t": 1000.0},
    )
    _, _, sink, table = shown(draw_progress([progress])).splitlines()
    assert re.search(r"The index is away\. Next: .* up\. \(since .*\)$", sink)
    assert re.search(
        r"public\.t waits: was renamed to public\.tags\. Next: .* migrate\. \(since .*\)$", table
    )


def test_a_log_gets_news_only() -> None:
    progress_log = ProgressLog()

    def lines(progress: Progress, now: float) -> list[str]:
        return list(progress_log.lines([progress], now))

    assert re.match(r"\d\d:\d\d:\d\d|\d{4}-", lines(STARTING, 0.0)[0])
    assert len(lines(RUNNING, 1.0)) == 1
    assert [line for now in range(2, 7200) for line in lines(RUNNING, float(now))] == []
    busy = replace(RUNNING, applied=Applied(read=9, written=9))
    assert len(lines(busy, 7200.0)) == 1
    busier = replace(RUNNING, applied=Applied(read=10, written=10))
    assert (len(lines(busier, 7205.0)), len(lines(busier, 7210.0))) == (0, 1)
    away = replace(busier, state=RunState.RETRYING, error="Away.", hint="h")
    assert len(lines(away, 7211.0)) == 2


TOPIC = f"{'newshop' * 9}.public.products_of_the_year"
PLACE = f"warehouse/{TOPIC}/12/1234567"


def quarantined(topic: str, reason: str) -> list[QuarantinedRecord]:
    key = QuarantineKey("warehouse", topic, 12, 1234567, "a-key")
    return [QuarantinedRecord(key, reason, 0.0, 1)]


def test_what_has_to_be_copied_is_in_one_piece() -> None:
    text = shown(draw_quarantine(quarantined(TOPIC, "NaN has no decimal")))
    assert PLACE in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_pipe_gets_lines_that_are_not_folded() -> None:
    code = f"from cdc.cli.console import out, say; out.print({PLACE + ' x' * 90!r}); say({PLACE + ' y' * 90!r})"
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert (len(process.stdout.splitlines()), len(process.stderr.splitlines())) == (1, 1)


def test_a_terminal_gets_tables_that_are_folded_between_words() -> None:
    """Places, tables and numbers stay whole; the sentence beside them goes on below itself."""
    reason = "NaN has no decimal form in a column of this scale"
    id_ = "warehouse/newshop.t/12/1234567"
    records = quarantined("newshop.t", reason)
    lines = shown(draw_quarantine(records), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if id_ in line] == [lines[1]]
    edge = lines[0].index("reason")
    assert " ".join(line[edge:] for line in lines[1:]) == reason
    assert [line[:edge].strip() for line in lines[2:]] == [""] * (len(lines) - 2) != []
    assert shown(draw_quarantine(records)).count("\n") == 2


def test_standard_output_has_the_width_of_its_terminal_and_sentences_stay_whole() -> None:
    code = f"""
from cdc.cli.console import out
from cdc.cli.screen import Grid
grid = Grid("table", "result")
grid.add_row("public.orders", {"x " * 90!r})
out.print(grid)
out.print({"y " * 90!r})
"""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (25, 80))
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environment = {**os.environ, "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=theirs, cwd=ROOT, env=environment
        )
        os.close(theirs)
        printed = re.sub(r"\x1b\[[0-9;]*m", "", terminal.read(10_000).decode())
    *grid, sentence = printed.splitlines()
    assert (len(grid) > 2, max(map(len, grid)) <= 80) == (True, True)
    assert len(sentence) > 170


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cdc -p FILE plan, then cdc -p FILE run", "cdc -p 'my shop.yaml' plan, then cdc -p 'my shop.yaml' run"),
        ("then: cdc migrate, cdc run", "then: cdc -p 'my shop.yaml' migrate, cdc -p 'my shop.yaml' run"),
        ("is `cdc run` at work?", "is `cdc -p 'my shop.yaml' run` at work?"),
        ("cdc -p FILE --state OTHER up", "cdc -p 'my shop.yaml' --state OTHER up"),
        ("cdc -p other.yaml up, or the topic cdc.ddl", "cdc -p other.yaml up, or the topic cdc.ddl"),
    ],
)  # fmt: skip
def test_a_hint_names_the_file_that_the_caller_named(text: str, expected: str) -> None:
    call = Call()
    assert call.complete_commands(text) == text
    call.file = Path("my shop.yaml")
    assert call.complete_commands(text) == expected
    document = {"hint": text, "rows": [text], "aside": {"t": ["cdc -p", text]}}
    assert completed_document(document, call.complete_commands) == {
        "hint": expected,
        "rows": [text],
        "aside": {"t": ["cdc -p", expected]},
    }
    finding = find("table-left-out", "t", "It is a view.", "cdc -p FILE plan")
    (completed,) = completed_document([finding], call.complete_commands)
    assert completed["fix"] == "cdc -p 'my shop.yaml' plan"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cdc -p FILE run", "cdc -p shop.yaml --state /srv/state run"),
        ("cdc -p FILE --state /lib/NAME up", "cdc -p shop.yaml --state /lib/NAME up"),
        ("then at the worker's log", "then at the worker's log (/srv/state/connect.log)"),
    ],
)
def test_a_hint_names_the_state_and_the_log_of_the_caller(text: str, expected: str) -> None:
    call = Call()
    call.file, call.state = Path("shop.yaml"), Path("/srv/state")
    call.find_worker_log = lambda: Path("/srv/state/connect.log")
    assert call.complete_commands(text) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status", "-p", "F"], ["-p", "F", "status"]),
        (
            ["run", "--sink", "cache", "--pipeline=F", "--state", "S"],
            ["--pipeline=F", "--state", "S", "run", "--sink", "cache"],
        ),
        (["-p", "F", "status", "--json"], ["-p", "F", "status", "--json"]),
        (["status", "-p"], ["-p", "status"]),
        ([], []),
    ],
)
def test_the_file_may_be_named_behind_the_verb(words: list[str], expected: list[str]) -> None:
    assert hoist_global_options(words) == expected


def test_the_version_is_reported() -> None:
    printed = CliRunner().invoke(app, ["--version"]).stdout
    assert re.fullmatch(r"cdc \d+\.\d+\S*\n", printed)


def test_sentences_end_once() -> None:
    ended = {"a": "a.", "a.": "a.", "is it?": "is it?", "so: ": "so:"}
    assert {text: full_stopped(text) for text in ended} == ended
    assert advice("was renamed to a", "is it there?") == "was renamed to a. Next: is it there?"


def test_lengths_have_fitting_units() -> None:
    shown = {0.25: "0.2 s", 12: "12 s", 119: "119 s", 180: "3 min", 7200: "2 h", 200_000: "2 d"}
    assert {seconds: duration(seconds) for seconds in shown} == shown
