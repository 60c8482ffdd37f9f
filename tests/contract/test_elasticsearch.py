"""What only the index can do wrong: answers that say nothing, late bulks, and readers who are shown another index."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import httpx
import pytest

from cdc.apply.resume import prepare
from cdc.errors import Fenced, SinkBlocked, SinkRejected, SinkUnavailable
from cdc.model.finding import find_error, is_command
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, IndexOptions, Table, row_id
from cdc.sink.contract import GroupScanner, RowsRejected, Sink
from cdc.sink.lane import ChunkLimits
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.spark.failures import explain
from tests.contract import laws
from tests.contract.laws import Harness, fill, fill_view, row
from tests.support import http
from tests.support.envelopes import table
from tests.support.faulty import RESET, Answer, Proxy, Request, json_answer, nothing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

POSITIONS = "cdc-position"
HTML = b"<html><title>a proxy's own page</title></html>"


@pytest.fixture
def proxy(stack: "Stack") -> Iterator[Proxy]:
    with Proxy(stack.endpoints.elasticsearch) as proxy:
        yield proxy


@pytest.fixture
def server(stack: "Stack") -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.endpoints.elasticsearch, timeout=60) as client:
        yield client


@pytest.fixture
def harness(spark: "SparkSession", proxy: Proxy, unique: str) -> Iterator[Harness]:
    harness = Harness(
        spark, lambda: Elasticsearch("search", proxy.url, unique), table(f"{unique}.public.items")
    )
    yield harness
    harness.sink.close()


def item_error(request: Request) -> Answer:
    body = json.loads(request.body)
    error = {"type": "no_shard_available_action_exception", "reason": "x"}
    docs = [{"_index": "x", "_id": "x", "error": error} for _ in body.get("ids", body.get("docs"))]
    return json_answer(200, {"docs": docs})


FAULTS: dict[str, Callable[[Request], Answer]] = {
    "an error in place of the item": item_error,
    "busy": lambda _: json_answer(429, {"error": {"type": "circuit_breaking_exception"}}),
    "no master": lambda _: json_answer(503, {"error": {"type": "cluster_block_exception"}}),
    "a reset": lambda _: RESET,
    "a page": lambda _: Answer(200, HTML, "text/html"),
    "a page that isn't there": lambda _: Answer(404, HTML, "text/html"),
    "nothing of that name": lambda _: Answer(404, b'{"message":"no route"}'),
    "no items": lambda _: json_answer(200, {"docs": []}),
    "another answer": lambda _: json_answer(200, {}),
    "half an answer": lambda _: Answer(200, b'{"docs":[{"fou', product=True),
}


ITEMS = {"an error in place of the item", "no items", "another answer"}
"""Faults of an answer that has items: of aliases, there may be none."""


@pytest.mark.parametrize(
    ("part", "name"),
    [("/_mget", name) for name in FAULTS]
    + [(part, name) for part in ("/_alias", "/_mapping") for name in FAULTS if name not in ITEMS],
)
def test_what_cannot_be_read_is_not_nothing(
    proxy: Proxy, unique: str, part: str, name: str
) -> None:
    """A position that is None empties the view that readers see."""
    sink, items = Elasticsearch("search", proxy.url, unique), table(f"{unique}.public.items")
    sink.prepare(items)
    assert sink.position(items) is None
    proxy.rule = lambda request: FAULTS[name](request) if part in request.path else None
    ask = sink.prepare if part == "/_mapping" else sink.position
    with pytest.raises(SinkUnavailable):
        ask(items)


def test_positions_that_are_closed_are_not_nothing(
    proxy: Proxy, server: httpx.Client, unique: str
) -> None:
    """The server itself answers an item with an error, and the whole with 200."""
    sink, items = Elasticsearch("search", proxy.url, unique), table(f"{unique}.public.items")
    sink.prepare(items)
    server.post(f"/{POSITIONS}/_close").raise_for_status()
    try:
        with pytest.raises(SinkUnavailable):
            sink.position(items)
    finally:
        server.post(f"/{POSITIONS}/_open").raise_for_status()
    assert sink.position(items) is None


@pytest.mark.parametrize("name", ["an error in place of the item", "busy", "a reset", "no items"])
def test_a_view_that_cannot_be_asked_is_asked_again(
    harness: Harness, proxy: Proxy, name: str
) -> None:
    """For a value that the log doesn't carry: neither a failure of Spark, nor a value that nobody knows."""
    fill_view(harness)
    harness.topic.add("u", row("k0", 0, n=7), lacking=["v"])
    harness.topic.add("d", row("k1", 1))
    proxy.rule = lambda request: FAULTS[name](request) if request.path == "/_mget" else None
    with pytest.raises(SinkUnavailable):
        harness.apply()
    proxy.rule = nothing
    harness.apply()
    assert harness.view() == harness.topic.model()


