"""The server of a state of documents: another one takes its place, it evicts, it is full."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from cdc.errors import SinkRejected
from cdc.sink.lane import Failure
from cdc.sinks.redis.documents.sink import DocumentState
from tests.integration.test_document_cases import AUTHOR_DOCS, LIBRARY, library
from tests.support.cache import cache
from tests.support.document_history import History
from tests.support.proxy import Road
from tests.support.wait import wait_until

VIEW = "author_docs"


def clients(server: redis.Redis) -> int:
    return len(server.client_list())


def test_a_failover_is_followed(tmp_path: Path) -> None:
    """The name leads to the new primary; open connections still to the old one, which is a replica
    by now. Who closes the state leaves no connection.
    """
    with cache(tmp_path / "a") as old_url, cache(tmp_path / "b") as new_url:
        ports = [urlsplit(url).port or 0 for url in (old_url, new_url)]
        road = Road(ports[0])
        sink = DocumentState(f"redis://127.0.0.1:{road.port}/0", "lib")
        state = sink.open_state()
        state.mark(VIEW, {"1": b"{}"})
        with redis.Redis.from_url(old_url) as old, redis.Redis.from_url(new_url) as new:
            old.replicaof("127.0.0.1", str(ports[1]))
            road.target = ports[1]
            with pytest.raises(Failure) as caught:
                state.mark(VIEW, {"2": b"{}"})
            assert caught.value.kind == "unavailable"
            state.mark(VIEW, {"3": b"{}"})
            assert list(state.dirty(VIEW, 9)) == ["3"]
            sink.close()
            wait_until(lambda: clients(new) == 2, 10, "this one and the replica alone")
        road.close()


def test_a_server_that_evicts_is_refused_with_words_that_name_the_state(history: History) -> None:
    """Each time that a table is made ready, also one that has rows already."""
    library(history, AUTHOR_DOCS)
    with redis.Redis.from_url(history.url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(
            SinkRejected, match="allkeys-lru on the server of the state of docu"
        ) as caught:
            history.sink.prepare(history.table("authors"))
        assert caught.value.hint.startswith("redis-cli -h ")
        server.config_set("maxmemory-policy", "noeviction")


def test_a_state_that_does_not_fit_is_refused_with_numbers(history: History) -> None:
    """On the driver, on executors and in the engine's task; with room again it goes on."""
    history.connection.execute(LIBRARY.encode())
    history.declare(AUTHOR_DOCS, prepare=False)
    history.do("INSERT INTO lib.authors VALUES (1, 'A')", "INSERT INTO lib.books VALUES (1, 1)")
    with redis.Redis.from_url(history.url) as server:
        server.config_set("maxmemory", 1)
        with pytest.raises(SinkRejected, match=r"no room for the state .* of 1 bytes") as refused:
            history.sink.prepare(history.table("authors"))
        assert "memory" in refused.value.hint
        with pytest.raises(Failure, match="no room for the state") as caught:
            history.state.take("run")
        assert caught.value.kind == "rejected"
        server.config_set("maxmemory", 0)
        history.prepare()
        history.interrupt = lambda: server.config_set("maxmemory", 1)
        with pytest.raises(AssertionError, match="no room for"):
            history.apply()
        history.interrupt = lambda: None
        server.config_set("maxmemory", 0)
        history.settle()
