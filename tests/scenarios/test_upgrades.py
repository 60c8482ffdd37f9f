"""A pipeline that a released version has left behind goes on under this one: from its positions, without
a rebuild, and equal to its source; and its log can make the views again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

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


def live_generations(folder: Path) -> dict[tuple[str, str], str]:
    """The generation that readers see of each view, by sink and table; a TRUNCATE begins a new one."""
    document = json.loads(cdc(folder, "generations", "--json"))
    return {
        (view["sink"], view["table"]): view["generations"][0]
        for view in document["generations"]
        if view["table"] != "public.emptied"
    }


def test_a_saved_state_goes_on(folder: Path) -> None:
    before = live_generations(folder)
    cdc(folder, "migrate")
    cdc(folder, "register")
    assert "saved.public.customers" in cdc(folder, "quarantine", "list")
    cache = redis.Redis.from_url(saved_state.endpoints(folder).redis, decode_responses=True)
    key = "saved:public.orders:3"
    stored = str(cache.get(key))
    # Nothing changes this row any more, so only a view that was made again would be without the mistake.
    cache.set(key, stored.replace("3.75", "3.76"))
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
    assert live_generations(folder) == before
    cache.set(key, stored)
    # The log of that version makes the views again.
    cdc(folder, "rebuild", "cache")
    cdc(folder, "verify")
