"""Spark's thread waits for the owner's, and never for one that is gone."""

import threading

from cdc.apply.handover import Handover
from tests.support.wait import wait_until


def start_giver(handover: Handover[int], content: int) -> threading.Thread:
    thread = threading.Thread(target=handover.give, args=(content,), daemon=True)
    thread.start()
    return thread


def test_whoever_gives_waits_until_the_owner_is_done() -> None:
    handover = Handover[int]()
    giver = start_giver(handover, 7)
    with handover.receive(5) as content:
        assert content == 7
        assert giver.is_alive()
    giver.join(5)
    assert not giver.is_alive()


def test_nobody_waits_for_an_owner_that_is_gone() -> None:
    handover = Handover[int]()
    giver = start_giver(handover, 7)
    wait_until(giver.is_alive, 5, "the batch to be given")
    handover.close()
    for thread in (giver, start_giver(handover, 8)):
        thread.join(5)
        assert not thread.is_alive()


def test_the_owner_is_woken() -> None:
    handover = Handover[int]()
    handover.wake()
    with handover.receive(60) as content:
        assert content is None
