"""Health checks: one real request per server. A server that is away or still starts gives False,
never an error.
"""

import json
import socket
import struct
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

TIMEOUT_S = 3.0
DEBEZIUM = "io.debezium.connector.postgresql.PostgresConnector"


def postgres(port: int) -> bool:
    """Run a query."""
    import psycopg

    with suppress(psycopg.Error):
        conninfo = f"host=127.0.0.1 port={port} user=postgres dbname=postgres connect_timeout={TIMEOUT_S:.0f}"
        with psycopg.connect(conninfo) as connection:
            return connection.execute("select 1").fetchone() == (1,)
    return False


def kafka(port: int) -> bool:
    """Ask for metadata (version 1, all topics): ready when the broker lists itself.

    Written by hand, because eight bytes of the answer are enough, and a client library takes longer
    to load.
    """
    client = b"cdc"
    request = struct.pack(f">hhih{len(client)}si", 3, 1, 7, len(client), client, 0)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        head = connection.recv(12, socket.MSG_WAITALL)
        if len(head) == 12:
            _, correlation, brokers = struct.unpack(">iii", head)
            return bool(correlation == 7 and brokers > 0)
    return False


def connect(port: int) -> bool:
    """Ask the worker for its plugins, and for its connectors, which it knows once it has joined its
    group.
    """
    plugins = _get(port, "/connector-plugins")
    if not any(plugin.get("class") == DEBEZIUM for plugin in plugins or []):
        return False
    return _get(port, "/connectors") is not None


def elasticsearch(port: int) -> bool:
    """Ask for the cluster's health (this distribution answers GET / with 405)."""
    health = _get(port, "/_cluster/health")
    return bool(health) and health.get("status") in {"yellow", "green"}


def redis(port: int) -> bool:
    """PING; a server that still loads its file answers with an error."""
    import redis as client

    with (
        suppress(client.RedisError),
        client.Redis(port=port, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as r,
    ):
        return bool(r.ping())
    return False


def _get(port: int, path: str) -> Any:
    """Ask with a plain connection: a client library would read the system's certificates for each
    request, which took more CPU than a server's start.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    with closing(connection), suppress(OSError, HTTPException, ValueError):
        connection.request("GET", path)
        answer = connection.getresponse()
        return json.load(answer) if answer.status == 200 else None
    return None


def last_lines(log: Path, count: int = 15) -> str:
    """Return the end of a log, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(f"    {line[:400]}" for line in lines[-count:])
