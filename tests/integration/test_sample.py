"""Loading and replaying the sample on a real Postgres."""

import json
import math
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc import sample
from cdc.compose.stack_state import Endpoints
from cdc.config import settings
from cdc.documents.tables import view_tables
from cdc.errors import SourceError
from cdc.migrations import SAMPLE, migrate
from cdc.postgres import source, table_survey
from cdc.postgres.row_query import row_query
from cdc.sample import load, replay
from cdc.sample.plan import KEYS, plan
from tests.support.postgres import sibling

DAY = date(2013, 2, 9)  # after a snow storm: a third of the flights are cancelled
WEEK = date(2013, 1, 1), date(2013, 1, 7)
COLUMNS = {
    "flights": "carrier, flight, origin, sched_dep, dest, tailnum, dep_time, dep_delay, sched_arr, arr_time,"
    " arr_delay, air_time, distance, status, remark, on_time",
    "weather": "origin, time_hour, temp, dewp, humid, wind_dir, wind_speed, wind_gust, precip, pressure, visib",
    "planes": "tailnum, seats, engine",
    "airlines": "carrier, name",
}
LATE_ROWS = """
SELECT carrier, flight FROM (
    SELECT *, min(dep_delay) OVER three AS least, first_value(dep_time) OVER three AS first, count(*) OVER three AS n
    FROM flights WHERE dep_time IS NOT NULL AND tailnum IS NOT NULL
    WINDOW three AS (PARTITION BY tailnum ORDER BY dep_time ROWS 2 PRECEDING)
) AS departed WHERE n = 3 AND least > 30 AND dep_time - first <= interval '24 hours'
"""
"""Departures after which a plane has left late three times in a row, without joins."""
Contents = dict[str, list[tuple[Any, ...]]]


@pytest.fixture
def airport(postgres_dsn: str) -> str:
    """The DSN of a database with the sample schema, empty."""
    with psycopg.connect(postgres_dsn) as conn:
        migrate(conn, SAMPLE)
    return postgres_dsn


