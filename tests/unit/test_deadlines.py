"""Conditions that change with time: what is accepted, and when they may change."""

import random

import pytest

from cdc.config.mistakes import InvalidSetting
from cdc.scalar.instants import EPOCH, microseconds
from cdc.scalar.operators import NOW, next_change
from cdc.scalar.parser import parse

COLUMNS = {
    "placed": "timestamp with time zone",
    "paid": "timestamp with time zone",
    "local": "timestamp without time zone",
    "n": "integer",
}
TIMES = [
    None,
    "infinity",
    "1969-12-31T23:59:59.999999Z",
    "1970-01-01T00:00:00.000000Z",
    "1970-01-01T00:00:00.000003Z",
]
CONDITIONS = [
    "now() > placed", "placed < now()", "now() <= placed OR n = 1", "NOT now() >= placed", "now() = placed",
    "now() <> paid AND now() > placed", "now() BETWEEN placed AND paid",
    "now() > placed + interval '1 second' OR paid IS NULL", "paid IS NOT NULL AND now() > coalesce(paid, placed)",
    "n = 1",
]  # fmt: skip


def text(instant: int) -> str:
    seconds, rest = divmod(instant, 1_000_000)
    moment = EPOCH.fromtimestamp(seconds, EPOCH.tzinfo)
    return moment.replace(microsecond=rest).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.parametrize("condition", CONDITIONS)
def test_nothing_changes_before_the_next_change(condition: str) -> None:
    """Tick by tick the value is the same until then; and each change is such an instant."""
    rng = random.Random(condition)
    term = parse(condition, COLUMNS, has_clock=True)
    first_after = next_change(term)
    for _ in range(40):
        row = {"placed": rng.choice(TIMES), "paid": rng.choice(TIMES), "n": rng.randrange(2)}
        start = rng.choice([-4, -1, 0, 2, 999_998, 1_000_002])
        due: int | None = start
        previous = None
        for now in range(start, start + 9):
            value = term.evaluate({**row, NOW: text(now)})
            if now == due:
                due = first_after({**row, NOW: text(now)})
                assert due is None or due > now
            else:
                assert value is previous
            previous = value


def test_what_never_changes_has_no_next_change() -> None:
    term = parse("n = 1", COLUMNS, has_clock=True)
    assert next_change(term)({"n": 1, NOW: text(0)}) is None
    assert not term.reads_clock
    assert parse("now() > placed", COLUMNS, has_clock=True).columns == ("placed",)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("now() > now()", "now() is compared with a time of the row"),
        ("now() IS NULL", "now() is compared with a time of the row"),
        ("coalesce(now(), placed) > placed", "now() is compared with a time of the row"),
        ("date_trunc('hour', now()) > placed", "now() is compared with a time of the row"),
        ("now() + interval '1 hour' > placed", "now() is compared with a time of the row"),
        ("now() > '2013-01-01Z'", "now() is compared with a time of the row"),
        ("now() > local", "now() is compared with a time of the row"),
        ("placed + interval '1 month' > paid", "a month has no fixed length"),
        ("n + interval '1 hour' > placed", "an interval is added to a time stamp"),
    ],
)
def test_other_uses_of_the_clock_are_refused(condition: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse(condition, COLUMNS, has_clock=True)
    assert message in str(caught.value)


def test_an_include_has_no_clock() -> None:
    with pytest.raises(InvalidSetting, match="only a view's where and having may change with time"):
        parse("now() > placed", COLUMNS)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("placed + interval '2 days'", "1970-01-03T00:00:00.000003Z"),
        ("interval '1 hour' + placed", "1970-01-01T01:00:00.000003Z"),
        ("placed - interval '1 week'", "1969-12-25T00:00:00.000003Z"),
        ("local - interval '1 second'", "1969-12-31T23:59:59.000000"),
    ],
)
def test_intervals(expression: str, value: str) -> None:
    row = {"placed": "1970-01-01T00:00:00.000003Z", "local": "1970-01-01T00:00:00.000000"}
    assert parse(expression, COLUMNS).evaluate(row) == value
    assert microseconds(value) is not None
