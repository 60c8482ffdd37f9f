"""The whole state of a pipeline that one version has written, for later ones to go on from.

    python -m tests.support.saved_state        write tests/saved/state-VERSION.tar.xz of this checkout

An archive has the data of every server, the warehouse and the pipeline file; no port, no process, no
log. It is written once per release, and never again: what a release has written doesn't change.
"""

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psycopg

from cdc.compose import stack
from cdc.compose.stack_state import Endpoints
from cdc.kafka.topics import Topics
from tests.support.verbs import run_verb
from tests.support.wait import wait_until

ARCHIVES = Path(__file__).parents[1] / "saved"
FILE = """\
pipeline: saved
source:
  dsn: ${CDC_POSTGRES}
  heartbeat_s: 0.3
  tables:
    - public.customers
    - {table: public.orders, partitions: 2}
    - public.items
    - public.visits
    - public.emptied
sinks:
  search: {type: elasticsearch, url: "${CDC_ELASTICSEARCH}"}
  cache: {type: redis, url: "${CDC_REDIS}", prefix: saved}
  warehouse: {type: delta, path: "${CDC_WAREHOUSE}", trigger_s: 1}
state: {type: redis, url: "${CDC_DOCUMENTS}", prefix: saved}
views:
  order_docs:
    root: public.orders
    include:
      customer: {table: public.customers, on: {customer_id: id}}
      items: {table: public.items, on: {id: order_id}, many: true, order_by: [line]}
    to: [search, cache, warehouse]
  visits_by_hour:
    from: public.visits
    window: {tumbling: 1 hour, time: at}
    group_by: [page]
    select: {visits: count(*), spent: sum(spent)}
    to: [search, cache]
  visits_closed:
    from: public.visits
    window: {tumbling: 1 hour, time: at, lateness: 1 hour}
    clock: at
    select: {visits: count(*)}
    to: [cache]
"""
SCHEMA = """
CREATE TABLE customers (id integer PRIMARY KEY, name text NOT NULL, notes text);
CREATE TABLE orders (id bigint PRIMARY KEY, customer_id integer, total numeric(12, 2), placed timestamptz, tags text[]);
CREATE TABLE items (order_id bigint, line smallint, product jsonb, PRIMARY KEY (order_id, line));
CREATE TABLE visits (id bigint PRIMARY KEY, page text, at timestamptz, spent numeric);
CREATE TABLE emptied (id integer PRIMARY KEY, name text);
CREATE INDEX ON orders (customer_id);
INSERT INTO customers SELECT n, 'customer ' || n, repeat(md5(n::text), 200) FROM generate_series(1, 40) n;
INSERT INTO orders SELECT n, 1 + n % 40, n * 1.25, '2026-01-01'::timestamptz + n * interval '7 minutes',
    ARRAY['a', 'b' || n] FROM generate_series(1, 400) n;
INSERT INTO items SELECT 1 + n % 400, n / 400, jsonb_build_object('sku', n, 'price', n * 0.1)
    FROM generate_series(0, 1199) n;
INSERT INTO visits SELECT n, 'page ' || n % 5, '2026-01-01'::timestamptz + n * interval '3 minutes', n * 0.01
    FROM generate_series(1, 300) n;
INSERT INTO emptied SELECT n, 'gone' FROM generate_series(1, 20) n;
"""
CHANGES = """
UPDATE customers SET name = name || ' II' WHERE id <= 10;
DELETE FROM orders WHERE id % 50 = 0;
TRUNCATE emptied;
INSERT INTO emptied VALUES (100, 'after');
INSERT INTO visits SELECT n, 'page 0', '2026-01-03'::timestamptz + n * interval '3 minutes', 1
    FROM generate_series(301, 340) n;
UPDATE visits SET spent = 7 WHERE id = 320;
"""
UNAPPLIED = """
UPDATE customers SET name = name || ' III' WHERE id BETWEEN 5 AND 15;
DELETE FROM items WHERE order_id % 7 = 0;
INSERT INTO orders VALUES (1001, 5, 99.99, '2026-02-01', '{new}');
"""
KEPT = ("postgres/data", "kafka/data", "elasticsearch/data", "redis/data")


def cdc(folder: Path, *words: str, code: int = 0) -> str:
    """Run a verb on the stack of this folder; return what it prints."""
    ended = run_verb(["-p", str(folder / "pipeline.yaml"), "--state", str(folder), *words])
    assert ended.returncode == code, f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def endpoints(folder: Path) -> Endpoints:
    """Return the addresses of the stack that runs in this folder."""
    found = stack.running(folder)
    assert found
    return found


def change(folder: Path, *statements: str) -> None:
    with psycopg.connect(endpoints(folder).postgres, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def write(folder: Path) -> None:
    """Let a pipeline live through what a real one does: changes, a truncated table, a record in
    quarantine, a rebuilt cache that can be rolled back, and changes that no view has applied yet.
    """
    (folder / "pipeline.yaml").write_text(FILE)
    cdc(folder, "up")
    change(folder, SCHEMA)
    cdc(folder, "migrate")
    cdc(folder, "register")
    cdc(folder, "run", "--until-caught-up")
    change(folder, *CHANGES.split(";\n"))
    # A change of this row that came after the record would settle its entry.
    cdc(folder, "run", "--until-caught-up")
    with Topics(endpoints(folder).kafka) as topics:
        topics.write("saved.public.customers", [(b'{"id":1}', b"no JSON")])
    cdc(folder, "run", "--until-caught-up")
    assert "saved.public.customers" in cdc(folder, "quarantine", "list")
    cdc(folder, "rebuild", "cache")
    cdc(folder, "verify")
    with Topics(endpoints(folder).kafka) as topics:
        changed = ["saved.public.customers", "saved.public.items", "saved.public.orders"]
        before = topics.ends(changed)
        change(folder, UNAPPLIED)
        wait_until(
            lambda: all(end != before[topic] for topic, end in topics.ends(changed).items()),
            60,
            "the changes in the log",
        )
    cdc(folder, "down")


def pack(folder: Path, archive: Path) -> None:
    record = json.loads((folder / "stack.json").read_text())
    without_ports = json.dumps(record | {"ports": {}, "processes": {}}).encode()
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        entry = tarfile.TarInfo("stack.json")
        entry.size = len(without_ports)
        packed.addfile(entry, io.BytesIO(without_ports))
        for name in (*KEPT, "warehouse", "pipeline.yaml"):
            packed.add(folder / name, name)


def unpack(archive: Path, folder: Path) -> None:
    """Restore a state into an empty folder: `cdc up` starts its servers there, on free ports."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="tar")


@contextmanager
def state_folder() -> Iterator[Path]:
    """A folder for a stack, which is stopped and removed in the end."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-saved-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        stack.down(folder, progress=print)
        shutil.rmtree(folder)


def main() -> None:
    archive = ARCHIVES / f"state-{version('cdc')}.tar.xz"
    with state_folder() as folder:
        write(folder)
        pack(folder, archive)
    print(f"{archive}: {os.path.getsize(archive) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
