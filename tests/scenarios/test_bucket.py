"""A warehouse in an object store: written, away and back, rebuilt, rolled back, verified, destroyed."""

from typing import TYPE_CHECKING

from cdc.cli.destroy import prepare
from cdc.runtime.context import Context
from tests.support import buckets
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def test_a_warehouse_in_a_bucket(world: "World") -> None:
    """The bucket goes away for a while: its sink reports it and goes on once it is back, and holds up no other sink."""
    bucket = buckets.new_bucket(world.name)
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.write_file("public.items")
    in_a_folder = world.file.read_text()
    world.file.write_text(in_a_folder.replace(str(world.warehouse), f"{bucket}/house"))
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.sql("INSERT INTO items SELECT n, n FROM generate_series(1, 1000) n")
        world.settle()
        world.sql("UPDATE items SET n = -n WHERE id % 3 = 0", "DELETE FROM items WHERE id % 7 = 0")
        world.settle()
        objects = buckets.take_objects(bucket)
        try:
            world.sql("UPDATE items SET n = n + 1")
            world.settle(sinks=["search", "cache"])
            wait_until(
                lambda: "NoSuchBucket" in world.cdc("status").stdout, 60, "status to report it"
            )
            doctor = world.json("doctor", code=7)["findings"]
            assert [
                finding["sink"] for finding in doctor if finding["code"] == "sink-unreachable"
            ] == ["warehouse"]
        finally:
            buckets.put_objects(bucket, objects)
        world.settle()
        world.assert_equal()
        world.rebuild("warehouse")
        world.assert_equal()
        world.sql("UPDATE items SET n = 0 WHERE id < 100")
        world.settle()
        world.rollback("warehouse")
    verified = run_with_spark(world.words("verify"))
    assert verified.returncode == 0, verified.stdout
    prepare(Context(world.file, world.folder)).run(lambda _: None, watch_s=0.0)
    assert buckets.take_objects(bucket) == {}
