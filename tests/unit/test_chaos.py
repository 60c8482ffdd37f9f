"""The checks of `make chaos`: silent about a good history, and each finds what is planted in it."""

import copy
import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from chaos import checks
from chaos.checks import Alert, Seen
from chaos.faults import BY_HAND, FAULTS, schedule
from chaos.links import DELAY_S, Disturbance, Link, links
from chaos.writer import ACCOUNTS, BALANCE, KINDS, Plan, Rows, apply, first_rows

TOTAL = ACCOUNTS * BALANCE
SEEN = [
    Seen("cache", "items", 1, None),
    Seen("cache", "items", 1, 3),
    Seen("search", "items", 1, 2),
    Seen("cache", "items", 1, 5),
    Seen("search", "items", 1, 5),
    Seen("cache", "items", 1, None),
    Seen("cache", "items", 1, 9),
]
ALERTS = [
    Alert("1", "c", "-5"),
    Alert("2", "c", "-1"),
    Alert("1", "u", "-9"),
    Alert("2", ""),
    Alert("2", "c", "-1"),
]
LOG = "batch read 10 records"


def written(count: int = 400) -> Rows:
    """The rows after so many transactions of a seed."""
    rows = first_rows()
    plan = Plan(random.Random(7))
    for number in range(1, count + 1):
        apply(rows, plan.next(number, rows)[1])
    return rows


def source_of(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        table: {str(key): copy.deepcopy(row) for key, row in content.items()}
        for table, content in rows.items()
    }


def test_a_good_history_has_no_violation() -> None:
    rows = written()
    source = source_of(rows)
    assert checks.lost_writes(source, rows) == []
    assert checks.differences("cache's items", source["items"], source["items"]) == []
    assert checks.wrong_sum("cache", source["accounts"], TOTAL) == []
    assert checks.went_back(SEEN) == []
    assert checks.wrong_alerts(ALERTS, ["1", "2"]) == []
    assert checks.unaccounted(LOG, [], {"cache's items": 0}) == []
    assert checks.too_little(60, 3, 600, {"cache": 200}) == []


def test_the_writer_writes_each_kind_and_its_versions_only_grow() -> None:
    rows = first_rows()
    plan = Plan(random.Random(7))
    last = dict[tuple[str, int], int]()
    kinds = set[str]()
    for number in range(1, 3000):
        kind, changes = plan.next(number, rows)
        kinds.add(kind)
        for table, key, row in changes:
            if row and "ver" in row:
                assert row["ver"] > last.get((table, key), -1)
                last[table, key] = row["ver"]
        apply(rows, changes)
    assert kinds == set(KINDS)
    assert sum(row["balance"] for row in rows["accounts"].values()) == TOTAL
    assert any(row["balance"] < 0 for row in rows["accounts"].values())


def lose_a_row(rows: dict[str, Any]) -> None:
    rows["items"].popitem()


def keep_a_deleted_row(rows: dict[str, Any]) -> None:
    rows["items"]["9999"] = {"id": 9999}


def write_half_a_transfer(rows: dict[str, Any]) -> None:
    rows["accounts"]["1"]["balance"] += 1


def blank_a_wide_value(rows: dict[str, Any]) -> None:
    row = next(row for row in rows["items"].values() if row["wide"])
    row["wide"] = None


@pytest.mark.parametrize(
    ("plant", "table", "found"),
    [
        (lose_a_row, "items", "1 rows missing"),
        (keep_a_deleted_row, "items", "1 rows extra: 9999"),
        (write_half_a_transfer, "accounts", "1 rows different: 1"),
        (blank_a_wide_value, "items", "1 rows different"),
    ],
)
def test_a_difference_is_found(
    plant: Callable[[dict[str, Any]], None], table: str, found: str
) -> None:
    """In a view, and in Postgres itself, which then has lost what it acknowledged."""
    rows = written()
    wrong = source_of(rows)
    plant(wrong)
    (in_view,) = checks.differences("cache", wrong[table], source_of(rows)[table])
    (in_source,) = checks.lost_writes(wrong, rows)
    assert found in in_view
    assert found in in_source
    assert bool(checks.wrong_sum("cache", wrong["accounts"], TOTAL)) == (table == "accounts")


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (Seen("cache", "items", 1, 8), "went back from 9 to 8"),
        (Seen("search", "items", 1, 2), "went back from 5 to 2"),
    ],
)
def test_a_version_that_goes_back_is_found(planted: Seen, found: str) -> None:
    (line,) = checks.went_back([*SEEN, planted])
    assert found in line


def test_a_deleted_row_that_comes_back_is_found() -> None:
    seen = [*SEEN, Seen("cache", "items", 1, None), Seen("cache", "items", 1, 9)]
    (line,) = checks.went_back(seen)
    assert "items 1 went back from 9 to 9" in line