def rows(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as conn:
        conn.execute("SET TIME ZONE 'UTC'")
        return conn.execute(query.encode()).fetchall()


def contents(dsn: str) -> Contents:
    """Return all values that a replay decides: every column but updated_at."""
    return {
        table: rows(dsn, f"SELECT {columns} FROM {table} ORDER BY {', '.join(KEYS[table])}")
        for table, columns in COLUMNS.items()
    }


def test_the_sample_has_documents_of_flights_and_airports(airport: str) -> None:
    load.load(airport, date(2013, 1, 1), date(2013, 1, 2))
    path = Path(sample.__path__[0]) / "airport.yaml"
    servers = Endpoints(
        airport,
        "127.0.0.1:1",
        "http://127.0.0.1:1",
        "http://127.0.0.1:1",
        "redis://127.0.0.1:1/0",
        "/x",
        "/x",
    )
    pipeline = settings.load(path, servers.environment())
    with source.connect(airport) as conn:
        views = view_tables(pipeline, table_survey.describe(conn, pipeline))
        conn.execute("SET statement_timeout = '120s'")
        conn.execute("SET cdc.now_overdue = '2013-01-04Z'")
        conn.execute("SET cdc.now_arrivals_by_hour = '2013-01-02Z'")
        rows = {
            view.name: {key: json.loads(text) for key, text in conn.execute(row_query(view))}
            for view in views
        }
        late_rows = conn.execute(LATE_ROWS.encode()).fetchall()
    documents = list(rows["flight_docs"].values())
    boards = rows["airport_docs"]
    windows = list(rows["delay_by_airport"].values())
    alerts = list(rows["knock_on"].values())
    late = list(rows["late_aircraft"].values())
    lost = list(rows["overdue"].values())
    hours = list(rows["departures_by_hour"].values())
    runs = list(rows["disruptions"].values())
    arrivals = list(rows["arrivals_by_hour"].values())
    assert len(documents) == sum(board["flights"] for board in boards.values()) > 1500
    assert len(boards["JFK"]["departures"]) == 50
    assert {document["airline"] for document in documents} > {"United Air Lines Inc."}
    assert sum(document["weather"] is not None for document in documents) > 0.9 * len(documents)
    departed = sum(document["dep_time"] is not None for document in documents)
    assert sum(hour["flights"] for hour in hours) == departed
    assert all(run["flights"] >= 5 and run["minutes"] > 300 for run in runs)
    assert runs
    # Windows that are closed by then aren't compared.
    assert 0 < sum(hour["arrived"] for hour in arrivals) < departed
    # Each departure is in six windows.
    assert sum(window["flights"] for window in windows) == 6 * departed
    assert 0 < len(alerts) < 100
    assert all(alert["inbound"]["arr_delay"] > 30 < alert["dep_delay"] for alert in alerts)
    assert {(alert["carrier"], alert["flight"]) for alert in late} == set(late_rows)
    assert len(late) == len(late_rows) > 0
    assert all(alert["airline"] and len(alert["late"]) == 2 for alert in late)
    assert all(alert["dep_time"] < "2013-01-03T12:00" for alert in lost)


# Loading


def test_january_is_loaded_whole_and_once(airport: str) -> None:
    assert load.load(airport, date(2013, 1, 1), date(2013, 1, 31)) == {
        "airlines": 16,
        "airports": 1_458,
        "planes": 3_322,
        "weather": 2_226,
        "flights": 27_004,
    }
    assert rows(airport, "SELECT status, count(*) FROM flights GROUP BY 1 ORDER BY 1") == [
        ("arrived", 26_468),
        ("cancelled", 536),
    ]
    second_load = load.load(airport, date(2013, 1, 31), date(2013, 2, 1))
    assert second_load["flights"] == 926
    assert (second_load["airlines"], second_load["planes"]) == (0, 0)


def test_loaded_rows_say_what_the_data_says(airport: str) -> None:
    load.load(airport, *WEEK)
    (first,) = rows(airport, "SELECT * FROM flights WHERE (carrier, flight) = ('UA', 1545) LIMIT 1")
    *values, updated_at = first
    assert values == [
        "UA", 1545, "EWR", datetime(2013, 1, 1, 10, 15, tzinfo=UTC), "IAH", "N14228",
        datetime(2013, 1, 1, 10, 17, tzinfo=UTC), 2, datetime(2013, 1, 1, 14, 19, tzinfo=UTC),
        datetime(2013, 1, 1, 14, 30, tzinfo=UTC), 11, 227, 1400, "arrived", None, True,
    ]  # fmt: skip
    assert updated_at is not None
    (hour,) = rows(
        airport,
        "SELECT temp, wind_speed, wind_gust, pressure FROM weather ORDER BY time_hour, origin LIMIT 1",
    )
    assert [str(value) for value in hour] == ["39.02", "10.35702", "None", "1012.0"]
    assert rows(airport, "SELECT count(*) FROM airports WHERE tzone IS NULL") == [(3,)]


def test_a_database_without_the_schema_is_named(postgres_dsn: str) -> None:
    with pytest.raises(SourceError, match="lacks the sample schema") as caught:
        load.load(postgres_dsn, DAY, DAY)
    assert "migrate --sample" in caught.value.hint
    with pytest.raises(SourceError, match="lacks the sample schema"):
        replay.replay(postgres_dsn, DAY, DAY)


# Replaying


def test_the_seed_alone_decides_the_outcome(airport: str) -> None:
    """Three times the same day, as fast as it goes: connections run in parallel, rows end the same."""
    outcomes = []
    with sibling(airport) as second, sibling(airport) as third:
        for dsn, connections, seed in ((airport, 1, 7), (second, 5, 7), (third, 5, 8)):
            with psycopg.connect(dsn) as conn:
                migrate(conn, SAMPLE)
            load.load(dsn, date(2013, 2, 8), date(2013, 2, 8))
            replay.replay(dsn, DAY, DAY, rate=math.inf, seed=seed, connections=connections)
            outcomes.append(contents(dsn))
    assert outcomes[0]["flights"]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


def test_every_transaction_of_the_plan_is_committed(airport: str) -> None:
    """The oracle is the plan itself, run on a dict."""
    result = replay.replay(airport, DAY, DAY, rate=math.inf)
    steps = plan(DAY, DAY, seed=1)
    assert result.by_kind == Counter(step.kind for step in steps)
    model: dict[tuple[Any, ...], dict[str, Any]] = {}
    for change in (
        change for step in steps for change in step.changes if change.table == "flights"
    ):
        row = model.pop(change.key, {})
        if change.op != "delete":
            model[change.key_after] = row | change.values
    names = COLUMNS["flights"].replace(",", "").split()
    expected = [tuple(model[key][name] for name in names) for key in sorted(model)]
    assert sorted(contents(airport)["flights"], key=lambda row: row[:4]) == expected


def test_days_that_are_there_are_not_replayed_again(airport: str) -> None:
    load.load(airport, DAY, DAY)
    rows = contents(airport)
    with pytest.raises(SourceError, match="in the database already") as caught:
        replay.replay(airport, date(2013, 2, 8), DAY)
    assert caught.value.hint == "replay days that come after them"
    assert contents(airport) == rows
