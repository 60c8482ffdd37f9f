"""The rival: the consumer that a good engineer would write in an afternoon, without Spark.

One process: confluent-kafka reads, orjson parses, a dict keeps the newest record of each key of a
batch; then one Lua call per thousand rows, `_bulk` with external versions and two batches in
flight, or `deltalake`. The position goes into the view together with the rows (Redis, Delta) or
after them (Elasticsearch, whose versions make a repetition harmless). It trusts its input and knows
one shape of tables: no types beyond JSON's, no TOAST, no TRUNCATE, no quarantine.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
  if ARGV[i] == '' then redis.call('DEL', KEYS[i]) else redis.call('SET', KEYS[i], ARGV[i]) end
end
if ARGV[1] ~= '' then redis.call('SET', KEYS[1], ARGV[1]) end
"""
CHUNK = 1000
BULK_BYTES = 8_000_000
Record = tuple[int, Any, str, dict[str, Any] | None]
"""Offset, id, operation, and the row, None when it is gone."""
Rows = dict[Any, tuple[int, dict[str, Any] | None]]
"""The newest record of each id: its offset and its row."""
Offsets = dict[str, list[int]]
"""Offsets by topic and partition."""
Batch = tuple[str, str, list[Record]]
"""Records of one topic, and its position after them: JSON, an offset for each partition."""
Apply = Callable[[str, list[Record]], Future[float] | None]
"""Takes a topic's position and records. What is still under way gives the Unix time of its end."""
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

GATHER_S = {"warehouse": 1.0}
"""Seconds for which a consumer that follows the log gathers a batch; 50 ms for other targets."""
POLL_S = 0.05
READING: dict[str, Any] = {
    "group.id": "plain",
    "enable.auto.commit": False,
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "queued.max.messages.kbytes": 262144,
    # Otherwise the end of a partition is reported half a second late.
    "fetch.wait.max.ms": 10,
}


def batches(
    kafka: str,
    starts: Offsets,
    size: int,
    ends: Callable[[], Offsets | None],
    gather_s: float = POLL_S,
) -> Iterator[Batch]:
    """Yield the records of all topics as they come, until `ends`. The ends may become known at any
    time; from then on batches are full.
    """
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka, **READING})
    reached = {topic: list(offsets) for topic, offsets in starts.items()}
    places = [
        (topic, partition, offset)
        for topic, offsets in starts.items()
        for partition, offset in enumerate(offsets)
    ]
    consumer.assign([confluent_kafka.TopicPartition(*place) for place in places])
    gathered: dict[str, list[Any]] = {}
    began, is_complete = time.monotonic(), False
    while not is_complete:
        for message in consumer.consume(size, POLL_S):
            topic, partition, offset = (
                message.topic() or "",
                message.partition() or 0,
                message.offset() or 0,
            )
            if error := message.error():
                if error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise SystemExit(str(error))
                # Past the marks of transactions, which are no records.
                reached[topic][partition] = offset
            else:
                reached[topic][partition] = offset + 1
                if message.value() is not None:
                    gathered.setdefault(topic, []).append(message)
        final = ends()
        is_complete = final is not None and _past(reached, final)
        full = sum(map(len, gathered.values())) >= size
        if is_complete or full or (final is None and time.monotonic() - began >= gather_s):
            for topic, messages in gathered.items():
                yield (
                    topic,
                    orjson.dumps(reached[topic]).decode(),
                    [
                        (message.offset(), *parsed(message.key(), message.value()))
                        for message in messages
                    ],
                )
            gathered, began = {}, time.monotonic()
    consumer.close()


def _past(reached: Offsets, ends: Offsets) -> bool:
    pairs = (
        pair for topic, last in ends.items() for pair in zip(reached[topic], last, strict=True)
    )
    return all(offset >= end for offset, end in pairs)


def parsed(key: bytes, value: bytes) -> tuple[Any, str, dict[str, Any] | None]:
    """Id, operation and row."""
    event = orjson.loads(value)
    return orjson.loads(key)["id"], event["op"], event["after"]


def newest(records: list[Record]) -> Rows:
    return {key: (offset, row) for offset, key, _, row in records}


def to_redis(url: str, prefix: str) -> Apply:
    script = redis.Redis.from_url(url).register_script(LUA)

    def apply(position: str, records: list[Record]) -> None:
        rows = list(newest(records).items())
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            keys = [f"{prefix}:{key}" for key, _ in chunk]
            values = [orjson.dumps(row) if row else b"" for _, (_, row) in chunk]
            last = start + CHUNK >= len(rows)
            script(keys=[f"{prefix}:position", *keys], args=[position if last else "", *values])

    return apply


def to_elasticsearch(url: str, index: str) -> Apply:
    client, pool = httpx.Client(base_url=url, timeout=120), ThreadPoolExecutor(2)
    flying: list[Future[float]] = []

    def send(bodies: list[bytes], position: str, predecessor: Future[float] | None) -> float:
        for body in bodies:
            _bulk(client, index, body)
        if predecessor:
            predecessor.result()
        client.put(f"/{index}-position/_doc/1", json={"position": position}).raise_for_status()
        return time.time()

    def apply(position: str, records: list[Record]) -> Future[float]:
        if len(flying) == 2:
            flying.pop(0).result()
        rows = ((key, offset, row) for key, (offset, row) in newest(records).items())
        flying.append(pool.submit(send, bulks(rows), position, flying[-1] if flying else None))
        return flying[-1]

    return apply


