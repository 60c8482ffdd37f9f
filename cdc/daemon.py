"""Spark's daemon of Python workers, quiet at the end: `python -m cdc.daemon`, which Spark starts on this machine.

A worker that waits for its next task still answers when Spark closes its Unix socket, and would print a traceback.
"""

from typing import Any

import pyspark.daemon

_work = pyspark.daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """Take one task; other than 0: there will be no further one."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
