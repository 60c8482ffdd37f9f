"""Costs of a record in plain Python: microseconds, of the best of many rounds; needs no server.

Run by itself (`python -m bench.decoding`), so that one process is timed.
"""

import json
import sys
import timeit
from collections.abc import Callable

from cdc.codec.record import RecordDecoder
from cdc.codec.table import codec
from cdc.model.table import Column, Table

PLACEHOLDER = "__cdc_unavailable_0123456789abcdef0123456789abcdef"
ROUNDS, RECORDS = 200, 1000
TIMES = ("sched_dep", "dep_time", "arr_time")
ROW = {
    "flight": 1545,
    "carrier": "UA",
    "origin": "EWR",
    "dest": "IAH",
    "tailnum": "N14228",
    "distance": 1400,
}
SOURCE = {
    "version": "3.7.0.Final",
    "connector": "postgresql",
    "name": "airport",
    "ts_ms": 1795499992332,
}
SOURCE |= {
    "snapshot": "false",
    "db": "postgres",
    "sequence": '["26543520","26543600"]',
    "ts_us": 1795499992332123,
}
SOURCE |= {"schema": "public", "table": "flights", "txId": 1234, "lsn": 26543600}


def measured() -> dict[str, float]:
    """Measure a record of 1 kB: its decoding, and its row in every form, passed through or with
    three times converted; microseconds.
    """
    passed = _costs("timestamp with time zone", "2013-01-01T10:15:00.000000Z")
    converted = _costs("timestamp without time zone", 1357034400100000)
    return {f"{name}, passed through": cost for name, cost in passed.items()} | {
        f"{name}, three times converted": cost for name, cost in converted.items()
    }


def _costs(type_: str, time: object) -> dict[str, float]:
    table, key = _table(type_), b'{"flight":1545}'
    record = _record({**ROW, **dict.fromkeys(TIMES, time), "remarks": "x" * 400})
    decoder, rows = RecordDecoder([table], PLACEHOLDER), codec(table)
    row = decoder.decode(table.topic, key, record).row or b""
    return {
        "decoded": _microseconds(lambda: decoder.decode(table.topic, key, record)),
        "document": _microseconds(lambda: rows.document(row)),
        "columns": _microseconds(lambda: rows.values(row)),
    }


def _table(type_: str) -> Table:
    types = {"flight": "integer", "distance": "integer", **dict.fromkeys(TIMES, type_)}
    columns = tuple(Column(name, types.get(name, "text")) for name in (*ROW, *TIMES, "remarks"))
    return Table("public", "flights", columns, ("flight",), "airport.public.flights")


def _record(row: dict[str, object]) -> bytes:
    event = {
        "after": row,
        "source": SOURCE,
        "transaction": None,
        "op": "u",
        "ts_ms": 1795499992400,
    }
    return json.dumps(event, separators=(",", ":")).encode()


def _microseconds(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, number=RECORDS, repeat=ROUNDS)) / RECORDS * 1e6


if __name__ == "__main__":
    for name, microseconds in measured().items():
        sys.stdout.write(f"{name:<35} {microseconds:5.2f} µs\n")
