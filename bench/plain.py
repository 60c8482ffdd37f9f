"""The rival: the consumer that a good engineer would write in an afternoon, without Spark.

One process: confluent-kafka reads, orjson parses, a dict keeps the newest record of each key of a batch; then one Lua
call per thousand rows, `_bulk` with external versions and two requests in flight, or `deltalake`. The position goes
into the view together with the rows (Redis, Delta) or after them (Elasticsearch, whose versions make a repetition
harmless). It knows one table and trusts its input: no types beyond JSON's, no TOAST, no TRUNCATE, no quarantine.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import confluent_kafka
import deltalake
import httpx
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import redis

BATCH = 10_000
LUA = """
for i = 2, #KEYS do
  if ARGV[i + 1] == '' then redis.call('DEL', KEYS[i]) else redis.call('SET', KEYS[i], ARGV[i + 1]) end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
CHUNK = 1000
BULK_BYTES = 8_000_000
Rows = dict[Any, tuple[int, dict[str, Any] | None]]
"""The newest record of each id: its offset and its row, None when it is gone."""
Apply = Callable[[int, int, list[Any]], None]
"""Takes a partition, its end offset and records of it."""
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("account", pa.int32()),
        ("name", pa.string()),
        ("amount", pa.string()),
        ("active", pa.bool_()),
        ("note", pa.string()),
        ("updated_at", pa.string()),
    ]
)


Span = tuple[list[int], list[int]]
"""First and end offsets by partition."""


def batches(bootstrap: str, topic: str, span: Span, size: int) -> Iterator[tuple[int, int, list[Any]]]:
    """Partition, end offset and records, one partition after the other."""
    for partition, (start, end) in enumerate(zip(*span, strict=True)):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "plain",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "queued.max.messages.kbytes": 262144,
                # Or the end of a partition is told half a second late.
                "fetch.wait.max.ms": 10,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, start)])
        ended = start == end
        records: list[Any] = []
        while not ended:
            for message in consumer.consume(size, 0.05):
                if error := message.error():
                    ended = error.code() == confluent_kafka.KafkaError._PARTITION_EOF
                elif message.value() is not None:
                    records.append((message.offset(), message.key(), message.value()))
            if len(records) >= size or (ended and records):
                yield partition, records[-1][0] + 1, records
                records = []
        consumer.close()


def newest(records: list[Any]) -> Rows:
    rows: Rows = {}
    for offset, key, value in records:
        rows[orjson.loads(key)["id"]] = offset, orjson.loads(value)["after"]
    return rows


def to_redis(url: str, prefix: str) -> Apply:
    script = redis.Redis.from_url(url).register_script(LUA)

    def apply(partition: int, end: int, records: list[Any]) -> None:
        found = list(newest(records).items())
        for at in range(0, len(found), CHUNK):
            chunk = found[at : at + CHUNK]
            keys = [f"{prefix}:{key}" for key, _ in chunk]
            values = [orjson.dumps(row) if row else b"" for _, (_, row) in chunk]
            script(keys=[f"{prefix}:position", *keys], args=[partition, end, *values])

    return apply


def to_elasticsearch(url: str, index: str) -> Apply:
    client, pool = httpx.Client(base_url=url, timeout=120), ThreadPoolExecutor(2)
    flying: list[Future[None]] = []

    def post(lines: list[bytes]) -> None:
        if len(flying) == 2:
            flying.pop(0).result()
        flying.append(pool.submit(_bulk, client, index, b"\n".join(lines) + b"\n"))

    def apply(partition: int, end: int, records: list[Any]) -> None:
        lines: list[bytes] = []
        size = 0
        for key, (offset, row) in newest(records).items():
            lines += item(key, offset, row)
            size += len(lines[-1]) + 80
            if size > BULK_BYTES:
                post(lines)
                lines, size = [], 0
        if lines:
            post(lines)
        if len(records) < BATCH:
            for one in flying:
                one.result()
            flying.clear()
            position = {"partition": partition, "end": end}
            client.put(f"/{index}-position/_doc/{partition}", json=position).raise_for_status()

    return apply


def item(key: Any, offset: int, row: dict[str, Any] | None) -> list[bytes]:
    """The lines of one change in a bulk."""
    about = {"_id": str(key), "version": offset, "version_type": "external_gte"}
    return [orjson.dumps({"index": about}), orjson.dumps(row)] if row else [orjson.dumps({"delete": about})]


def _bulk(client: httpx.Client, index: str, body: bytes) -> None:
    headers, told = {"Content-Type": "application/x-ndjson"}, {"filter_path": "errors,items.*.status"}
    answer = client.post(f"/{index}/_bulk", content=body, headers=headers, params=told).raise_for_status().json()
    # 409: the view has this version or a later one. 404: what is to be deleted isn't there.
    if answer["errors"] and any(
        one["status"] not in (200, 201, 404, 409) for entry in answer["items"] for one in entry.values()
    ):
        raise SystemExit("a document was refused")


def to_changes(path: str) -> Apply:
    names = [*COLUMNS.names, "op"]

    def apply(partition: int, end: int, records: list[Any]) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for _, key, value in records:
            event = orjson.loads(value)
            row = event["after"] or orjson.loads(key)
            for name in COLUMNS.names:
                columns[name].append(row.get(name))
            columns["op"].append(event["op"])
        table = pa.table(columns, schema=COLUMNS.append(pa.field("op", pa.string())))
        deltalake.write_deltalake(path, table, mode="append", commit_properties=_position(partition, end))

    return apply


def to_mirror(path: str) -> Apply:
    def apply(partition: int, end: int, records: list[Any]) -> None:
        rows = newest(records)
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS.names}
        for key, (_, row) in rows.items():
            for name in COLUMNS.names:
                columns[name].append(row.get(name) if row else key if name == "id" else None)
        gone = [row is None for _, row in rows.values()]
        table = pa.table(columns, schema=COLUMNS).append_column("gone", pa.array(gone))
        if not deltalake.DeltaTable.is_deltatable(path):
            table = table.filter(pc.invert(table["gone"])).drop_columns("gone")
            deltalake.write_deltalake(path, table, commit_properties=_position(partition, end))
            return
        (
            deltalake.DeltaTable(path)
            .merge(
                table, "t.id = s.id", source_alias="s", target_alias="t", commit_properties=_position(partition, end)
            )
            .when_matched_delete("s.gone")
            .when_matched_update({name: f"s.{name}" for name in COLUMNS.names})
            .when_not_matched_insert({name: f"s.{name}" for name in COLUMNS.names}, predicate="NOT s.gone")
            .execute()
        )

    return apply


def _position(partition: int, end: int) -> deltalake.CommitProperties:
    return deltalake.CommitProperties(custom_metadata={f"position.{partition}": str(end)})


TARGETS: dict[str, Callable[..., Apply]] = {
    "redis": to_redis,
    "elasticsearch": to_elasticsearch,
    "changes": to_changes,
    "mirror": to_mirror,
}


def main() -> None:
    """Words: target, broker, topic, first and end offsets with commas, batch, then what the target takes.

    Prints the seconds that it took: a consumer runs for weeks, so without its start.
    """
    target, bootstrap, topic, starts, ends, size, *rest = sys.argv[1:]
    began = time.monotonic()
    apply = TARGETS[target](*rest)
    span = [int(one) for one in starts.split(",")], [int(one) for one in ends.split(",")]
    for partition, end, records in batches(bootstrap, topic, span, int(size)):
        apply(partition, end, records)
    sys.stdout.write(f"{time.monotonic() - began}")


if __name__ == "__main__":
    main()
