"""The index on a secured cluster: three nodes, https with its own authority, a user with the rights that the
documentation lists.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from cdc.errors import CdcError, SinkUnavailable
from cdc.model.login import Address, Login
from cdc.model.position import Position
from cdc.model.table import IndexOptions, Table
from cdc.sink.contract import SchemaMismatch
from cdc.sink.lane import ChunkLimits, Part, Verdicts
from cdc.sink.remedy import Remedy, remedy
from cdc.sinks.elasticsearch.client import Refusal
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from cdc.sinks.elasticsearch.sink import Elasticsearch
from tests.contract import laws
from tests.contract.laws import Harness, fill_view, row
from tests.support.envelopes import table
from tests.support.faulty import Answer, Proxy, Request, json_answer
from tests.support.secured_index import PASSWORD, PREFIX, RIGHTS, USER, SecuredIndex, secured_index
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def index() -> Iterator[SecuredIndex]:
    with secured_index() as index:
        yield index


def address(index: SecuredIndex, **login: Any) -> Address:
    known = {"user": USER, "password": PASSWORD, "ca": str(index.ca)}
    return Address(",".join(index.urls), Login(**{**known, **login}))


@pytest.fixture
def harness(index: SecuredIndex, spark: "SparkSession", unique: str) -> Iterator[Harness]:
    assert unique.startswith(PREFIX)
    harness = Harness(
        spark,
        lambda: Elasticsearch("search", address(index), unique),
        table(f"{unique}.public.items"),
    )
    yield harness
    harness.sink.close()


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law_with_the_documented_rights(law: Callable[[Harness], None], harness: Harness) -> None:
    law(harness)


def test_examinations_promotion_and_removal_need_no_other_rights(harness: Harness) -> None:
    live = harness.sink
    items = harness.table
    assert isinstance(live, Elasticsearch)
    fill_view(harness)
    assert [finding.code for finding in live.examine([items])] == []
    live.check_capacity([items])
    asked = replace(items, index=IndexOptions({"v": {"analyzer": "simple"}}))
    with pytest.raises(SchemaMismatch, match="other fields than the file asks for now: v"):
        live.rehearse(asked)
    assert len(live.remains([items])) == 1
    names, build = harness.begin_generation()
    harness.apply(writer="rebuild", sink=build)
    previous = live.promote([items], names)
    assert harness.view() == harness.topic.model()
    assert live.promote([items], previous)
    live.drop_unreferenced([items], {})
    assert len(live.generations(items)) == 1
    live.remove([items])
    assert live.remains([items]) == []


LACKING: dict[str, tuple[dict[str, Any], Callable[[Elasticsearch, Table], object], str]] = {
    "monitor": (
        {**RIGHTS, "cluster": []},
        lambda sink, items: sink.check_capacity([items]),
        "cluster:monitor/",
    ),
    "the positions": (
        {**RIGHTS, "indices": RIGHTS["indices"][:1]},
        lambda sink, items: sink.position(items),
        "on cdc-position",
    ),
    "the views": (
        {**RIGHTS, "indices": RIGHTS["indices"][1:]},
        lambda sink, items: sink.prepare(items),
        "indices:admin/",
    ),
}


@pytest.mark.parametrize("right", LACKING)
def test_a_right_that_lacks_is_named_until_it_is_granted(
    index: SecuredIndex, harness: Harness, right: str
) -> None:
    rights, ask, words = LACKING[right]
    sink = harness.sink
    assert isinstance(sink, Elasticsearch)

    def refusal() -> Refusal | None:
        try:
            ask(sink, harness.table)
        except Refusal as error:
            return error
        return None

    index.set_rights(rights)
    try:
        error = wait_until(refusal, 60, "the right to be gone")
    finally:
        index.set_rights(RIGHTS)
    assert error
    assert words in error.message
    assert "privileges" in error.message
    assert "cdc-position" in error.hint
    index.wait_for_rights()
    assert refusal() is None
    fill_view(harness)
    assert harness.view() == harness.topic.model()


def test_a_row_that_the_user_may_not_write_stops_the_batch(
    index: SecuredIndex, harness: Harness
) -> None:
    """It isn't put aside as a row that the index doesn't take."""
    fill_view(harness)
    harness.topic.add("u", row("k1", 1, "third"))
    position = harness.position()
    views = {**RIGHTS["indices"][0], "privileges": ["manage", "read"]}
    index.set_rights({**RIGHTS, "indices": [views, *RIGHTS["indices"][1:]]})

    def refusal() -> CdcError | None:
        # What isn't refused yet changes nothing.
        try:
            harness.send(harness.repair(harness.position(), "two"))
        except CdcError as error:
            return error
        return None

    try:
        error = wait_until(refusal, 60, "the right to be gone")
        assert error
        assert "indices:data/write/bulk" in error.message
        assert harness.position() == position
    finally:
        index.set_rights(RIGHTS)
    index.wait_for_rights()
    assert refusal() is None
    harness.apply()
    assert harness.view() == harness.topic.model()


def test_a_password_is_changed_under_a_run(
    index: SecuredIndex, spark: "SparkSession", unique: str, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    url = address(index, password=f"${{file:{secret}}}")
    items = table(f"{unique}.public.items")
    harness = Harness(spark, lambda: Elasticsearch("search", url, unique), items)
    fill_view(harness)
    harness.topic.add("c", row("new", 1))
    position = harness.position()

    def refusal() -> CdcError | None:
        try:
            harness.position()
        except CdcError as error:
            return error
        return None

    index.change_password("another-4711")
    try:
        error = wait_until(refusal, 60, "the password to be refused")
        assert error
        assert "doesn't accept the login" in error.message
        assert "another-4711" not in f"{error}{error.hint}"
        secret.write_text("another-4711\n")
        assert harness.position() == position
        harness.apply()
        assert harness.view() == harness.topic.model()
    finally:
        index.change_password(PASSWORD)
        harness.sink.close()
    secret.write_text(PASSWORD)
    wait_until(lambda: refusal() is None, 60, "the old password to be back")


WAYS: dict[str, tuple[Callable[[SecuredIndex, Path], Address], str, str, Remedy]] = {
    "a wrong password": (
        lambda index, _: address(index, password="wrong"), "doesn't accept the login", "password", Remedy.STOP,
    ),
    "no login": (
        lambda index, _: address(index, user=None, password=None), "doesn't accept the login", "user", Remedy.STOP,
    ),
    "an API key of nobody": (
        lambda index, _: address(index, user=None, password=None, api_key="aWQ6a2V5"),
        "doesn't accept the login", "api_key", Remedy.STOP,
    ),
    "the system's authorities": (
        lambda index, _: address(index, ca=None), "of a CA that isn't trusted", "`ca`", Remedy.STOP,
    ),
    "another authority": (
        lambda index, folder: address(index, ca=another_authority(folder)),
        "of a CA that isn't trusted", "`ca`", Remedy.STOP,
    ),
    "no TLS": (
        lambda index, _: Address(index.urls[0].replace("https", "http")),
        "closes the connection without an answer", "https://", Remedy.RETRY,
    ),
}  # fmt: skip


def another_authority(folder: Path) -> str:
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    return str(folder / "other.pem")


@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_is_closed_is_named_with_its_setting(
    index: SecuredIndex, unique: str, tmp_path: Path, way: str
) -> None:
    make, words, hint, action = WAYS[way]
    url = make(index, tmp_path)
    sink = Elasticsearch("search", url, unique)
    with pytest.raises(CdcError) as caught:
        sink.position(table(f"{unique}.public.items"))
    sink.close()
    assert words in caught.value.message
    assert any(node.partition("://")[2] in caught.value.message for node in index.urls)
    assert hint in caught.value.hint
    assert remedy(caught.value) is action


def test_an_api_key_lets_a_batch_in(
    index: SecuredIndex, spark: "SparkSession", unique: str, tmp_path: Path
) -> None:
    """This distribution can't create one: a proxy takes it in the server's place, and refuses in its words."""
    secret = tmp_path / "key"
    secret.write_text("aWQ6a2V5\n")
    reason = "unable to authenticate with provided credentials and anonymous access is not allowed for this request"
    unauthorized = json_answer(401, {"error": {"type": "security_exception", "reason": reason}})

    def check(request: Request) -> Answer | None:
        return None if request.login == "ApiKey aWQ6a2V5" else unauthorized

    with Proxy(index.urls[0], auth=(USER, PASSWORD), verify=False) as proxy:
        proxy.rule = check
        url = Address(proxy.url, Login(api_key=f"${{file:{secret}}}"))
        items = table(f"{unique}.public.items")
        harness = Harness(spark, lambda: Elasticsearch("search", url, unique), items)
        fill_view(harness)
        assert harness.view() == harness.topic.model()
        harness.sink.close()


@dataclass
class RowByRow(ElasticsearchWriter):
    """A writer whose bulks have one row each. At the twentieth of a task it says so by a file in `gate`,
    and waits for another.
    """

    gate: Path = Path()
    bulks: int = 0
    limits = ChunkLimits(1, 1)

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        self.bulks += 1
        if self.bulks == 20:
            (self.gate / "waiting").touch()
            wait_until((self.gate / "open").exists, 120, "the node to be killed")
        return super().write(parts)


def test_a_node_that_dies_in_mid_batch_loses_and_refuses_nothing(
    index: SecuredIndex, harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The node is the master, so the other two have to elect one."""
    sink = harness.sink
    assert isinstance(sink, Elasticsearch)
    fill_view(harness)
    index.wait_for_nodes()
    dying = index.master()
    for number in range(300):
        harness.topic.add("c" if number % 3 else "u", row(f"n{number}", number, "while it dies"))
    for number in range(6):
        harness.topic.add("d" if number == 3 else "u", row(f"k{number}", number, "third"))
    writer = partial(RowByRow, gate=tmp_path)
    monkeypatch.setattr("cdc.sinks.elasticsearch.sink.ElasticsearchWriter", writer)
    failures: list[CdcError] = []

    def apply() -> None:
        """As a stream does."""
        while harness.position() != Position(laws.TOPIC_ID, harness.topic.ends):
            try:
                harness.apply()
            except SinkUnavailable as error:
                failures.append(error)

    try:
        with ThreadPoolExecutor(1) as pool:
            applying = pool.submit(apply)
            wait_until((tmp_path / "waiting").exists, 60, "the batch to be under way")
            dying.kill()
            (tmp_path / "open").touch()
            applying.result(timeout=300)
        assert harness.view() == harness.topic.model()
        # The node is still away.
        harness.topic.add("c", row("last", 1))
        harness.apply()
        assert harness.view() == harness.topic.model()
        for failure in failures:
            assert remedy(failure) is Remedy.RETRY
    finally:
        dying.start()
        index.wait_for_nodes()
    harness.topic.add("u", row("last", 1, "again"))
    harness.apply()
    assert harness.view() == harness.topic.model()