@pytest.mark.parametrize(
    ("planted", "shown", "found"),
    [
        (Alert("1", "c", "-5"), ["1", "2"], "1 was raised twice"),
        (Alert("2", "u", "-1"), ["1", "2"], "2 is there twice"),
        (Alert("3", ""), ["1", "2"], "3 was withdrawn without being raised"),
        (Alert("3", "u", "-2"), ["1", "2", "3"], "3 has changed before it was raised"),
        (Alert("2", ""), ["1", "2"], "2 is shown, but was never raised"),
        (Alert("3", "c", "-2"), ["1", "2"], "3 stands, but the view doesn't show it"),
    ],
)
def test_an_alert_that_is_repeated_or_missing_is_found(
    planted: Alert, shown: list[str], found: str
) -> None:
    (line,) = checks.wrong_alerts([*ALERTS, planted], shown)
    assert found in line


@pytest.mark.parametrize(
    ("log", "quarantined", "lag", "found"),
    [
        ("cache read 10 records and accounts for 9.", [], 0, "read 10 records and accounts for 9"),
        (LOG, [{}], 0, "1 records are in quarantine"),
        (LOG, [], 4, "cache's items is 4 records behind"),
    ],
)
def test_a_record_without_account_is_found(
    log: str, quarantined: list[Any], lag: int, found: str
) -> None:
    (line,) = checks.unaccounted(log, quarantined, {"cache's items": lag})
    assert found in line


@pytest.mark.parametrize(
    ("faults", "writes", "polls", "found"),
    [
        (0, 600, 200, "no fault"),
        (3, 100, 200, "only 100 writes"),
        (3, 600, 0, "cache was never read"),
    ],
)
def test_a_run_in_which_nothing_happens_fails(
    faults: int, writes: int, polls: int, found: str
) -> None:
    (line,) = checks.too_little(60, faults, writes, {"cache": polls})
    assert found in line


def test_a_seed_is_a_schedule() -> None:
    names = list(FAULTS)
    first = list(islice(schedule(7, names), 100))
    assert first == list(islice(schedule(7, names), 100))
    assert first != list(islice(schedule(8, names), 100))
    fired = [name for step, _ in first for name in step][: len(names)]
    assert sorted(fired) == sorted(names)
    assert any(len(step) == 2 for step, _ in first)
    assert not any(len(step) == 2 and set(step) & BY_HAND.keys() for step, _ in first)


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):
            while data := self.request.recv(100):
                self.request.sendall(data)


@pytest.fixture
def link() -> Iterator[Link]:
    """A link to a server that answers each message with the same."""
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server,
        links(("echo",), 1) as made,
    ):
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made["echo"].target = server.server_address[1]
        yield made["echo"]
        server.shutdown()


def client(link: Link) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", link.port))
    connection.settimeout(0.3)
    return connection


def test_a_link_passes_on_what_it_has_held_back(link: Link) -> None:
    with client(link) as connection:
        connection.sendall(b"a")
        assert connection.recv(10) == b"a"
        for disturbance in (Disturbance.CUT, Disturbance.ONE_WAY):
            with link.disturbed(disturbance):
                connection.sendall(b"b")
                with pytest.raises(TimeoutError):
                    connection.recv(10)
            connection.settimeout(20)
            assert connection.recv(10) == b"b"
            connection.settimeout(0.3)


def test_a_link_delays(link: Link) -> None:
    with client(link) as connection, link.disturbed(Disturbance.DELAY):
        connection.settimeout(20)
        began = time.monotonic()
        connection.sendall(b"a")
        assert connection.recv(10) == b"a"
        assert time.monotonic() - began >= 2 * DELAY_S


def test_a_link_resets_open_and_new_connections(link: Link) -> None:
    with client(link) as connection:
        connection.settimeout(20)
        connection.sendall(b"a")
        assert connection.recv(10) == b"a"
        with link.disturbed(Disturbance.RESET):
            with pytest.raises(ConnectionError):
                connection.recv(10)
            with client(link) as another, pytest.raises(ConnectionError):
                _exchange(another)


def _exchange(connection: socket.socket) -> None:
    connection.settimeout(20)
    # The first may be sent before the reset has arrived.
    for _ in range(2):
        connection.sendall(b"a")
        connection.recv(10)


def test_a_link_drops_some_answers(link: Link) -> None:
    lost = 0
    with link.disturbed(Disturbance.NO_ANSWER):
        for _ in range(100):
            with client(link) as connection:
                connection.settimeout(20)
                connection.sendall(b"a")
                try:
                    lost += connection.recv(10) != b"a"
                except ConnectionError:
                    lost += 1
    assert 0 < lost < 50
