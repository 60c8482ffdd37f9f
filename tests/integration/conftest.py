"""A prepared source on the shared servers."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.shop import Shop, shop_on


@pytest.fixture
def shop(stack: Any, postgres_dsn: str, unique: str) -> Iterator[Shop]:
    yield from shop_on(postgres_dsn, unique, stack)
