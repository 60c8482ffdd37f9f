"""A pipeline whose index is a secured cluster: filled, locked out and let in again, rebuilt, verified, destroyed."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.cli.destroy import prepare
from cdc.runtime.context import Context
from tests.support.secured_index import PASSWORD, USER, secured_index
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def test_an_index_on_a_secured_cluster(world: "World", tmp_path: Path) -> None:
    """Its password is changed under the run: that is reported, holds up no other sink, and passes by itself."""
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    with secured_index() as index:
        world.write_file("public.items")
        nodes = ", ".join(f'"{url}"' for url in index.urls)
        login = f'ca: {index.ca}, user: {USER}, password: "${{file:{secret}}}"'
        search = f"search: {{type: elasticsearch, nodes: [{nodes}], {login}}}"
        world.file.write_text(re.sub("search: .*", lambda _: search, world.file.read_text()))
        world.cdc("migrate")
        world.cdc("register")
        with world.process():
            world.sql("INSERT INTO items SELECT n, n FROM generate_series(1, 1000) n")
            world.settle()
            index.set_user(USER, "another-4711")
            wait_until(
                lambda: "doesn't accept the login" in world.cdc("status").stdout,
                60,
                "status to report it",
            )
            world.sql("UPDATE items SET n = -n WHERE id % 3 = 0", "DELETE FROM items WHERE id < 9")
            world.settle(sinks=["cache", "warehouse"])
            secret.write_text("another-4711")
            world.settle()
            world.assert_equal()
            world.rebuild("search")
            world.assert_equal()
            world.sql("UPDATE items SET n = 0 WHERE id < 100")
            world.settle()
            world.rollback("search")
        verified = run_with_spark(world.words("verify"))
        assert verified.returncode == 0, verified.stdout
        prepare(Context(world.file, world.folder)).run(lambda _: None, watch_s=0.0)
        with index.client() as client:
            left = client.get("/_cat/indices?h=index,docs.count").raise_for_status().text.split()
    assert left in (["cdc-position", "0"], [])
