"""The faults by name, and which of them a seed chooses when."""

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import psycopg

from cdc.chaos.faults import frozen
from cdc.kafka.clients import connection_settings, kafka
from chaos.links import Disturbance
from chaos.scene import PIPELINE, SINKS, Scene, Violated
from chaos.stack import LINKS, Stack
from chaos.views import wait_until

SERVERS = ("postgres", "kafka", "connect", "elasticsearch", "redis")
HOLD_S = (1.0, 10.0)
TWICE = 0.2
"""The share of steps with two faults at once."""
FOUND_S = 300.0
"""The longest time until a refusal is reported."""
PART_S = 90.0
PAGE_BYTES = 4096
Inject = Callable[[Scene], AbstractContextManager[None]]


@contextmanager
def ended(end: Callable[[Stack, str], None], server: str, scene: Scene) -> Iterator[None]:
    end(scene.stack, server)
    try:
        yield
    finally:
        scene.stack.start(server)


def server_frozen(server: str, scene: Scene) -> AbstractContextManager[None]:
    return scene.stack.frozen(server)


@contextmanager
def run_killed(part: str, scene: Scene) -> Iterator[None]:
    if not wait_until(lambda: scene.run.kill(part), PART_S):
        raise Violated([f"cdc run has no {part} to kill"])
    yield


@contextmanager
def run_restarted(scene: Scene) -> Iterator[None]:
    scene.run.restart()
    yield


def run_frozen(scene: Scene) -> AbstractContextManager[None]:
    return frozen(scene.run.parts("all"))


def disturbed(link: str, disturbance: Disturbance, scene: Scene) -> AbstractContextManager[None]:
    return scene.links[link].disturbed(disturbance)


@contextmanager
def index_blocked(scene: Scene) -> Iterator[None]:
    scene.index.block("items", blocked=True)
    try:
        yield
    finally:
        scene.index.block("items", blocked=False)


@contextmanager
def cache_full(scene: Scene) -> Iterator[None]:
    server = scene.cache.server
    server.config_set("maxmemory", server.info("memory")["used_memory"])
    try:
        yield
    finally:
        server.config_set("maxmemory", 0)


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    filler = scene.warehouse_folder / "filler"
    # Down to the last page, because a version of a table is a small file.
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(PAGE_BYTES)):
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def slot_dropped(scene: Scene) -> Iterator[None]:
    with psycopg.connect(scene.stack.dsn, autocommit=True) as connection:

        def drop() -> bool:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active",
                [PIPELINE],
            )
            connection.execute("SELECT pg_drop_replication_slot(%s)", [PIPELINE])
            return True

        if not wait_until(drop, PART_S, 0.05):
            raise Violated(["the slot can't be dropped"])
    yield
    refused(scene, "slot-lost")
    scene.cdc("register", "--new-snapshot", "--yes")


@contextmanager
def topic_deleted(scene: Scene) -> Iterator[None]:
    with kafka.KafkaAdminClient(**connection_settings(scene.kafka)) as admin:
        admin.delete_topics([f"{PIPELINE}.public.items"])
    yield
    refused(scene, "topic-missing")
    scene.cdc("register")
    for sink in SINKS:
        scene.cdc("rebuild", sink, "--table", "public.items")


def refused(scene: Scene, code: str) -> None:
    """Wait until `cdc status` or `cdc doctor` reports what only a command by hand repairs."""
    codes: set[str] = set()

    def reported() -> bool:
        for verb in ("status", "doctor"):
            answer = scene.ask(verb, "--json").stdout
            codes.update(finding["code"] for finding in json.loads(answer)["findings"])
        return code in codes

    if not wait_until(reported, FOUND_S, 1):
        raise Violated([f"{code} isn't reported, only {', '.join(sorted(codes))}"])


BY_HAND: Mapping[str, Inject] = {"slot dropped": slot_dropped, "topic deleted": topic_deleted}
"""Faults that end in a refusal: they are over once the documented commands have been run."""
DISK: Mapping[str, Inject] = {"warehouse disk full": disk_full}
"""Only where a small file system can be mounted."""
FAULTS: Mapping[str, Inject] = {
    **{f"{server} kill": partial(ended, Stack.kill, server) for server in SERVERS},
    **{f"{server} freeze": partial(server_frozen, server) for server in SERVERS},
    **{f"{server} restart": partial(ended, Stack.stop, server) for server in SERVERS},
    **{f"run kill {part}": partial(run_killed, part) for part in ("all", "jvm", "worker")},
    "run freeze": run_frozen,
    "run restart": run_restarted,
    **{
        f"link {link} {disturbance}": partial(disturbed, link, disturbance)
        for link, disturbance in product(LINKS, Disturbance)
    },
    "index read-only": index_blocked,
    "cache full": cache_full,
    **DISK,
    **BY_HAND,
}


def schedule(seed: int, names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield steps without end: the faults that begin together, and the seconds for which they last.

    Every fault comes once before one comes again.
    """
    chance = random.Random(f"{seed} faults")
    while True:
        deck = list(names)
        chance.shuffle(deck)
        while deck:
            taken = [deck.pop()]
            if deck and chance.random() < TWICE and not {taken[0], deck[-1]} & BY_HAND.keys():
                taken.append(deck.pop())
            yield tuple(taken), round(chance.uniform(*HOLD_S), 1)


@contextmanager
def small_file_system(folder: Path, mebibytes: int) -> Iterator[bool]:
    """Mount one at a folder; whether that was possible."""
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(folder)]
    mounted = not subprocess.run(["mount", *options], capture_output=True, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)
