"""What somebody new does in the first hour, as the documentation has it: every command, and what it prints."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.compose.wheels import postgres_bin
from cdc.connectors.client import Connect
from tests.support.cache import cache
from tests.support.postgres import PASSWORD, strict_postgres
from tests.support.walkthrough import follow

if TYPE_CHECKING:
    from tests.conftest import Stack

PAGE = Path(__file__).parents[2] / "docs" / "start" / "own-tables.md"


@pytest.fixture
def shop(stack: "Stack", tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a shop: its own Postgres, where the owner is no superuser, and its own Redis."""
    with strict_postgres("logical") as admin, cache(tmp_path / "redis") as redis:
        with psycopg.connect(admin, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE ROLE shopkeeper LOGIN PASSWORD {}").format(PASSWORD))
            conn.execute("CREATE DATABASE shop OWNER shopkeeper")
        yield {
            **os.environ,
            **stack.endpoints.environment(),
            "PATH": f"{Path(sys.executable).parent}:{postgres_bin()}:{os.environ['PATH']}",
            "CDC_STATE": str(tmp_path / "state"),
            "CDC_WAREHOUSE": str(tmp_path / "warehouse"),
            "SHOP_POSTGRES": make_conninfo(
                admin, dbname="shop", user="shopkeeper", password=PASSWORD
            ),
            "SHOP_ADMIN": make_conninfo(admin, dbname="shop"),
            "SHOP_REDIS": redis,
            "SHOP_CONNECTOR": "connector's secret",
            "COLUMNS": "80",
        }
        with Connect(stack.endpoints.connect) as connect:
            connect.delete("shop")


@pytest.mark.own_source
def test_the_first_hour_goes_as_the_page_says(shop: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "hour"
    folder.mkdir()
    follow(PAGE, folder, shop)