def test_a_view_that_cannot_be_read_may_come_back(harness: Harness, proxy: Proxy) -> None:
    """Neither fewer rows nor the failure of something unknown."""
    fill_view(harness)
    proxy.rule = lambda request: (
        FAULTS["busy"](request) if "/_search" in request.path or "/_mget" in request.path else None
    )
    frames = [
        harness.sink.scan(harness.table, harness.spark, ids) for ids in (None, [row_id(["k0", 0])])
    ]
    # Each is asked for some seconds.
    with ThreadPoolExecutor() as readers:
        for reading in [readers.submit(frame.collect) for frame in frames]:
            with pytest.raises(Exception, match="SinkUnavailable") as caught:
                reading.result()
            assert isinstance(explain(caught.value, "search"), SinkUnavailable)
    proxy.rule = nothing
    assert harness.view() == harness.topic.model()


class Once:
    """A rule: each path that has `part` in it gets a fault the first time, and passes then."""

    def __init__(self, part: str, fault: Callable[[Request], Answer]) -> None:
        self.part, self.fault = part, fault
        self.paths: list[str] = []

    def __call__(self, request: Request) -> Answer | None:
        path = request.path.partition("?")[0]
        if self.part not in path or path in self.paths:
            return None
        self.paths.append(path)
        return self.fault(request)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("ids", "an error in place of the item")]
    + [(kind, name) for kind in ("ids", "rows", "group") for name in ("no master", "a reset")],
)
def test_a_moment_of_absence_is_waited_for(
    harness: Harness, proxy: Proxy, kind: str, name: str
) -> None:
    """A `verify` of hours doesn't fail because a page was asked for while a shard moved."""
    fill_view(harness)
    ids = [row_id([row["a"], row["b"]]) for row in harness.topic.model().values()]
    sink, tables, spark = harness.sink, [harness.table], harness.spark
    assert isinstance(sink, GroupScanner)
    frame = (
        sink.scan_group(tables, spark)
        if kind == "group"
        else sink.scan(harness.table, spark, ids if kind == "ids" else None)
    )
    proxy.rule = fault = Once("/_mget" if kind == "ids" else "/_search", FAULTS[name])
    assert frame.count() == len(ids)
    assert fault.paths


def of_an_index(request: Request) -> bool:
    return request.path.startswith("/_bulk?")