def bulks(rows: Iterable[tuple[Any, int, dict[str, Any] | None]]) -> list[bytes]:
    """Bodies of bulks that bring ids to their rows, of these versions; none much larger than
    BULK_BYTES.
    """
    bodies: list[bytes] = []
    lines: list[bytes] = []
    size = 0
    for key, offset, row in rows:
        lines += item(key, offset, row)
        size += len(lines[-1]) + 80
        if size > BULK_BYTES:
            bodies.append(b"\n".join(lines) + b"\n")
            lines, size = [], 0
    return [*bodies, b"\n".join(lines) + b"\n"] if lines else bodies


def item(key: Any, offset: int, row: dict[str, Any] | None) -> list[bytes]:
    """The lines of one change in a bulk."""
    action = {"_id": str(key), "version": offset, "version_type": "external_gte"}
    return (
        [orjson.dumps({"index": action}), orjson.dumps(row)]
        if row
        else [orjson.dumps({"delete": action})]
    )


def _bulk(client: httpx.Client, index: str, body: bytes) -> None:
    def post(fields: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/x-ndjson"}
        path = f"/{index}/_bulk?filter_path={fields}"
        answer = client.post(path, content=body, headers=headers).raise_for_status()
        return dict(answer.json())

    # The same bulk again, since it does no harm: the answers of all items take a tenth of its time.
    if post("errors")["errors"] and any(
        # 409: the view has this version or a later one. 404: what is to be deleted isn't there.
        answer["status"] not in (200, 201, 404, 409)
        for entry in post("items.*.status")["items"]
        for answer in entry.values()
    ):
        raise SystemExit("a document was refused")


def to_changes(path: str) -> Apply:
    schema = COLUMNS.append(pa.field("op", pa.string()))

    def apply(position: str, records: list[Record]) -> None:
        rows = [row or {"id": key} for _, key, _, row in records]
        columns = {name: [row.get(name) for row in rows] for name in COLUMNS.names}
        table = pa.table({**columns, "op": [op for _, _, op, _ in records]}, schema=schema)
        deltalake.write_deltalake(
            path, table, mode="append", commit_properties=_committed(position)
        )

    return apply


def to_mirror(path: str) -> Apply:
    def apply(position: str, records: list[Record]) -> None:
        rows_by_key = newest(records)
        rows = [row or {"id": key} for key, (_, row) in rows_by_key.items()]
        removed = [row is None for _, row in rows_by_key.values()]
        table = pa.table(
            {name: [row.get(name) for row in rows] for name in COLUMNS.names}, schema=COLUMNS
        )
        table = table.append_column("gone", pa.array(removed))
        if not deltalake.DeltaTable.is_deltatable(path):
            table = table.filter(pc.invert(table["gone"])).drop_columns("gone")
            deltalake.write_deltalake(path, table, commit_properties=_committed(position))
            return
        (
            deltalake.DeltaTable(path)
            .merge(
                table,
                "t.id = s.id",
                source_alias="s",
                target_alias="t",
                commit_properties=_committed(position),
            )
            .when_matched_delete("s.gone")
            .when_matched_update({name: f"s.{name}" for name in COLUMNS.names})
            .when_not_matched_insert(
                {name: f"s.{name}" for name in COLUMNS.names}, predicate="NOT s.gone"
            )
            .execute()
        )

    return apply


def to_warehouse(folder: str) -> Apply:
    changes, mirror = to_changes(f"{folder}/changes"), to_mirror(f"{folder}/mirror")

    def apply(position: str, records: list[Record]) -> None:
        changes(position, records)
        mirror(position, records)

    return apply


def _committed(position: str) -> deltalake.CommitProperties:
    return deltalake.CommitProperties(custom_metadata={"position": position})


TARGETS: dict[str, Callable[[str, str], Apply]] = {
    "redis": to_redis,
    "elasticsearch": to_elasticsearch,
    "changes": lambda folder, name: to_changes(f"{folder}/{name}/changes"),
    "warehouse": lambda folder, name: to_warehouse(f"{folder}/{name}"),
}


def rival_name(topic: str) -> str:
    """Return the name of the place that holds a topic's rows: prefix of keys, index or folder."""
    return f"rival-{topic}"


def main() -> None:
    """Words: target, broker, where the target is, records of a batch, first offsets. The end
    offsets are read later.

    Prints when it began to read and when the last record was durable, Unix seconds: a consumer runs
    for weeks, so its start isn't counted.
    """
    target, kafka, place, size, starts = sys.argv[1:]
    first: Offsets = orjson.loads(starts)
    views = {topic: TARGETS[target](place, rival_name(topic)) for topic in first}
    sys.stdout.write(f"{time.time()}\n")
    sys.stdout.flush()
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(sys.stdin.readline)
        durable_times: dict[str, float | Future[float]] = {}
        follow = batches(
            kafka,
            first,
            int(size),
            lambda: orjson.loads(line.result()) if line.done() else None,
            GATHER_S.get(target, POLL_S),
        )
        for topic, position, records in follow:
            durable_times[topic] = views[topic](position, records) or time.time()
    times = [
        result.result() if isinstance(result, Future) else result
        for result in durable_times.values()
    ]
    sys.stdout.write(f"{max(times, default=time.time())}\n")


if __name__ == "__main__":
    main()
