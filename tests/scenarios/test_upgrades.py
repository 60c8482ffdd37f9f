"""A pipeline that a released version has left behind goes on under this one: from its positions, without
a rebuild, and equal to its source.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support import saved_state
from tests.support.saved_state import cdc

ARCHIVES = sorted(saved_state.ARCHIVES.glob("state-*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=[archive.name for archive in ARCHIVES])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A stack on the data of an archive."""
    with saved_state.state_folder() as folder:
        saved_state.unpack(request.param, folder)
        cdc(folder, "up")
        yield folder


def generations(folder: Path) -> Any:
    return json.loads(cdc(folder, "generations", "--json"))


def test_a_saved_state_goes_on(folder: Path) -> None:
    before = generations(folder)
    cdc(folder, "migrate")
    cdc(folder, "register")
    assert "saved.public.customers" in cdc(folder, "quarantine", "list")
    # A row that nothing changes any more: only a view that was made again would be without the mistake.
    with redis.Redis.from_url(saved_state.endpoints(folder).redis, decode_responses=True) as cache:
        stored = str(cache.get("saved:public.orders:3"))
        cache.set("saved:public.orders:3", stored.replace("3.75", "3.76"))
    saved_state.change(
        folder,
        "UPDATE orders SET total = total + 1 WHERE id > 390",
        "INSERT INTO visits VALUES (1001, 'page 1', '2026-01-03 21:00+00', 2)",
        "INSERT INTO visits VALUES (1002, 'page 1', '2026-01-01 01:00+00', 2)",
        "TRUNCATE emptied",
        "ALTER TABLE customers ADD COLUMN phone text",
        "UPDATE customers SET phone = '1' WHERE id = 30",
    )
    cdc(folder, "run", "--until-caught-up")
    found = json.loads(cdc(folder, "verify", "--json", code=8))
    differing = {
        (view["sink"], view["table"], view["different"])
        for view in found["views"]
        if not view["equal"]
    }
    assert differing == {("cache", "public.orders", 1)}
    assert generations(folder) == before
    cdc(folder, "verify", "--repair")
    # What was kept for a rollback is as usable as on the day that it was kept.
    cdc(folder, "rollback", "cache")
    cdc(folder, "run", "--until-caught-up")
    cdc(folder, "verify")
