"""Three brokers, one of which is killed while an application writes."""

from typing import TYPE_CHECKING

import pytest

from tests.support import writer
from tests.support.brokers import three_brokers
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

KAFKA = """\
kafka:
  brokers: ${CDC_KAFKA}
  replication_factor: 3
  min_insync_replicas: 2
"""


def test_a_broker_that_is_killed_is_done_without(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture and all sinks go on with the other two; the killed one catches up when it is back."""
    world.sql(writer.TABLE, writer.FILL)
    with three_brokers() as kafka:
        monkeypatch.setenv("CDC_KAFKA", kafka.addresses)
        monkeypatch.setenv("CDC_CONNECT", kafka.connect)
        world.write_file("public.busy")
        world.file.write_text(world.file.read_text() + KAFKA)
        world.cdc("migrate")
        world.cdc("register")
        with world.running():
            world.settle()
            with writer.writing(world.dsn, 100) as progress:
                wait_until(lambda: progress.changes > 100, 60, "the application to write")
                killed = kafka.leader(f"{world.name}.public.busy")
                killed.kill()
                before = world.offsets("cache")
                changes = progress.changes
                wait_until(lambda: progress.changes > changes + 300, 60, "it to go on")
                world.wait_for("cache", before + 300)
            world.settle()
            assert max(kafka.copies()) == 2
            world.assert_equal()
            killed.start()
            with writer.writing(world.dsn, 100):
                wait_until(lambda: kafka.copies() == {3}, 120, "the broker to catch up")
            world.settle()
        world.assert_equal()
        assert {state.error for state in world.progress().values()} == {None}
