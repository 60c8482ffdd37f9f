"""An object store: moto's server, which speaks the protocol of S3 and has its conditional puts.

It is another process, because `DeltaTable.is_deltatable` holds Python's lock while it waits. Executors find
its address in the environment, which they get when Spark starts: so it is set before that. The server
starts when the first test asks for a bucket.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

_LISTENER = socket.create_server(("127.0.0.1", 0))
atexit.register(_LISTENER.close)
ENDPOINT = f"http://127.0.0.1:{_LISTENER.getsockname()[1]}"
"""Nobody else gets this port: the server takes over the socket. A client waits until it does."""
_servers: list[subprocess.Popen[bytes]] = []


def set_environment() -> None:
    """Point every client of this process, and of those that it starts, at the store."""
    os.environ.update(
        AWS_ENDPOINT_URL=ENDPOINT,
        AWS_ALLOW_HTTP="true",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
        AWS_DEFAULT_REGION="us-east-1",
    )


def new_bucket(name: str) -> str:
    """Make a bucket; returns its URL."""
    bucket = name.replace("_", "-")
    client().create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


def take_objects(url: str) -> dict[str, bytes]:
    """Remove a bucket; returns what was in it, by key."""
    bucket = url.removeprefix("s3://")
    objects = {}
    for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", ()):
            key = entry["Key"]
            objects[key] = client().get_object(Bucket=bucket, Key=key)["Body"].read()
            client().delete_object(Bucket=bucket, Key=key)
    client().delete_bucket(Bucket=bucket)
    return objects


def put_objects(url: str, objects: Mapping[str, bytes]) -> None:
    """Make a bucket that has these objects."""
    bucket = url.removeprefix("s3://")
    client().create_bucket(Bucket=bucket)
    for key, data in objects.items():
        client().put_object(Bucket=bucket, Key=key, Body=data)


@cache
def client() -> Any:
    """A client of the store, which is started for it."""
    import boto3

    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.buckets", str(_LISTENER.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[_LISTENER.fileno()],
    )
    # It ends with its standard input, which this process holds open.
    _servers.append(server)
    created = boto3.client("s3", endpoint_url=ENDPOINT, region_name="us-east-1")
    created.list_buckets()
    return created


def serve(listener: int) -> None:
    """Serve at a listening socket until the standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    # One request at a time: moto looks whether there is an object and then puts one, and no lock is held.
    server = make_server("127.0.0.1", 0, application, threaded=False, fd=listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