class Lost:
    """A rule: keeps bulks for later, whose sender sees his connection end."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> Answer | None:
        if not of_an_index(request):
            return None
        self.requests.append(request)
        return RESET


def forget_versions(server: httpx.Client, harness: Harness) -> None:
    """Forget the versions of deleted documents, as a restart of the node does, or a shard that moves."""
    index = index_of(harness)
    for step in ("_flush", "_close", "_open?wait_for_active_shards=1"):
        server.post(f"/{index}/{step}").raise_for_status()


def alias_of(harness: Harness) -> str:
    sink = harness.sink
    assert isinstance(sink, Elasticsearch)
    return sink.alias(harness.table)


def index_of(harness: Harness) -> str:
    sink = harness.sink
    assert isinstance(sink, Elasticsearch)
    (index,) = http.get(f"{sink.url}/_alias/{alias_of(harness)}").raise_for_status().json()
    return str(index)


def late_bulk(
    harness: Harness, proxy: Proxy, server: httpx.Client, turned: Callable[[Request], Request]
) -> list[Any]:
    """A run is cut off in mid-batch, another one takes over, the server restarts; then the bulk arrives."""
    fill_view(harness)
    harness.topic.add("c", row("risen", 1))
    harness.topic.add("d", row("k0", 0))
    proxy.rule = lost = Lost()
    with pytest.raises(SinkUnavailable):
        harness.apply()
    proxy.rule = nothing
    harness.topic.add("d", row("risen", 1))
    harness.topic.add("c", row("k0", 0, "again"))
    harness.apply(writer="two", sink=harness.writer())
    forget_versions(server, harness)
    answers = [proxy.deliver(turned(request)).json() for request in lost.requests]
    assert answers
    assert harness.view() == harness.topic.model()
    return answers


def test_a_late_bulk_brings_nothing_back(
    harness: Harness, proxy: Proxy, server: httpx.Client
) -> None:
    """Nor one of the same run, which has tried again since."""
    answers = late_bulk(
        harness, proxy, server, lambda bulk: replace(bulk, path="/_bulk?require_alias=true")
    )
    assert all(
        "error" in next(iter(item.values())) for answer in answers for item in answer["items"]
    )


def test_planted_bulks_that_name_the_index(
    harness: Harness, proxy: Proxy, server: httpx.Client
) -> None:
    """Nobody can take an index' own name from a writer that has gone silent."""

    def direct(bulk: Request) -> Request:
        target = bulk.body.partition(b'"_index":"')[2].partition(b'"')[0]
        body = bulk.body.replace(target, index_of(harness).encode())
        return replace(bulk, body=body, path="/_bulk")

    with pytest.raises(AssertionError, match="risen"):
        late_bulk(harness, proxy, server, direct)


def test_a_late_bulk_of_deletes_makes_no_index(
    harness: Harness, proxy: Proxy, server: httpx.Client
) -> None:
    """A delete with a version of ours would create the index that it doesn't find."""
    fill_view(harness)
    harness.topic.add("d", row("k0", 0))
    proxy.rule = lost = Lost()
    with pytest.raises(SinkUnavailable):
        harness.apply()
    proxy.rule = nothing
    harness.sink.clear(harness.table)
    indices = server.get("/_all/_settings").json().keys()
    for request in lost.requests:
        proxy.deliver(request)
    assert server.get("/_all/_settings").json().keys() == indices


def test_who_is_overtaken_in_mid_batch_is_fenced(harness: Harness, proxy: Proxy) -> None:
    fill(harness)
    harness.apply((2, 1))
    batch, second = harness.batch(harness.position(), harness.topic.ends, "one"), harness.writer()

    def overtake(request: Request) -> None:
        if of_an_index(request):
            proxy.rule = nothing
            harness.apply(writer="two", sink=second)

    proxy.rule = overtake
    with pytest.raises(Fenced):
        harness.send(batch)
    harness.topic.add("d", row("k1", 1))
    harness.apply(writer="two", sink=second)
    assert harness.view() == harness.topic.model()


def test_a_new_index_is_sent_no_deletes(harness: Harness, server: httpx.Client) -> None:
    """The server would hold each in its memory; deletes of rows that an earlier batch may have brought are sent."""
    fill(harness)
    old_ends = harness.topic.ends
    harness.topic.add("d", row("k1", 1))
    names, build = harness.begin_generation()
    applied = harness.apply(old_ends, sink=build)
    assert applied.deleted > 0
    index = f"{alias_of(harness)}@{names[harness.name]}"

    def deletes() -> int:
        stats = server.get(f"/{index}/_stats/indexing").json()["indices"][index]
        return int(stats["primaries"]["indexing"]["delete_total"])

    assert deletes() == 0
    harness.apply(sink=build)
    assert deletes() == 1
    assert harness.view(build) == harness.topic.model()


