"""The whole pipeline from an empty machine: `make demo`. KEEP=1 leaves it running.

Each step is a verb of the command line, so that what is shown here is what a user does.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import httpx
import psutil
import psycopg
import pyarrow as pa
import redis
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from cdc.cli.console import print_error
from cdc.compose import artifacts, stack
from cdc.errors import CdcError, DivergenceError, SinkError, SinkUnavailable
from cdc.runtime.context import Context
from cdc.sample.load import load
from cdc.sample.plan import Change
from cdc.sample.probe import Probe, delta_watch, elasticsearch_watch, redis_watch
from cdc.sample.replay import Replayed, replay
from cdc.sink.contract import Sink
from cdc.sink.factory import open_clocks, state_reader
from cdc.verify import barrier
from cdc.verify.comparison import Comparison
from cdc.verify.verification import compare

PIPELINE = Path(__file__).parent / "airport.yaml"
LOADED = (date(2013, 1, 1), date(2013, 1, 31))
REPLAYED = (date(2013, 2, 1), date(2013, 2, 3))
RATE = 300.0
CAUGHT_UP_S = 120.0
WATCHED = "public.flights"
ROW_DOCUMENTS = ("flight_docs", "airport_docs")
"""Views with a document for each row of their root."""
AIRPORTS = ("EWR", "JFK", "LGA")
ALERTS = ("knock_on", "late_aircraft", "overdue")
ARRIVE = """
UPDATE public.flights SET arr_time = dep_time + interval '8 hours', updated_at = clock_timestamp()
WHERE (carrier, flight, origin, sched_dep) = (
    SELECT carrier, flight, origin, sched_dep FROM public.flights
    WHERE arr_time IS NULL AND dep_time < (SELECT max(dep_time) - interval '12 hours' FROM public.flights)
    ORDER BY dep_time DESC LIMIT 1)
