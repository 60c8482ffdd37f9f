"""A slot is lost, and a new snapshot makes up for it: readers of the views never miss a row."""

import json
import signal
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING

import psycopg

from cdc.kafka.ledger import Ledger
from cdc.kafka.topics import Topics
from tests.support import readers, writer
from tests.support.shop import Change, read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SETUP = f"""
{writer.TABLE};
CREATE TABLE labels (id int PRIMARY KEY, label text);
{writer.FILL};
INSERT INTO busy VALUES (0, '0', 0, now());
INSERT INTO busy SELECT n, 'gone soon', 1, '2026-02-01' FROM generate_series(10000, 10999) n;
INSERT INTO labels SELECT id, 'label ' || id FROM busy WHERE id % 10 = 0;
"""
VIEWS = """
state: {{type: redis, url: "{state}", prefix: {name}}}
views:
  busy_docs:
    root: public.busy
    columns: [name]
    include:
      label: {{table: public.labels, on: {{id: id}}, flatten: label}}
    to: [search, cache, warehouse]
  alerts:
    root: public.busy
    where: id BETWEEN 1 AND 9 OR id BETWEEN 10000 AND 10009
    alerts: true
    columns: [name]
    to: [search, topic]
  days:
    from: public.busy
    window: {{tumbling: 1 day, time: at}}
    select: {{rows: count(*)}}
    to: [cache, warehouse]
"""
UNSEEN = (
    "DELETE FROM busy WHERE id BETWEEN 10000 AND 10999",
    "INSERT INTO busy VALUES (10500, 'back', 1, '2026-02-01')",
    "DELETE FROM labels WHERE id < 100",
)


def lose_slot(world: "World") -> None:
    with psycopg.connect(world.dsn, autocommit=True) as connection:

        def drop() -> bool:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active",
                [world.name],
            )
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [world.name])
            except psycopg.errors.ObjectInUse:
                return False
            return True

        wait_until(drop, 60, "the slot is dropped", 0.05)


def raised(world: "World") -> dict[int, list[str]]:
    """The ops of each alert's records, in their order; '' for a tombstone."""

    def key(change: Change) -> int:
        return int(change.key["id"])

    changes = sorted(read(world.pipeline.kafka, f"{world.name}.view.alerts"), key=key)
    return {number: [change.op for change in own] for number, own in groupby(changes, key)}


def is_pending(world: "World") -> bool:
    with Topics(world.pipeline.kafka) as topics:
        return bool(Ledger(world.pipeline, topics).read().snapshots)


def test_readers_keep_their_rows_during_a_new_snapshot(world: "World") -> None:
    """Rows that were deleted while there was no slot vanish at its end, from documents, windows and alerts,
    too. No alert is raised again. `cdc run` is killed before it has removed them.
    """
    world.sql(SETUP)
    world.write_file("public.busy", "public.labels")
    world.file.write_text(
        world.file.read_text() + VIEWS.format(name=world.name, state=world.cache[:-1] + "4")
    )
    world.cdc("migrate")
    world.cdc("register")
    index = world.stack.endpoints.elasticsearch
    places = {
        "search": [index, f"{world.name}-public.busy"],
        "cache": [world.cache, f"{world.name}:public.busy:"],
        "warehouse": [str(world.warehouse / "public.busy" / "mirror")],
    }
    with world.process() as run:
        wait_until(world.is_current, 180, "all views", 1)
        assert raised(world) == {key: ["c"] for key in (*range(1, 10), *range(10000, 10010))}
        with readers.reading(places) as readings, ExitStack() as writes:
            writes.enter_context(writer.writing(world.dsn, 50.0))
            lose_slot(world)
            world.sql(*UNSEEN)
            run.send_signal(signal.SIGKILL)
            run.wait(60)
            world.cdc("register", "--new-snapshot", "--yes")
            assert is_pending(world)
            with world.process():
                wait_until(lambda: not is_pending(world), 300, "vanished rows are removed", 0.5)
                writes.close()
                world.verified()
    print(json.dumps({name: [r.polls, r.errors[:1]] for name, r in readings.items()}))
    assert {
        name: (reading.errors, reading.partial) for name, reading in readings.items()
    } == dict.fromkeys(places, ([], []))
    assert all(reading.polls > 20 for reading in readings.values())
    kept = {key: ["c"] for key in range(1, 10)}
    withdrawn = {key: ["c", ""] for key in range(10000, 10010)}
    assert raised(world) == kept | withdrawn
