"""What patterns mean: which tables, and which not, for every command the same."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from cdc.config import settings
from cdc.control.registrations import Captured, Registration, refuse_waiting
from cdc.errors import SettingsError
from cdc.postgres.catalog import Candidate, choose_tables
from cdc.runtime.context import Context
from tests.support.answering import answering, silent
from tests.support.pipelines import pipeline
from tests.support.wait import answer_within

ORDERS, ITEMS, OTHER_TABLE = (Candidate("public", name) for name in ("orders", "items", "other"))
ODD = (
    Candidate("public", "report", kind="v"),
    Candidate("public", "totals", kind="m"),
    Candidate("public", "far", kind="f"),
    Candidate("public", "payments", kind="p"),
    Candidate("public", "payments_2025", root="public.payments"),
    Candidate("public", "loose", keyed=False),
    Candidate("public", "passing", unlogged=True),
    Candidate("public", "order items"),
    Candidate("public", "spatial_ref_sys", extension="postgis"),
)


def names(candidates: list[Candidate], *tables: str | dict[str, object]) -> tuple[str, ...]:
    return choose_tables(pipeline("shop", "", *tables), candidates).names


def test_a_pattern_means_what_can_be_captured_and_says_what_not() -> None:
    choice = choose_tables(pipeline("shop", "", "*.*"), [ITEMS, *ODD, ORDERS])
    assert choice.names == ("public.items", "public.payments", "public.orders")
    assert {name: why.split(":")[0] for name, why in choice.left_out.items()} == {
        "public.report": "a view",
        "public.totals": "a materialized view",
        "public.far": "a foreign table",
        "public.payments_2025": "a partition of public.payments, which has its rows",
        "public.loose": "no primary key",
        "public.passing": "not logged",
        "public.order items": "a topic's name can't have other characters than letters, digits, _ and -",
        "public.spatial_ref_sys": "of the extension postgis",
    }
    finding = choice.findings[0]
    assert (finding.code, finding.severity) == ("table-left-out", "info")
    assert finding.table == "public.report"
    assert finding.message == (
        "public.report is left out: a view: the log has rows of tables only."
        " No action needed, unless its rows are wanted."
    )


@pytest.mark.parametrize(
    ("tables", "meant"),
    [
        (("public.*",), ("public.items", "public.orders", "public.other")),
        (("public.o*",), ("public.orders", "public.other")),
        (("pub*.*s",), ("public.items", "public.orders")),
        # By its name, with settings of its own, wherever it stands.
        (("public.*", "public.orders"), ("public.items", "public.other", "public.orders")),
        (("public.orders", "public.*"), ("public.orders", "public.items", "public.other")),
        (("public.o*", "public.*"), ("public.orders", "public.other", "public.items")),
        (("public.orders", "public.elsewhere"), ("public.orders", "public.elsewhere")),
    ],
)
def test_each_table_once_and_in_the_order_of_the_file(
    tables: tuple[str, ...], meant: tuple[str, ...]
) -> None:
    candidates = [ITEMS, ORDERS, OTHER_TABLE]
    assert names(candidates, *tables) == meant
    resolved = pipeline("shop", "", *tables).with_tables(meant)
    assert tuple(entry.table for entry in resolved.source.tables) == meant
    # Again from what it means by now: with a table more, it means that as well.
    assert resolved.with_tables(meant) == resolved
    assert choose_tables(resolved, candidates).names == meant


def test_settings_are_the_entrys_own() -> None:
    entries = {"table": "public.*", "partitions": 1}, {"table": "public.orders", "partitions": 8}
    original = pipeline("shop", "", *entries)
    resolved = original.with_tables(["public.items", "public.orders"])
    assert {entry.table: entry.partitions for entry in resolved.source.tables} == {
        "public.items": 1,
        "public.orders": 8,
    }
    assert original.patterns == resolved.patterns != []


@pytest.mark.parametrize(
    ("tables", "candidates", "words", "hint"),
    [
        (("shop.*",), [ITEMS], "shop.* in source.tables matches no table.", "tables are in: public"),
        (("public.*",), [ODD[0]], "can be captured: public.report is left out (a view", "by their names"),
        (("public.*",), [Candidate("public", "AUDIT"), Candidate("public", "audit")], "AUDIT and public.audit", "list"),
        (("a*.*",), [Candidate("a", "b_c"), Candidate("a_b", "c")], "a.b_c and a_b.c", "list the one"),
    ],
)  # fmt: skip
def test_what_a_pattern_cannot_mean(
    tables: tuple[str, ...], candidates: list[Candidate], words: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        names(candidates, *tables)
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_of_two_with_one_name_the_one_that_is_listed_is_meant() -> None:
    alike = [Candidate("public", "AUDIT"), Candidate("public", "audit")]
    choice = choose_tables(pipeline("shop", "", "public.*", "public.audit"), alike)
    assert choice.names == ("public.audit",)
    assert "the same name as public.audit" in choice.left_out["public.AUDIT"]


def test_a_table_that_comes_later_waits() -> None:
    registration = Registration(tables={"public.items": Captured()})
    refuse_waiting(None, ["public.items"])
    refuse_waiting(registration, ["public.items"])
    not_captured = r"public.orders and 1 more .* isn't captured yet"
    with pytest.raises(SettingsError, match=not_captured) as caught:
        refuse_waiting(registration, ["public.items", "public.orders", "public.other"])
    assert "migrate, then cdc -p FILE register" in caught.value.hint


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a pipeline file with these tables, whose Kafka and Postgres are at these addresses."""

    def write(tables: str, kafka: str = "x", dsn: str = "x") -> Path:
        path = tmp_path / "shop.yaml"
        path.write_text(
            f"pipeline: shop\nkafka: {kafka}\nconnect: http://x\n"
            f"source:\n  dsn: {dsn}\n  tables: {tables}\n"
            "sinks:\n  warehouse: {type: delta, path: /x}\n"
        )
        return path

    return write


