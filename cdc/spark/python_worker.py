"""Spark's daemon of Python workers, quiet at the end: `python -m cdc.spark.python_worker`, which Spark starts.

A worker that waits for its next task still answers when Spark closes its Unix socket, and would print a traceback. A
service's manager sends SIGTERM to all processes of a service at once: workers finish the batch at hand all the same,
and end when Spark closes their daemon's standard input.
"""

import signal
from types import SimpleNamespace
from typing import Any

import pyspark.daemon

_work = pyspark.daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """Take one task; other than 0: there will be no further one."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


def _handle(number: int, handler: Any) -> Any:
    """`signal.signal`, but for SIGTERM."""
    return signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else handler)


if __name__ == "__main__":
    vars(pyspark.daemon)["signal"] = SimpleNamespace(**{**vars(signal), "signal": _handle})
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
