"""Ports of a stack: free ones, chosen once, then kept for the life of a state folder."""

import random
import socket
from collections.abc import Iterable

import psutil

from cdc.errors import StackError

# Below the range that the kernel hands to outgoing connections: a client that keeps knocking at a
# stopped server could otherwise be given that very port, connect to itself, and keep the server
# from coming back.
RANGE = range(15_000, 32_000)


def choose(names: Iterable[str], reserved: Iterable[int] = ()) -> dict[str, int]:
    """Give each name a port of its own that is free on 127.0.0.1 now and isn't among `reserved`."""
    candidates = random.sample(RANGE, len(RANGE))
    free = (port for port in candidates if port not in set(reserved) and is_free(port))
    return dict(zip(names, free, strict=False))


def is_free(port: int) -> bool:
    """Return whether a server could listen on a port of 127.0.0.1."""
    with socket.socket() as probe:
        # As the servers do: connections of the last run that are still closing don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def require_free(name: str, port: int) -> None:
    """Refuse to start a server whose port somebody else has taken meanwhile."""
    if is_free(port):
        return
    pid = owner(port)
    holder = f"process {pid}" if pid else "another user's process"
    raise StackError(
        f"port {port} of {name} is taken by {holder}",
        hint=f"stop that process ({f'kill {pid}' if pid else f'ss -ltnp sport = :{port}'}), then: cdc up",
        service=name,
        port=port,
    )


def owner(port: int) -> int | None:
    """Return the pid that listens on a port, when the caller may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    listening = (
        c.pid
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
    )
    return next(listening, None)