def test_a_pattern_has_to_mean_something_that_is_registered(
    file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every verb: views of no table are all right, whatever is asked of them."""
    registration = Registration(tables={"public.items": Captured()})
    monkeypatch.setattr("cdc.kafka.topics.Topics", lambda _: nullcontext())
    monkeypatch.setattr("cdc.control.registrations.read", lambda *_: registration)
    shop = Context(file("['public.*']"), tmp_path).pipeline
    assert [entry.table for entry in shop.source.tables] == ["public.items"]
    with pytest.raises(SettingsError, match=r"pubilc\.\* in source\.tables means none") as caught:
        _ = Context(file("['pubilc.*']"), tmp_path).pipeline
    assert "migrate, then cdc -p FILE register" in caught.value.hint


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{table: public.*, exclude: [note]}", "exclude, mask, key and index.fields are a single table's"),
        ("{table: public.*, mask: {a: redact}}", "exclude, mask, key and index.fields are a single table's"),
        ("{table: public.*, key: [a]}", "exclude, mask, key and index.fields are a single table's"),
        ("{table: public.*, index: {fields: {a: {type: keyword}}}}", "index.fields are a single table's"),
        ('"public.a?*"', "a pattern has letters, digits, _, - and * only"),
        ('"public*"', "a table is written schema.table"),
        ("public.*, public.*", "listed twice: public.*"),
    ],
)  # fmt: skip
def test_a_pattern_that_is_written_wrong(file: Callable[..., Path], entry: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load(file(f"[{entry}]"), {})
    assert words in caught.value.message


def test_who_only_looks_does_not_wait_for_a_server_that_says_nothing(
    file: Callable[..., Path], tmp_path: Path
) -> None:
    """A `cdc status` has to say so within seconds: what is listed by name is known all the same."""
    with answering(silent) as kafka, answering(silent) as postgres:
        dsn = f"postgresql://127.0.0.1:{postgres}/x"
        path = file("[public.items, public.o*]", f"127.0.0.1:{kafka}", dsn)
        shown = answer_within(4, lambda: Context(path, tmp_path).pipeline_to_show)
    assert [entry.table for entry in shown.source.tables] == ["public.items"]
