"""Spark's daemon of Python workers, without tracebacks at its end.

Spark starts it as `python -m cdc.spark.python_worker`.

A worker that waits for its next task still answers when Spark closes its Unix socket, and would
print a traceback. A service manager sends SIGTERM to all processes of a service at once. The
workers ignore it, so that they finish the batch at hand; they end when Spark closes their daemon's
standard input.
"""

import signal
from types import SimpleNamespace
from typing import Any

import pyspark.daemon

_work = pyspark.daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """Run one task. Returns 0 when the worker may take another one."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


def _handle(number: int, handler: Any) -> Any:
    """Set a signal's handler as `signal.signal` does, but ignore SIGTERM."""
    return signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else handler)


if __name__ == "__main__":
    vars(pyspark.daemon)["signal"] = SimpleNamespace(**{**vars(signal), "signal": _handle})
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()
