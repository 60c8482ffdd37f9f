"""W9: the sample's days as its application would write them, at rising rates."""

import time
from collections.abc import Iterator
from datetime import date, timedelta

from bench.output.figure import Figure
from bench.paths import equal
from bench.stage import Stage
from bench.workload import Data
from cdc import migrations
from cdc.postgres import source
from cdc.sample.load import load
from cdc.sample.replay import replay

TABLES = [f"public.{name}" for name in ("flights", "airlines", "airports", "planes", "weather")]
LOADED = date(2013, 1, 1)
DAY = 2_500
"""Transactions that a day has at least."""


def replayed(stage: Stage, rates: tuple[float, ...], seconds: float) -> Iterator[Figure]:
    """Measure how late the last row is in the slowest view: much the same from rate to rate, until
    the views can't keep up.
    """
    figures, first = [], LOADED
    with stage.extra_stage("airport", TABLES, _make) as airport, airport.running() as streams:
        for rate in rates:
            transactions = int(rate * seconds)
            first, last = first + timedelta(1), first + timedelta(1 + transactions // DAY)
            began = time.time()
            with airport.meter() as meter:
                result = replay(airport.dsn, first, last, rate=rate, limit=transactions)
                end = airport.durable(streams)
            figure = Figure(
                f"W9 replay at {result.rate:,.0f}/s, last row late",
                "s",
                changes=result.transactions,
            )
            figure.ours.append(end - began - result.seconds)
            figure.costs.append(meter.cost)
            figures.append(figure)
            first = last
        equal(airport, "W9")
    yield from figures


def _make(data: Data) -> None:
    with source.connect(data.dsn) as connection:
        migrations.migrate(connection, migrations.SAMPLE)
    load(data.dsn, LOADED, LOADED)
