"""What is sent to lift blocks on an index' writes, and the commands that lift them."""

import json
import shlex
from collections.abc import Iterator

import pytest

from cdc.errors import SinkBlocked
from cdc.model.finding import find, is_command
from cdc.sinks.elasticsearch.client import WRITE, Server, is_blocked
from cdc.sinks.elasticsearch.connection import forget
from cdc.sinks.elasticsearch.index import indices
from cdc.sinks.elasticsearch.index.indices import WritableIndex, WriteBlock
from cdc.sinks.elasticsearch.sink import IndexFacts, check_cluster
from tests.support.faulty import Answer, Proxy, Request, json_answer

NAMES = ["shop-public.a$b@1", "shop-public.a$(touch x)@1", "shop-public.`x`@1", "shop-public.ü@1"]
"""Indices of tables whose names a shell would expand."""


class Recorder:
    """A server that agrees to all, and has these settings of indices."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.settings: dict[str, dict[str, str]] = {}

    def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        if request.method == "GET":
            return json_answer(200, {n: {"settings": body} for n, body in self.settings.items()})
        return json_answer(200, {"acknowledged": True})

    def removed(self) -> dict[str, list[str]]:
        """The aliases that were removed, by index."""
        bodies = [json.loads(r.body) for r in self.requests if r.path.startswith("/_aliases")]
        actions = [action["remove"] for body in bodies for action in body["actions"]]
        return {action["index"]: action["aliases"] for action in actions}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def block(recorder: Recorder) -> Iterator[WriteBlock]:
    with Proxy("http://127.0.0.1:1") as proxy:
        proxy.rule = recorder
        yield WriteBlock(Server("search", proxy.url))
        forget(proxy.url)


def test_each_index_is_rid_of_its_own_marks(block: WriteBlock, recorder: Recorder) -> None:
    """Of 500 with the marks of all, the request had 15 MB."""
    names = [f"shop-public.orders_{number}@20260101t000000000000" for number in range(500)]
    places = [WritableIndex(name, promotions=(f"{name}.P.killed",)) for name in names]
    block.release(places)
    removed = recorder.removed()
    assert list(removed) == names
    for place in places:
        marks = removed[place.index]
        assert len(marks) == 2
        assert place.promotions[0] in marks
        assert all(mark.startswith(f"{place.index}.P.") for mark in marks)
    assert max(len(request.body) for request in recorder.requests) < 250_000


def test_the_block_of_a_running_promotion_stays(
    block: WriteBlock, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a killed one has marked the index, too."""
    place = WritableIndex("i", promotions=("i.P.killed",))
    block.release_abandoned([place, WritableIndex("unmarked")])
    monkeypatch.setattr(indices, "SWITCH_S", 0)
    twice_marked = WritableIndex("i", promotions=("i.P.killed", "i.P.running"))
    block.release_abandoned([twice_marked, WritableIndex("unmarked")])
    assert recorder.requests == []
    block.release_abandoned([twice_marked, WritableIndex("unmarked")])
    assert recorder.removed() == {"i": ["i.P.killed", "i.P.running"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_command_that_lifts_a_block_is_the_fix(
    block: WriteBlock, recorder: Recorder, name: str
) -> None:
    recorder.settings = {name: {"index.blocks.write": "true"}}
    with pytest.raises(SinkBlocked) as caught:
        block.require_unblocked([WritableIndex(name)])
    finding = find("sink-waiting", "search", caught.value.message, caught.value.hint)
    assert is_command(finding.fix)
    assert finding.fix.startswith("curl ")
    assert '{"index.blocks.write":null}' in shlex.split(finding.fix)
    assert not set("`()") & set(finding.fix)
    assert finding.fix.count("$") == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_expands_nothing_of_a_name(name: str) -> None:
    facts = IndexFacts("Elasticsearch", ("8.19.21",), "green", 10, 1000, {}, 0.85, (name,), (name,))
    fixes = [finding.fix for finding in check_cluster("search", facts)]
    assert len(fixes) == 2
    for fix in fixes:
        assert is_command(fix)
        assert not set("`()") & set(fix)
        assert fix.count("$") == 1


def test_a_block_differs_from_a_server_without_room() -> None:
    """A full disk's has the status of one that is busy."""
    kind = "cluster_block_exception"
    assert is_blocked(403, kind)
    assert is_blocked(429, kind)
    assert not is_blocked(503, kind), "no master"
    assert not is_blocked(429, "circuit_breaking_exception")
    assert not is_blocked(503, None)


def test_a_block_that_may_be_a_promotions_is_named_without_a_command() -> None:
    """A real server's other blocks are lifted in `tests/contract/test_elasticsearch.py`."""
    reason = "index [shop-public.a$b@1] blocked by: [FORBIDDEN/8/index write (api)];"
    error = {"type": "cluster_block_exception", "reason": reason}
    with Proxy("http://127.0.0.1:1") as proxy:
        proxy.rule = lambda _: json_answer(403, {"error": error})
        with pytest.raises(SinkBlocked) as caught:
            Server("search", proxy.url).ask("GET", "/i/_alias")
        forget(proxy.url)
    assert caught.value.message == f"The index shop-public.a$b@1 is blocked: {WRITE} is set."
    finding = find("sink-waiting", "search", caught.value.message, caught.value.hint)
    assert not finding.fix.startswith("curl ")
