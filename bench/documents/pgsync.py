"""A rival for documents: PGSync, which asks Postgres for each changed document and puts it into an
index. It is measured where it is installed: `python -m bench.documents.pgsync` does that, in an environment of
its own.

Its documents have three of our five members: it joins neither by an expression nor one table twice.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import psycopg

from bench.documents.flights import Flights
from bench.stage import Stage
from cdc.compose import artifacts
from cdc.errors import DivergenceError
from cdc.sample.probe import Watch, elasticsearch_watch

VERSION = "7.3.0"
HOME = artifacts.cache_dir() / f"pgsync-{VERSION}"
LIMIT_S = 180.0
"""The longest time that one of its commands may take. 20,000 documents take it some 20 s; it has
stood still for six minutes, too.
"""
INDEX = "pgsync-flights"
MEMBERS = {
    "airlines": ("carrier", "carrier", ["name"]),
    "planes": ("tailnum", "tailnum", ["manufacturer", "model", "seats", "year"]),
    "airports": ("origin", "faa", ["name", "tzone"]),
}
"""By table: the column of a flight, the one that equals it, and what is shown."""


class Rates(NamedTuple):
    """What it does in a second: documents when it begins, changed rows, changed keys. A value each,
    or none.
    """

    bootstrap: list[float] = []
    rows: list[float] = []
    keys: list[float] = []


class PGSync:
    """Its programs, with the documents of a table of flights. Use as a context manager."""

    def __init__(self, stage: Stage, flights: Flights) -> None:
        self._stage, self._flights = stage, flights
        self._folder = stage.folder / "pgsync"
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PG_URL": stage.dsn,
            "ELASTICSEARCH_URL": stage.endpoints.elasticsearch,
            # Its client for Elasticsearch asks for `GET /`, which a server without the module for it
            # refuses; the other one speaks to any.
            "ELASTICSEARCH": "false",
            "OPENSEARCH": "true",
            "REDIS_URL": stage.endpoints.redis.rpartition("/")[0] + "/9",
            "CHECKPOINT_PATH": str(self._folder),
        }

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured."""
        return (HOME / "bin" / "pgsync").exists()

    def __enter__(self) -> "PGSync":
        self._folder.mkdir()
        with psycopg.connect(self._stage.dsn) as connection:
            database = connection.info.dbname
        children = [
            {
                "table": name,
                "schema": "desk",
                "columns": columns,
                "relationship": {
                    "variant": "object",
                    "type": "one_to_one",
                    "foreign_key": {"parent": [parent], "child": [child]},
                },
            }
            for name, (parent, child, columns) in MEMBERS.items()
        ]
        root = {"table": self._flights.table.partition(".")[2], "schema": "desk"}
        nodes = {**root, "children": children}
        schema = [{"database": database, "index": INDEX, "nodes": nodes}]
        (self._folder / "schema.json").write_bytes(orjson.dumps(schema))
        self._run("bootstrap")
        return self

    def __exit__(self, *_: object) -> None:
        self._run("bootstrap", "--teardown")
        httpx.delete(f"{self._stage.endpoints.elasticsearch}/{INDEX}", timeout=60)

    def catch_up(self) -> float:
        """Bring the index up to date; the seconds it took."""
        began = time.monotonic()
        self._run("pgsync")
        return time.monotonic() - began

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Follow Postgres; yields a watch of the index, by the ids that it has there."""
        command = [*self._command("pgsync"), "--daemon"]
        quiet = subprocess.DEVNULL
        url = self._stage.endpoints.elasticsearch
        with subprocess.Popen(
            command, env=self._environment, cwd=self._folder, stdout=quiet, stderr=quiet
        ) as process:
            try:
                yield elasticsearch_watch(url, *INDEX.split("-"))
            finally:
                process.terminate()

    def check(self) -> None:
        """Raise DivergenceError unless the index has a document for each flight."""
        url = f"{self._stage.endpoints.elasticsearch}/{INDEX}"
        httpx.post(f"{url}/_refresh", timeout=60).raise_for_status()
        documents = httpx.get(f"{url}/_count").raise_for_status().json()["count"]
        if documents != self._flights.rows:
            raise DivergenceError(
                f"PGSync's index has {documents} of {self._flights.rows} documents.",
                hint="a bug in bench/documents/pgsync.py",
            )

    def _command(self, program: str) -> list[str | Path]:
        return [HOME / "bin" / program, "--config", self._folder / "schema.json"]

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [*self._command(program), *words],
            env=self._environment,
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )


def identity(key: list[Any]) -> str:
    """Return the id of a document in its index, from the key of a flight as it is in the topics."""
    *parts, departure = key
    return "|".join([*map(str, parts), str(departure).replace(".000000Z", "+00:00")])


def measure(pgsync: PGSync, flights: Flights, changes: int) -> Rates:
    """Measure how quickly it begins, and catches up with changes that were written while it stood
    still. The time of a start with nothing to do doesn't count.
    """
    first = pgsync.catch_up()
    pgsync.check()
    start = pgsync.catch_up()
    seconds = []
    for moved in (False, True):
        flights.change(changes, moved=moved)
        seconds.append(pgsync.catch_up() - start)
    pgsync.check()
    drained = ([changes / drain_s] for drain_s in seconds)
    return Rates([flights.rows / (first - start)], *drained)


def main() -> None:
    """Install it."""
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    subprocess.run([HOME / "bin" / "pip", "install", f"pgsync=={VERSION}"], check=True)


if __name__ == "__main__":
    main()