RETURNING carrier, flight, origin, dest
"""
BUSIEST = "SELECT carrier, count(*), round(avg(arr_delay), 1) FROM flights GROUP BY 1 ORDER BY 2 DESC LIMIT 3"
READ_MIRROR = (
    'deltalake.QueryBuilder().register("flights", DeltaTable(".../public.flights/mirror"))'
)
"""A call that reads every mirror, with deletion vectors or without."""
console = Console(highlight=False)


class Demo:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.began = time.monotonic()
        self.run: subprocess.Popen[bytes] | None = None

    def step(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self.began:5.0f} s[/]  [bold]{text}[/]")

    def play(self) -> int:
        """Play the whole demo; return 0 when every view equals the source, 1 otherwise."""
        self.step("starting Postgres, Kafka, Connect, Elasticsearch and Valkey")
        stack.up(self.state, progress=lambda line: console.print(f"         [dim]{line}[/]"))
        self.context = Context(PIPELINE, self.state)
        self.pipeline = self.context.load()
        self.dsn = self.pipeline.source.dsn
        self.step("migrating: control schema, role, publication, the sample's tables")
        self.verb("migrate", "--sample")
        self.step("loading January 2013 as rows that were there before")
        loaded = load(self.dsn, *LOADED)
        console.print(
            "         " + ", ".join(f"{rows:,} {table}" for table, rows in loaded.items())
        )
        self.step("registering the connector; it takes a snapshot")
        self.verb("register")
        self.tables = self.context.select_views(None)
        self.sinks = self.context.sinks(None)
        self.step("applying tables and documents to three sinks: cdc run")
        self.start_run()
        # How many documents the other views have isn't known before.
        documents = [self.pipeline.views[name].root.rpartition(".")[2] for name in ROW_DOCUMENTS]
        self.snapshot(sum(loaded.values()) + sum(loaded[table] for table in documents))
        self.step(
            f"replaying {REPLAYED[0]:%d} to {REPLAYED[1]:%d %B} live at {RATE:g} transactions/s"
        )
        result, probe = self.live()
        self.withdrawn = self.arrive()
        self.step("waiting until the views hold everything")
        began = time.monotonic()
        options = barrier.WaitOptions(CAUGHT_UP_S, report=lambda _: self.running())
        barrier.wait_until_current(self.pipeline, self.tables, self.sinks, options)
        console.print(f"         after {time.monotonic() - began:.1f} s")
        self.stop_run()
        self.step("verifying: every row and column of every view against Postgres")
        comparisons = self.verify()
        read_late = state_reader(self.pipeline, lambda state: state.late("arrivals_by_hour"))
        self.late = len(read_late())
        show_views(comparisons)
        show_latency(result, probe)
        show_reads(self)
        wrong = [comparison for comparison in comparisons if not comparison.equal]
        if wrong:
            raise DivergenceError(
                f"{len(wrong)} views differ from Postgres.", hint="see the table above"
            )
        return 0

    def verb(self, *words: str) -> None:
        """Run a verb of the command line as a user would; its error is the demo's."""
        process = subprocess.run(self.command(*words), check=False, stdout=subprocess.DEVNULL)
        if process.returncode:
            sys.exit(process.returncode)

    def command(self, *words: str) -> list[str]:
        options = ["-p", str(PIPELINE), "--state", str(self.state)]
        return [sys.executable, "-m", "cdc.entry", *options, *words]

    def start_run(self) -> None:
        with (self.state / "run.log").open("ab") as log:
            self.run = subprocess.Popen(
                self.command("run"), stdout=log, stderr=log, start_new_session=True
            )

    def running(self) -> None:
        if self.run is not None and self.run.poll() is not None:
            lines = (self.state / "run.log").read_text(errors="replace").splitlines()[-12:]
            raise SinkError(
                "cdc run has ended: " + " / ".join(lines), hint=f"see {self.state / 'run.log'}"
            )

    def stop_run(self) -> None:
        if self.run is not None:
            self.run.send_signal(signal.SIGTERM)
            try:
                self.run.wait(60)
            except subprocess.TimeoutExpired:
                # On a machine with much else to do; its workers are in its session.
                os.killpg(self.run.pid, signal.SIGKILL)
                self.run.wait()
            self.run = None

    def snapshot(self, total: int) -> None:
        """Show how the snapshot's rows, and the documents made of them, reach each sink."""
        columns = (
            TextColumn("         {task.description:<10}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as bars:
            tasks = {sink.name: bars.add_task(sink.name, total=total) for sink in self.sinks}
            while not bars.finished:
                self.running()
                for sink in self.sinks:
                    bars.update(tasks[sink.name], completed=min(total, self.applied(sink)))
                time.sleep(0.5)

    def applied(self, sink: Sink) -> int:
        try:
            stored = [sink.position(table) for table in self.tables if table.is_in(sink.name)]
        except SinkUnavailable:
            # What holds the positions may just be in the making.
            return 0
        return sum(position.rows for position in stored if position)

    def live(self) -> tuple[Replayed, Probe]:
        sinks: Mapping[str, Any] = self.pipeline.sinks
        search = sinks["search"]
        cache = sinks["cache"]
        watches = {
            "search": elasticsearch_watch(search.url, self.pipeline.pipeline, WATCHED),
            "cache": redis_watch(cache.url, cache.prefix, WATCHED),
            "warehouse": delta_watch(sinks["warehouse"].path, WATCHED),
        }
        moving = Moving(self)

        def on_commit(change: Change, committed_at: datetime) -> None:
            probe.on_commit(change, committed_at)
            moving.on_commit(change)

        with Probe(self.dsn, watches) as probe:
            with Live(get_renderable=moving.draw, console=console, refresh_per_second=2):
                result = replay(self.dsn, *REPLAYED, rate=RATE, on_commit=on_commit)
            if not console.is_terminal:
                console.line()
            end = time.monotonic() + 15
            while any(watch.pending for watch in watches.values()) and time.monotonic() < end:
                time.sleep(0.1)
        return result, probe

    def arrive(self) -> str:
        """Let a flight that never arrived arrive after all, as its airline would; return its name."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(ARRIVE).fetchone()
        assert row is not None
        return "{} {} {}-{}".format(*row)

    def verify(self) -> list[Comparison]:
        from cdc.spark.session import session

        modules = [*self.context.executors([sink.name for sink in self.sinks]), "cdc.verify.census"]
        spark = session("local[*]", artifacts.spark_jars(), modules=modules)
        clocks = open_clocks(self.pipeline)().noted
        comparisons = compare(spark, self.tables, self.dsn, self.sinks, clocks)
        spark.stop()
        return comparisons

    def busiest(self) -> list[Any]:
        """Read the mirror of the flights as an application would, with a call that supports deletion
        vectors.
        """
        path = f"{self.pipeline.sinks['warehouse'].path}/public.flights/mirror"  # type: ignore[attr-defined]
        query = deltalake.QueryBuilder().register("flights", deltalake.DeltaTable(path))
        rows = pa.table(query.execute(BUSIEST).read_all())
        return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))

    def find(
        self, view: str, query: Mapping[str, Any] | None = None, most: str | None = None
    ) -> "Found":
        """Search an index as an application would, those first that have `most` of a column."""
        search: Any = self.pipeline.sinks["search"]
        body = {
            "query": query or {"match_all": {}},
            "size": 3,
            "track_total_hits": True,
            "sort": [{most: {"order": "desc"}}] if most else [],
        }
        url = f"{search.url}/{self.pipeline.pipeline}-{view}/_search"
        hits = httpx.post(url, json=body).raise_for_status().json()["hits"]
        rows = [hit["_source"] for hit in hits["hits"]]
        return Found(rows, [hit["_id"] for hit in hits["hits"]], hits["total"]["value"])


class Moving:
    """What applications see while the replay runs: delays in the last hour, read from the cache, and
    numbers of alerts, read from the index.
    """

    def __init__(self, demo: Demo) -> None:
        cache: Any = demo.pipeline.sinks["cache"]
        self._prefix = f"{cache.prefix}:view.delay_by_airport"
        self._cache = redis.Redis.from_url(cache.url)
        self._demo = demo
        self._latest = datetime.combine(REPLAYED[0], datetime.min.time(), UTC)

    def on_commit(self, change: Change) -> None:
        """Note the time of the newest departure."""
        departure = change.values.get("dep_time") if change.table == "flights" else None
        if isinstance(departure, datetime):
            self._latest = max(self._latest, departure.astimezone(UTC))

    def draw(self) -> Grid:
        """Draw both as they are now."""
        grid = Grid(box=None, padding=(0, 1), pad_edge=False, show_header=False)
        begin, rows = self._newest_window()
        for origin in AIRPORTS:
            row = rows.get(origin, {"flights": 0, "late": 0, "mean_delay": 0})
            mean = float(row["mean_delay"] or 0)
            text = f"{row['flights']:3} flights, {row['late']:2} late, {mean:3.0f} min"
            bar = "█" * min(20, round(mean / 5))
            grid.add_row(f"         {begin:%d %b %H:%M} {origin}", text, f"[red]{bar}[/]")
        search: Any = self._demo.pipeline.sinks["search"]
        counts = []
        for view in ALERTS:
            url = f"{search.url}/{self._demo.pipeline.pipeline}-view.{view}/_count"
            counts.append(f"{httpx.get(url).json().get('count', 0):,} {view}")
        grid.add_row("         alerts", ", ".join(counts))
        return grid

    def _newest_window(self) -> tuple[datetime, dict[str, Any]]:
        """Find the newest hour that the cache has of any airport: its beginning, and its documents."""
        minute = self._latest.minute // 10 * 10
        newest = self._latest.replace(minute=minute, second=0, microsecond=0)
        # A day of the replay goes by in ten seconds, and the views may be some seconds behind.
        begins = [newest - number * timedelta(minutes=10) for number in range(5, 3 * 24 * 6)]
        ids = [f"{begin:%Y-%m-%dT%H:%M:%S}.000000Z" for begin in begins]
        keys = [f'{self._prefix}:["{origin}","{text}"]' for text in ids for origin in AIRPORTS]
        documents = iter(self._cache.mget(keys))
        for begin in begins:
            texts = {origin: next(documents) for origin in AIRPORTS}
            rows = {origin: json.loads(text) for origin, text in texts.items() if text}
            if rows:
                return begin, rows
        return newest, {}


def show_views(comparisons: Sequence[Comparison]) -> None:
    grid = Grid(
        title="\nEvery view against Postgres", box=None, title_justify="left", title_style="bold"
    )
    for heading, side in (("table", "left"), ("view", "left"), ("source rows", "right"), ("view rows", "right"),
                          ("differences", "right")):  # fmt: skip
        grid.add_column(heading, justify=side)  # type: ignore[arg-type]
    for comparison in comparisons:
        wrong = comparison.missing + comparison.extra + comparison.different
        colour = "red" if wrong else "green"
        grid.add_row(
            comparison.table,
            comparison.sink,
            f"{comparison.source_rows:,}",
            f"{comparison.view_rows:,}",
            f"[{colour}]{wrong}[/]",
        )
    console.print(grid)
    for comparison in comparisons:
        if comparison.closed:
            console.print(
                f" {comparison.table} in {comparison.sink}: {comparison.closed:,} closed windows,"
                " not compared"
            )


def show_latency(result: Replayed, probe: Probe) -> None:
    console.print(
        f"\n[bold]Commit to visible[/], during {result.transactions:,} transactions at {result.rate:.0f}/s"
        f" ({', '.join(f'{count:,} {kind}' for kind, count in sorted(result.by_kind.items()))})"
    )
    grid = Grid(box=None)
    for heading in ("view", "p50", "p95", "p99", "rows watched"):
        grid.add_column(heading, justify="left" if heading == "view" else "right")
    for name, watch in probe.watches.items():
        if watch.latencies:
            shown = [f"{watch.percentile(share):.2f} s" for share in (0.5, 0.95, 0.99)]
            grid.add_row(name, *shown, str(len(watch.latencies)))
    console.print(grid)


def show_reads(demo: Demo) -> None:
    """Print one read per view, as an application would make it."""
    airports = demo.find("public.airports", {"match": {"name": "kennedy"}})
    windy = [
        {"match": {"plane.manufacturer": "airbus"}},
        {"range": {"weather.wind_speed": {"gte": 25}}},
    ]
    flights = demo.find("view.flight_docs", {"bool": {"filter": windy}})
    late = [
        {"term": {"departures.dest.keyword": "BOS"}},
        {"range": {"departures.dep_delay": {"gte": 15}}},
    ]
    departures = {"path": "departures", "query": {"bool": {"filter": late}}}
    origins = demo.find("view.airport_docs", {"nested": departures})
    infected = demo.find("view.knock_on", {"range": {"dep_delay": {"gte": 120}}}, "dep_time")
    repeated = demo.find("view.late_aircraft", most="dep_time")
    overdue = demo.find("view.overdue", most="dep_time")
    busy = {"range": {"flights": {"gte": 10}}}
    worst = demo.find("view.delay_by_airport", busy, "mean_delay")
    runs = demo.find("view.disruptions", most="minutes")
    hours = demo.find("view.departures_by_hour", most="flights")
    recorded = demo.find("view.recorded_by_hour", most="flights")
    closed = demo.find("view.arrivals_by_hour", {"term": {"final": True}})
    key = f"{demo.pipeline.pipeline}:public.planes:N14228"
    cache: Any = demo.pipeline.sinks["cache"]
    plane = redis.Redis.from_url(cache.url, decode_responses=True).get(key)
    console.print("\n[bold]One read of each[/]")
    names = ", ".join(row["name"] for row in airports.rows)
    late_names = ", ".join(sorted(origins.ids))
    console.print(
        f"search     airports named kennedy: {names}\n"
        f"           flights of an Airbus in winds over 25 mph: {flights.total:,}\n"
        f"           airports with a late one to Boston in their last 50: {late_names or 'none'}\n"
        f"windows    {worst.first(worst_hour)}\n"
        f"           {runs.first(partial(longest_run, runs.total))}\n"
        f"           departures in {hours.total:,} hours by their time, {hours.first(fullest)}\n"
        f"           in {recorded.total:,} by when they were recorded, {recorded.first(fullest)}\n"
        f"           {closed.total:,} hours of arrivals are closed;"
        f" changes that came too late: {demo.late:,}\n"
        f"alerts     two hours late after a late plane: {infected.total:,},"
        f" the last {infected.first(flight)}\n"
        f"           late for the third time in a row: {repeated.total:,},"
        f" the last {repeated.first(flight)}\n"
        f"           left 12 hours ago, never arrived: {overdue.total:,},"
        f" the last {overdue.first(flight)}\n"
        f"           withdrawn, since it arrived after all: {demo.withdrawn}"
    )
    console.print(f"cache      GET {key}\n           {str(plane)[:66]}...")
    busiest = ", ".join(f"{carrier} {n:,}, {mean}" for carrier, n, mean in demo.busiest())
    console.print(f"warehouse  flights, minutes late: {busiest}")
    console.print(f"           {READ_MIRROR}", markup=False)


@dataclass(frozen=True)
class Found:
    """Documents that a search has found, three at most, their ids, and the number of all."""

    rows: list[dict[str, Any]]
    ids: list[str]
    total: int

    def first(self, describe: Callable[[dict[str, Any]], str]) -> str:
        return describe(self.rows[0]) if self.rows else "none"


def worst_hour(window: Mapping[str, Any]) -> str:
    begin = window["window_start"].replace("T", " ")[:16]
    return (
        f"the worst hour begins {begin} in {window['origin']}:"
        f" {window['late']} of {window['flights']} late, {float(window['mean_delay']):.0f} min"
    )


def longest_run(count: int, session: Mapping[str, Any]) -> str:
    begin = datetime.fromisoformat(session["window_start"])
    end = datetime.fromisoformat(session["window_end"])
    return (
        f"the longest of {count} disruptions: {session['origin']} {begin:%d %b %H:%M}"
        f" to {end:%H:%M}, {session['flights']} flights"
    )


def fullest(window: Mapping[str, Any]) -> str:
    return f"at most {window['flights']:,} in one"


def flight(row: Mapping[str, Any]) -> str:
    return f"{row['carrier']} {row['flight']} {row['origin']}-{row['dest']}"


def show_next(demo: Demo) -> None:
    endpoints = stack.running(demo.state)
    assert endpoints
    console.print("\n[bold]It goes on running.[/] Look around:")
    console.print(f"  .venv/bin/cdc -p sample/airport.yaml --state {demo.state} status")
    console.print(
        f"  psql {endpoints.postgres} -c \"UPDATE airlines SET name = 'Hello' WHERE carrier = 'UA'\""
    )
    console.print(f"  curl {endpoints.elasticsearch}/airport-public.airlines/_doc/UA")
    console.print(
        f"  kill {demo.run.pid if demo.run else ''}; .venv/bin/cdc -p sample/airport.yaml --state {demo.state} down"
    )


def end_former(state: Path) -> None:
    """Make room: an earlier demo that was kept, or that died."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "cdc.entry" in words and str(state) in words and "run" in words:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
                process.wait(60)
    stack.down(state, progress=lambda _: None)
    shutil.rmtree(state, ignore_errors=True)


def main() -> int:
    # Ended from outside, it stops its servers as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    state = stack.state_dir("airport").with_name("demo")
    end_former(state)
    demo = Demo(state)
    keep = os.environ.get("KEEP") == "1"
    try:
        code = demo.play()
        if keep:
            demo.start_run()
            show_next(demo)
        else:
            console.print(
                '\nWhere to look next: KEEP=1 make demo leaves it running; README.md, "Your own tables".'
            )
        return code
    except CdcError as error:
        print_error(error)
        return error.exit_code
    except psycopg.Error as error:
        print_error(
            SinkError(f"Postgres: {error}", hint="see the log of postgres in the state folder")
        )
        return 4
    finally:
        if not keep or sys.exc_info()[0]:
            demo.stop_run()
            stack.down(state, progress=lambda _: None)
            console.print(f"[dim]stopped everything after {time.monotonic() - demo.began:.0f} s[/]")


if __name__ == "__main__":
    sys.exit(main())
