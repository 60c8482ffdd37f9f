"""The links of the pipeline: each is a TCP proxy, which faults disturb."""

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

CHUNK_BYTES = 1 << 16
DELAY_S = 0.2
POLL_S = 0.02
DROPPED = 0.1
"""The share of answers that are dropped. At 1 no client would get beyond its greeting."""
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with which a closed connection is reset."""


class Disturbance(StrEnum):
    DELAY = "delay"
    """Each chunk waits for 0.2 s, in both directions."""
    CUT = "cut"
    """Nothing arrives, and both sides stay connected."""
    RESET = "reset"
    """Open connections are reset, and so are new ones."""
    ONE_WAY = "one-way"
    """Requests arrive, answers don't."""
    NO_ANSWER = "no-answer"
    """One answer in ten is dropped after its request was forwarded, and the connection is reset."""


class Link:
    """The way to one server. `target` is its port; clients use `port`."""

    target: int
    port: int

    def __init__(self, name: str, seed: int) -> None:
        self.disturbance: Disturbance | None = None
        self._chance = random.Random(f"{seed} {name}")
        self._connections: set[asyncio.StreamWriter] = set()

    @contextmanager
    def disturbed(self, disturbance: Disturbance) -> Iterator[None]:
        """Disturb all connections until the block ends. What was held back then arrives."""
        self.disturbance = disturbance
        if disturbance is Disturbance.RESET:
            self._loop.call_soon_threadsafe(self._reset_all)
        try:
            yield
        finally:
            self.disturbance = None

    def _reset_all(self) -> None:
        for writer in list(self._connections):
            _reset(writer)

    async def listen(self) -> asyncio.Server:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.disturbance is Disturbance.RESET:
            _reset(writer)
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, far_writer)
        self._connections.update(pair)
        ways = (
            self._pass_on(reader, far_writer, answers=False),
            self._pass_on(far_reader, writer, answers=True),
        )
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            # The end of one direction is the end of both: no server here goes on after half a close.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for end in pair:
                self._connections.discard(end)
                end.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                while self._holds(answers=answers):
                    await asyncio.sleep(POLL_S)
                if self.disturbance is Disturbance.DELAY:
                    await asyncio.sleep(DELAY_S)
                if answers and self._drops():
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()

    def _holds(self, *, answers: bool) -> bool:
        return self.disturbance is Disturbance.CUT or (
            answers and self.disturbance is Disturbance.ONE_WAY
        )

    def _drops(self) -> bool:
        return self.disturbance is Disturbance.NO_ANSWER and self._chance.random() < DROPPED


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    writer.transport.abort()


@contextmanager
def links(names: tuple[str, ...], seed: int) -> Iterator[dict[str, Link]]:
    """Serve links by name, on an event loop in a thread, until the block ends."""
    made = {name: Link(name, seed) for name in names}
    listening = threading.Event()
    ending = threading.Event()

    async def serve() -> None:
        servers = [await link.listen() for link in made.values()]
        listening.set()
        while not ending.is_set():
            await asyncio.sleep(POLL_S)
        for server in servers:
            server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    listening.wait()
    try:
        yield made
    finally:
        ending.set()
        thread.join()
