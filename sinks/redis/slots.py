"""Slots of a cluster: many requests at once, each to the node that has its slot."""

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from cdc.redis.server import Switched, cluster_errors

SLOTS = range(REDIS_CLUSTER_HASH_SLOTS)


class Call(NamedTuple):
    """A call of a script: all of its keys are in one slot."""

    slot: int
    keys: Sequence[str]
    arguments: Sequence[str | int | bytes]


def slot_of(key: str) -> int:
    slot: int = key_slot(key.encode())
    return slot


@lru_cache(maxsize=1)
def tags() -> Sequence[str]:
    """Make a hash tag for each slot."""
    found: dict[int, str] = {}
    for number in itertools.count():
        found.setdefault(slot_of(str(number)), str(number))
        if len(found) == len(SLOTS):
            return [found[slot] for slot in SLOTS]
    raise AssertionError


def ask(server: Any, requests: Sequence[tuple[int, Sequence[Any]]]) -> list[Any]:
    """Send commands, each to the node that has its slot. An answer may be an error."""
    pipeline = server.pipeline()
    with cluster_errors():
        for slot, words in requests:
            # The client would ask a server where the keys are in a call of a script.
            node = server.nodes_manager.get_node_from_slot(slot)
            pipeline.execute_command(*words, target_nodes=node)
        return list(pipeline.execute(raise_on_error=False))


def call(server: Any, source: str, calls: Sequence[Call]) -> list[Any]:
    """Call a script many times, in any order; raises the first error."""
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    requests = [(slot, ("EVALSHA", sha, len(keys), *keys, *rest)) for slot, keys, rest in calls]
    answers = ask(server, requests)
    unknown = [i for i, at in enumerate(answers) if isinstance(at, redis.exceptions.NoScriptError)]
    if unknown:
        server.script_load(source)
        again = ask(server, [requests[i] for i in unknown])
        for i, answer in zip(unknown, again, strict=True):
            answers[i] = answer
    return checked(answers)


def checked(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


class Owned(NamedTuple):
    """A range of slots that one node has. lowest: the lowest slot of that node."""

    start: int
    lowest: int


def owned(server: Any) -> list[Owned]:
    """List the ranges of slots by what this client knows: it learns of a move when it meets it."""
    lowest: dict[str, int] = {}
    ranges = []
    manager = server.nodes_manager
    with cluster_errors():
        # A slot that nobody owns raises. Asking for each of them takes 38 ms, which a batch would wait for.
        if len(manager.slots_cache) < len(SLOTS):
            for slot in SLOTS:
                manager.get_node_from_slot(slot)
        names = [manager.slots_cache[slot][0].name for slot in SLOTS]
    for name, slots in itertools.groupby(SLOTS, key=names.__getitem__):
        start = next(slots)
        ranges.append(Owned(start, lowest.setdefault(name, start)))
    return ranges


def primaries(server: Any) -> object:
    """Return what changes when a node is replaced, starts again, or gives slots away.

    Raises:
        Switched: slots move now.
    """
    with cluster_errors():
        server.nodes_manager.initialize()
    found = []
    for node in server.get_primaries():
        replid = server.info("replication", target_nodes=node).get("master_replid")
        nodes = server.execute_command("CLUSTER NODES", target_nodes=node).values()
        own = next(entry for entry in nodes if "myself" in entry["flags"])
        if own["migrations"]:
            raise Switched("slots move during a scan")
        found.append((replid, str(own["slots"])))
    return sorted(found)
