"""The links of the pipeline: each a TCP proxy on a port of its own, which faults disturb."""

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
DROPPED = 0.1
"""The share of answers that are dropped. At 1 no client would get beyond its greeting."""
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with which a closed connection is reset."""


class Disturbance(StrEnum):
    DELAY = "delay"
    """Each chunk waits for 0.2 s, in both directions."""
    CUT = "cut"
    """Nothing arrives, and nobody is told."""
    RESET = "reset"
    """Open connections are reset, and so are new ones."""
    ONE_WAY = "one-way"
    """Requests arrive, answers don't."""
    NO_ANSWER = "no-answer"
    """One answer in ten is dropped after its request was forwarded, and the connection is reset."""


class Link:
    """The way to one server. `target` is its port; clients use `port`."""

    def __init__(self, name: str, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.target = 0
        self.disturbance: Disturbance | None = None
        self._loop = loop
        self._chance = random.Random(f"{seed} {name}")
        self._connections: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        asyncio.run_coroutine_threadsafe(self._listen(), loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)

    @contextmanager
    def disturbed(self, disturbance: Disturbance) -> Iterator[None]:
        """Disturb all connections until the block ends. What was held back then arrives."""
        self._set(disturbance)
        try:
            yield
        finally:
            self._set(None)

    def _set(self, disturbance: Disturbance | None) -> None:
        asyncio.run_coroutine_threadsafe(self._change(disturbance), self._loop).result()

    async def _change(self, disturbance: Disturbance | None) -> None:
        self.disturbance = disturbance
        self._changed.set()
        self._changed = asyncio.Event()
        if disturbance is Disturbance.RESET:
            for writer in list(self._connections):
                _reset(writer)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

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
                    await self._changed.wait()
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
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made: dict[str, Link] = {}
    try:
        for name in names:
            made[name] = Link(name, seed, loop)
        yield made
    finally:
        for link in made.values():
            link.close()
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
