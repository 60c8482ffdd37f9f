"""The account of a run: bounded, never less than it was, whatever the tables."""

import pytest

from cdc.apply.progress import OTHERS, TABLES, Account
from cdc.model.outcome import Applied


def test_the_first_tables_that_change_are_counted_apart_and_the_others_together() -> None:
    account = Account()
    for number in range(TABLES + 10):
        account.count(f"public.t{number}", Applied(read=2, written=1, stale=1))
        account.count(f"public.idle{number}", Applied())
    account.count("public.t0", Applied(read=1, folded=1))
    counts = account.by_table
    assert len(counts) == TABLES + 1
    assert counts["public.t0"] == Applied(read=3, written=1, stale=1, folded=1)
    assert counts[OTHERS] == Applied(read=20, written=10, stale=10)


def test_counts_never_go_down_when_further_tables_change() -> None:
    account = Account()
    before: dict[str, int] = {}
    for number in range(2 * TABLES):
        account.count(f"public.t{number % 70}", Applied(read=1, written=1))
        now = {table: count.read for table, count in account.by_table.items()}
        assert all(now[table] >= read for table, read in before.items())
        before = now
    assert sum(before.values()) == 2 * TABLES


def test_what_was_read_of_an_account_stays_as_it_was() -> None:
    account = Account()
    account.count("public.orders", Applied(read=1, written=1))
    counts = account.by_table
    account.count("public.orders", Applied(read=1, written=1))
    assert counts["public.orders"].read == 1


def test_a_phase_that_fails_has_taken_its_time() -> None:
    account = Account()
    with account.measured("apply"):
        pass
    with pytest.raises(RuntimeError), account.measured("settle"):
        raise RuntimeError
    assert set(account.seconds) == {"apply", "settle"}
    assert all(seconds >= 0 for seconds in account.seconds.values())