def cut(calls: int) -> Callable[[Request], Answer | None]:
    """The server takes so many bulks more."""
    counter = iter(range(calls))
    return lambda request: RESET if of_an_index(request) and next(counter, None) is None else None


class RowByRow(ElasticsearchWriter):
    """A writer whose bulks have one row each."""

    limits = ChunkLimits(1, 1)


def small_bulks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdc.sinks.elasticsearch.sink.ElasticsearchWriter", RowByRow)


def test_a_first_batch_deletes_what_an_earlier_chunk_of_it_has_shown(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bulks(monkeypatch)
    for op in ("c", "d"):
        harness.topic.add(op, row("k", 1))
    harness.topic.add("c", row("other", 1))
    harness.apply()
    assert harness.view() == harness.topic.model()


def second_generation(harness: Harness) -> tuple[dict[str, str], Sink]:
    """Fill the live view, and a generation beside it: its name by table, and its sink."""
    fill_view(harness)
    names, build = harness.begin_generation()
    harness.apply(sink=build)
    return names, build


def test_readers_do_not_go_back_at_a_switch(
    harness: Harness, proxy: Proxy, server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch was cut half way: some of its rows are seen already, and the position doesn't say so."""
    live, items = harness.sink, harness.table
    names, build = second_generation(harness)
    keys = ["k0", "k3", "k4", "k5"]
    for key in keys:
        harness.topic.add("u", row(key, int(key[1:]), "second"))

    def visible() -> list[bool]:
        ids = {"ids": [row_id([key, int(key[1:])]) for key in keys]}
        docs = (
            server.post(f"/{alias_of(harness)}/_mget", json=ids).raise_for_status().json()["docs"]
        )
        return [doc["_source"]["v"] == "second" for doc in docs]

    small_bulks(monkeypatch)
    proxy.rule = cut(1)
    with pytest.raises(SinkUnavailable):
        harness.apply()
    proxy.rule = nothing
    earlier = visible()
    assert any(earlier)
    assert not all(earlier)
    monkeypatch.setattr("cdc.sink.promotion.SWITCH_S", 0.5)
    with suppress(SinkUnavailable):
        live.promote([items], names)
    assert [now or not then for now, then in zip(visible(), earlier, strict=True)] == [True] * len(
        keys
    )
    harness.apply(sink=build)
    assert live.promote([items], names)
    assert all(visible())
    assert harness.view() == harness.topic.model()


def test_a_rollback_restores_no_settings(harness: Harness, proxy: Proxy) -> None:
    """A generation that was live has them; a new one gets them before readers see it."""
    live, items = harness.sink, harness.table
    names, _ = second_generation(harness)
    restored: list[str] = []

    def note(request: Request) -> None:
        if request.path.endswith("/_settings") and b"refresh_interval" in request.body:
            restored.append(request.path)

    proxy.rule = note
    previous = live.promote([items], names)
    assert len(restored) == 1
    assert live.promote([items], previous) == names
    assert len(restored) == 1


def block_of(server: httpx.Client, index: str) -> str | None:
    settings = server.get(f"/{index}/_settings?flat_settings=true").json()[index]["settings"]
    return settings.get("index.blocks.write")  # type: ignore[no-any-return]


def lift(error: SinkBlocked, stack: "Stack") -> None:
    """Type what a finding of this error tells to type."""
    fix = find_error("sink-waiting", "search", error).fix
    assert is_command(fix)
    environment = {**os.environ, "CDC_ELASTICSEARCH": stack.endpoints.elasticsearch}
    shell = ["bash", "-euc", fix.replace("curl -s ", "curl -sf ")]
    subprocess.run(shell, env=environment, check=True, capture_output=True)


def test_whatever_block_an_index_has_is_named(
    harness: Harness, server: httpx.Client, stack: "Stack"
) -> None:
    sink, items = harness.sink, harness.table
    fill_view(harness)
    index = index_of(harness)
    tries: dict[str, Callable[[], object]] = {
        "read_only": lambda: sink.prepare(items),
        "metadata": harness.apply,
        "read": harness.view,
    }
    for block, attempt in tries.items():
        harness.topic.add("u", row("k0", 0, block))
        setting = f"index.blocks.{block}"
        server.put(f"/{index}/_settings", json={setting: True}).raise_for_status()
        try:
            with pytest.raises(
                SinkBlocked, match=f"{index} is blocked: {setting} is set"
            ) as caught:
                attempt()
            lift(caught.value, stack)
        finally:
            server.put(f"/{index}/_settings", json={setting: None}).raise_for_status()
        harness.apply()
        assert harness.view() == harness.topic.model()


def test_an_index_that_is_closed_is_waited_for(
    harness: Harness, server: httpx.Client, stack: "Stack"
) -> None:
    """The server answers each item as if its document were to blame; none of them is rejected."""
    fill_view(harness)
    index = index_of(harness)
    harness.topic.add("u", row("k0", 0, "second"))
    harness.topic.add("u", row("k3", 3), lacking=["v"])
    server.post(f"/{index}/_close").raise_for_status()
    try:
        with pytest.raises(SinkBlocked, match=f"The index {index} is closed") as caught:
            harness.apply()
        lift(caught.value, stack)
        assert harness.apply().quarantined == 0
        assert harness.view() == harness.topic.model()
    finally:
        server.post(f"/{index}/_open").raise_for_status()


def test_a_user_who_may_not_write_is_reported_once(harness: Harness, proxy: Proxy) -> None:
    fill_view(harness)
    harness.topic.add("u", row("k0", 0, "second"))

    def forbid(request: Request) -> Answer | None:
        if not of_an_index(request):
            return None
        error = {"type": "security_exception", "reason": "action is unauthorized"}
        count = request.body.count(b'"_index"')
        items = [{"index": {"status": 403, "error": error}}] * count
        return json_answer(200, {"errors": True, "items": items})

    proxy.rule = forbid
    with pytest.raises(SinkRejected, match="doesn't allow the sink's user") as caught:
        harness.apply()
    assert "the cluster privilege `monitor`" in caught.value.hint
    proxy.rule = nothing
    harness.apply()
    assert harness.view() == harness.topic.model()


@pytest.mark.parametrize("blocked", ["view", "positions"])
def test_an_operators_block_stays_until_he_lifts_it(
    harness: Harness,
    server: httpx.Client,
    stack: "Stack",
    monkeypatch: pytest.MonkeyPatch,
    blocked: str,
) -> None:
    """Nothing is lost, nothing is lifted, and the failure says how he does it."""
    monkeypatch.setattr("cdc.sinks.elasticsearch.index.indices.SWITCH_S", 0)
    sink, items = harness.sink, harness.table
    fill_view(harness)
    names, _ = second_generation(harness)
    harness.topic.add("d", row("k0", 0))
    index = index_of(harness) if blocked == "view" else POSITIONS
    server.put(f"/{index}/_block/write").raise_for_status()
    try:
        capacity = lambda: sink.check_capacity([items])  # noqa: E731
        tries: list[Callable[[], object]] = [harness.apply, harness.apply, capacity]
        if blocked == "view":
            tries.append(lambda: sink.promote([items], names))
            harness.apply(sink=sink.for_generation(names))
        for attempt in tries:
            with pytest.raises(SinkBlocked, match=index) as caught:
                attempt()
        assert block_of(server, index) == "true"
        lift(caught.value, stack)
    finally:
        server.put(f"/{index}/_settings", json={"index.blocks.write": None}).raise_for_status()
    harness.apply()
    assert harness.view() == harness.topic.model()


def kill_at(proxy: Proxy, is_last: Callable[[Request], bool]) -> None:
    """Kill whoever sends this request: the server gets it, and nothing that comes after it."""

    def kill(request: Request) -> Answer | None:
        if not is_last(request):
            return None
        proxy.rule = lambda _: RESET
        proxy.deliver(request)
        return RESET

    proxy.rule = kill


def test_a_block_that_a_killed_promotion_has_left_is_lifted(
    harness: Harness, proxy: Proxy, server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a running one would be over; the next one finds nothing of it."""
    live, items = harness.sink, harness.table
    names, build = second_generation(harness)
    index = index_of(harness)
    kill_at(proxy, lambda request: "/_block/" in request.path)
    with pytest.raises(SinkUnavailable):
        live.promote([items], names)
    proxy.rule = nothing
    assert block_of(server, index) == "true"
    harness.topic.add("d", row("k0", 0))
    with pytest.raises(SinkUnavailable):
        harness.apply()
    assert block_of(server, index) == "true"
    monkeypatch.setattr("cdc.sinks.elasticsearch.index.indices.SWITCH_S", 0)
    harness.apply()
    assert harness.view() == harness.topic.model()
    assert block_of(server, index) is None
    aliases = server.get(f"/{index}/_alias").json()[index]["aliases"]
    assert not [alias for alias in aliases if ".P." in alias]
    harness.apply(sink=build)
    assert live.promote([items], names)


def test_a_block_that_a_killed_promotion_has_left_on_the_standby_is_lifted(
    harness: Harness, proxy: Proxy, server: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers see the new index by then. A run makes its standby again after every failure, so none
    of them lives until a running promotion would be over.
    """
    live, items = harness.sink, harness.table
    names, _ = second_generation(harness)
    index = index_of(harness)
    kill_at(
        proxy, lambda request: request.path.startswith("/_aliases") and b"remove" in request.body
    )
    with pytest.raises(SinkUnavailable):
        live.promote([items], names)
    proxy.rule = nothing
    assert index_of(harness) != index
    assert block_of(server, index) == "true"
    previous = {items.qualified: index.rpartition("@")[2]}
    harness.topic.add("d", row("k0", 0))
    with pytest.raises(SinkUnavailable):
        harness.apply(sink=live.for_generation(previous))
    assert block_of(server, index) == "true"
    monkeypatch.setattr("cdc.sinks.elasticsearch.index.indices.SWITCH_S", 0)
    standby = live.for_generation(previous)
    harness.apply(sink=standby)
    assert block_of(server, index) is None
    assert harness.view(standby) == harness.topic.model()
    harness.apply()
    assert live.promote([items], previous) == names


def test_the_index_of_a_table_without_records_is_made_once(harness: Harness, proxy: Proxy) -> None:
    """Whatever a run loads its plan for; as soon as it was written to, it is recreated."""

    def load() -> str:
        assert prepare(harness.sink, harness.table, None, 0, lambda _: None) is None
        return index_of(harness)

    index = load()
    created: list[str] = []

    def note(request: Request) -> None:
        name = unquote(request.path)[1:]
        if request.method == "PUT" and name.startswith(alias_of(harness)) and "/" not in name:
            created.append(name)

    proxy.rule = note
    assert load() == index
    assert created == []
    fill_view(harness)
    assert created == [load()]
    assert harness.view() == {}


def test_an_index_of_another_layout_is_recreated(harness: Harness) -> None:
    """Also by a clear that finds no document in it."""
    sink, items = harness.sink, harness.table
    sink.prepare(items)
    index = index_of(harness)
    fewer = replace(items, columns=items.columns[:3])
    sink.clear(fewer)
    assert index_of(harness) != index


def test_an_index_whose_record_alone_was_removed_is_recreated(
    harness: Harness, server: httpx.Client
) -> None:
    """As by a clear that was killed in between: its rows would be no table's."""
    sink, items = harness.sink, harness.table
    fill_view(harness)
    index = index_of(harness)
    server.delete(f"/{POSITIONS}/_doc/{quote(index, safe='')}").raise_for_status()
    sink.clear(items)
    assert index_of(harness) != index
    assert harness.view() == {}


def test_points_in_time_are_closed(harness: Harness, server: httpx.Client) -> None:
    def contexts() -> int:
        nodes = server.get("/_nodes/stats/indices/search").json()["nodes"]
        return sum(node["indices"]["search"]["open_contexts"] for node in nodes.values())

    fill_view(harness)
    count = contexts()
    for _ in range(3):
        harness.view()
    assert contexts() <= count + 1
    harness.sink.close()
    assert contexts() == count


LONG_NUMBER = "-" + "7" * 1500 + ".5"
REPAIRED = {
    '{"a":1,"b":{"c":"first","c":"\\u00e9 last"},"a":2.50}': '{"a":2.50,"b":{"c":"é last"}}',
    f'[1.10,{LONG_NUMBER},{{"n":{LONG_NUMBER}}}]': f'[1.10,"{LONG_NUMBER}",{{"n":"{LONG_NUMBER}"}}]',
    LONG_NUMBER: f'"{LONG_NUMBER}"',
    f'{{"a":[],"a":{LONG_NUMBER}}}': f'{{"a":"{LONG_NUMBER}"}}',
}
"""JSON of Postgres that an index refuses, and what it gets in its place."""


@pytest.fixture
def json_harness(spark: "SparkSession", proxy: Proxy, unique: str) -> Iterator[Harness]:
    """A view of a table with json: of one column readers see all, the other is found by path."""
    columns = (Column("id", "bigint"), Column("v", "json"), Column("by_path", "json"))
    options = IndexOptions({"by_path": {"type": "flattened"}})
    items = Table("public", "items", columns, ("id",), f"{unique}.public.items", index=options)
    harness = Harness(spark, lambda: Elasticsearch("search", proxy.url, unique), items)
    yield harness
    harness.sink.close()


def test_json_that_an_index_refuses_is_repaired(
    json_harness: Harness, server: httpx.Client
) -> None:
    """Rows beside it, and values beside it in its row, are as they were sent."""
    plain = '{"n": 1.10, "u": "\\u00e9"}'
    values = {**REPAIRED, plain: plain}
    for number, text in enumerate(values):
        by_path = text if text.startswith("{") else plain
        json_harness.topic.add("c", {"id": number, "v": text, "by_path": plain})
        json_harness.topic.add("c", {"id": 100 + number, "v": plain, "by_path": by_path})
    json_harness.apply()
    for number, (text, indexed) in enumerate(values.items()):
        by_path = indexed if text.startswith("{") else plain
        for key, v, path in ((number, indexed, plain), (100 + number, plain, by_path)):
            source = server.get(f"/{alias_of(json_harness)}/_doc/{key}").text
            assert f'"v":{v},"by_path":{path}}}' in source
    json_harness.topic.add("d", {"id": 0, "v": None, "by_path": None})
    json_harness.apply()
    assert len(json_harness.view()) == 2 * len(values) - 1


UNREPAIRABLE = {
    "levels": ("v", "[" * 1100 + "]" * 1100, "it is nested deeper than 1,000 levels"),
    "levels of a path": ("by_path", '{"secret":' * 30 + "1" + "}" * 30, "it is nested deeper than 20 levels"),
    "a long key": ("by_path", json.dumps({"secret" * 10_000: 1}), ""),
    "a key twice beside what is no text": ("v", r'{"secret":"\ud800","secret":2}', "it has a key twice in an object"),
    "no object": ("by_path", '"secret"', ""),
}  # fmt: skip
"""By what is wrong: the column, its value, and what is said of it."""


@pytest.mark.parametrize("wrong", UNREPAIRABLE)
def test_a_refused_document_is_named_with_column_and_cause(
    json_harness: Harness, wrong: str
) -> None:
    column, value, cause = UNREPAIRABLE[wrong]
    row = {"id": 1, "v": json.dumps(value), "by_path": "{}", column: value}
    json_harness.topic.add("c", row)
    with pytest.raises(RowsRejected) as caught:
        json_harness.apply()
    expected = f"document_parsing_exception, field {column}{cause and ': ' + cause}."
    assert expected in caught.value.message
    assert "secret" not in caught.value.message


MANY = 40
"""The number of tables. Their names take more than fits into a line; the server takes a while to
make an index for each.
"""
LONG = "a_table_whose_name_has_all_of_the_63_bytes_that_postgres_allows"


@pytest.fixture
def many(
    stack: "Stack", server: httpx.Client, unique: str
) -> Iterator[tuple[Elasticsearch, list[Table]]]:
    """A view for each of many tables with long names."""
    sink = Elasticsearch("search", stack.endpoints.elasticsearch, unique)
    long = [f"{LONG[:-3]}{number:03}" for number in range(MANY)]
    tables = [replace(table(f"{unique}.{name}", name), schema=LONG) for name in long]
    for long_table in tables:
        sink.prepare(long_table)
    try:
        yield sink, tables
    finally:
        sink.close()
        indices = list(server.get(f"/{unique}-*/_settings").json())
        for start in range(0, len(indices), 20):
            server.delete(f"/{','.join(indices[start : start + 20])}").raise_for_status()


def test_many_tables(
    many: tuple[Elasticsearch, list[Table]],
    spark: "SparkSession",
    unique: str,
    server: httpx.Client,
) -> None:
    """All that is asked about all of them at once fits into what the server takes as one line."""
    sink, tables = many
    sink.check_capacity(tables)
    names = dict.fromkeys((table.qualified for table in tables), new_generation())
    build = sink.for_generation(names)
    for long_table in tables:
        build.prepare(long_table)
    harness = Harness(spark, lambda: sink, tables[7])
    harness.topic.add("c", row("k", 1))
    end = Position(laws.TOPIC_ID, harness.topic.ends)
    advances = tuple(Advance(table, None, end) for table in tables)
    rows = harness.batch(None, harness.topic.ends, "one")
    for view in (sink, build):
        view.apply(replace(rows, advances=advances))
    assert {checkpoint.position for table in tables if (checkpoint := build.position(table))} == {
        end
    }
    replaced_names = sink.promote(tables, names)
    assert len(replaced_names) == MANY
    assert harness.view() == harness.topic.model()
    assert sink.generations(tables[-1]) == [
        names[tables[-1].qualified],
        replaced_names[tables[-1].qualified],
    ]
    sink.drop_unreferenced(tables, {})
    assert len(server.get(f"/{unique}-*/_settings").json()) == MANY


def test_a_server_that_takes_no_more_indices(
    stack: "Stack", server: httpx.Client, unique: str
) -> None:
    sink, items = (
        Elasticsearch("search", stack.endpoints.elasticsearch, unique),
        table(f"{unique}.public.items"),
    )
    sink.prepare(items)
    tell(server, 1)
    try:
        with pytest.raises(SinkRejected, match="shards") as caught:
            sink.for_generation({items.qualified: new_generation()}).prepare(items)
        assert "cluster.max_shards_per_node" in caught.value.hint
        with pytest.raises(SinkRejected, match="shards") as caught:
            sink.check_capacity([items])
        assert "cluster.max_shards_per_node" in caught.value.hint
    finally:
        tell(server, None)
        sink.close()


def tell(server: httpx.Client, shards: int | None) -> None:
    body = {"persistent": {"cluster.max_shards_per_node": shards}}
    server.put("/_cluster/settings", json=body).raise_for_status()
