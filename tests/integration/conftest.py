"""A prepared source on the shared servers; a server that asks for passwords; a history of documents with a state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from cdc.postgres import source
from tests.support.cache import cache
from tests.support.document_history import History
from tests.support.postgres import strict_postgres
from tests.support.shop import Shop, shop_on


@pytest.fixture
def shop(stack: Any, postgres_dsn: str, unique: str) -> Iterator[Shop]:
    yield from shop_on(postgres_dsn, unique, stack)


@pytest.fixture(scope="session")
def guarded() -> Iterator[str]:
    """The DSN of another Postgres, which asks for passwords and whose collation is C."""
    with strict_postgres(wal_level="logical") as dsn:
        yield dsn


@pytest.fixture(scope="module")
def state_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cache(tmp_path_factory.mktemp("state")) as address:
        yield f"{address[:-1]}1"


@pytest.fixture
def history(state_url: str, postgres_dsn: str, tmp_path: Path) -> Iterator[History]:
    with redis.Redis.from_url(state_url) as server:
        server.flushdb()
    with source.connect(postgres_dsn) as connection:
        connection.execute("CREATE SCHEMA lib")
        yield History(connection, state_url, tmp_path)
