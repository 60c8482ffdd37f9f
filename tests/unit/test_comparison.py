"""What `cdc verify` says of a view: equal only where that was proved, of every row."""

import json
from collections.abc import Sequence

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.cli.console import out
from cdc.cli.verify import draw_comparisons, find_stalled, report
from cdc.errors import DivergenceError, UndecidedError
from cdc.model.table import Derivation, Table
from cdc.verify.comparison import PROOFS, Comparison, Options, prove

EQUAL = Comparison("cache", "public.busy", source_rows=10, view_rows=10)
UNDECIDED = Comparison("search", "public.busy", source_rows=10, view_rows=10, undecided=3)
REBUILD = "cdc -p FILE rebuild search --table public.busy"
WAITING = Comparison(
    "search", "public.items", problem="The view was made for other columns.", hint=REBUILD
)
WRONG = Comparison("warehouse", "public.busy", source_rows=10, view_rows=9, missing=1, undecided=2)


def test_what_was_not_decided_is_not_equal() -> None:
    comparisons = EQUAL, UNDECIDED, WRONG
    assert [comparison.equal for comparison in comparisons] == [True, False, False]
    verdicts = [comparison.verdict for comparison in comparisons]
    assert verdicts == ["equal", "undecided", "differs"]


def test_what_is_undecided_after_a_repair_is_not_repaired() -> None:
    wrong = Comparison("cache", "public.busy", missing=5)
    mended = wrong.with_recheck(Comparison("cache", "public.busy", missing=1, undecided=2))
    assert (mended.repaired, mended.wrong, mended.undecided) == (2, 1, 2)


@pytest.mark.parametrize(
    ("comparisons", "error", "code"),
    [
        ([EQUAL], None, 0),
        ([EQUAL, UNDECIDED], UndecidedError, 10),
        ([UNDECIDED, WRONG], DivergenceError, 8),
        ([], UndecidedError, 10),
        ([EQUAL, WAITING], UndecidedError, 10),
        ([WAITING, WRONG], DivergenceError, 8),
    ],
)
def test_each_verdict_has_its_exit_code(
    comparisons: Sequence[Comparison],
    error: type[Exception] | None,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code = 0
    try:
        report(comparisons, as_json=True)
    except (UndecidedError, DivergenceError) as raised:
        assert type(raised) is error
        assert "cdc -p FILE" in raised.hint
        exit_code = raised.exit_code
    assert exit_code == code
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is (error is None)
    assert document["undecided"] == sum(comparison.undecided for comparison in comparisons)
    views = [(view["undecided"], view["verdict"]) for view in document["views"]]
    assert views == [(comparison.undecided, comparison.verdict) for comparison in comparisons]


def test_the_table_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    out.print(draw_comparisons([EQUAL, UNDECIDED, WRONG]))
    lines = capsys.readouterr().out.splitlines()
    assert "equal" in lines[1]
    assert "3 undecided" in lines[2]
    assert "equal" not in lines[2]
    assert "differs" in lines[3]


def test_a_view_that_was_not_compared_has_its_reason_and_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UndecidedError, match=r"public\.items in search.*other columns") as caught:
        report([EQUAL, WAITING], as_json=False)
    assert caught.value.hint == REBUILD
    printed = " ".join(capsys.readouterr().out.split())
    assert "not compared" in printed
    assert "other columns" in printed
    assert "rebuild search --table public.busy" in printed


def test_a_run_that_works_says_which_views_do_not_move() -> None:
    """An ended one may have been right, and the view repaired since."""
    items = Table("public", "items", (), ("id",), "shop.public.items")
    derivation = Derivation("", (("public.items", items.topic),), ("cache",))
    view = Table("view", "item_docs", (), ("id",), "shop.view.item_docs", derivation=derivation)
    aside = {"public.items": ["there is no topic", "cdc -p FILE register"]}
    progress = {
        "cache": Progress("cache", RunState.STOPPED, aside=aside),
        "search": Progress("search", RunState.APPLYING, aside=aside),
        "documents": Progress("documents", RunState.APPLYING, aside=aside),
    }
    stalled = find_stalled(progress, [items, view])
    # Documents are made from a table that waits: none of theirs is current.
    assert stalled.keys() == {
        ("search", "public.items"),
        ("documents", "public.items"),
        ("documents", "view.item_docs"),
    }
    error = stalled["search", "public.items"]
    assert (error.message, error.hint) == ("there is no topic.", "cdc -p FILE register")


def test_a_proof_looks_again_at_what_it_could_not_decide() -> None:
    answers = iter([[UNDECIDED], [EQUAL]])
    prove(lambda: next(answers), "search", REBUILD)
    assert next(answers, None) is None


def test_a_proof_that_stays_undecided_is_none() -> None:
    answers = iter([[UNDECIDED]] * PROOFS + [[EQUAL]])
    with pytest.raises(UndecidedError, match=r"3 rows of public\.busy in search") as caught:
        prove(lambda: next(answers), "search", REBUILD)
    assert caught.value.hint.endswith(REBUILD)
    assert next(answers) == [EQUAL]


def test_a_proof_ends_at_the_first_difference() -> None:
    answers = iter([[EQUAL, WRONG], [EQUAL, EQUAL]])
    with pytest.raises(DivergenceError, match="1 rows missing"):
        prove(lambda: next(answers), "warehouse", REBUILD)


def test_what_was_left_out_of_a_comparison_proves_nothing() -> None:
    comparison = Comparison("cache", "t", extra=1)
    comparison.leave_out_wrong()
    assert (comparison.verdict, comparison.proves) == ("equal", False)
    assert Comparison("cache", "t").proves
    assert not Options(sample=5.0).proves
    assert not Options(since_ms=0).proves
