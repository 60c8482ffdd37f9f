"""Spark's daemon of Python workers, which imports what they need, and ends without tracebacks.

Spark starts it as `python -m cdc.spark.python_worker`, and it forks a worker for each task that
runs at once. Workers share the memory of what it has imported, and begin without importing.

A worker that waits for its next task still answers when Spark closes its Unix socket, and would
print a traceback. A service manager sends SIGTERM to all processes of a service at once. The
workers ignore it, so that they finish the batch at hand; they end when Spark closes their daemon's
standard input.
"""

import gc
import os
import signal
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pyspark.daemon

DAEMON = "cdc.spark.python_worker"
MODULES = "CDC_WORKER_MODULES"
"""The variable of the environment that names the modules to import, separated by commas."""
_work = pyspark.daemon.worker


def worker(sock: Any, authenticated: bool) -> int:
    """Run one task. Returns 0 when the worker may take another one."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


def _import_modules() -> None:
    """Import the modules for all workers, and keep their objects out of every garbage collection.

    A worker that collected them would write to their pages, and so get copies of its own.
    """
    for name in filter(None, os.environ.get(MODULES, "").split(",")):
        # What is missing is reported by the task that needs it.
        with suppress(ModuleNotFoundError):
            import_module(name)
    gc.collect()
    gc.freeze()


def _handle(number: int, handler: Any) -> Any:
    """Set a signal's handler as `signal.signal` does, but ignore SIGTERM."""
    return signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else handler)


if __name__ == "__main__":
    vars(pyspark.daemon)["signal"] = SimpleNamespace(**{**vars(signal), "signal": _handle})
    pyspark.daemon.worker = worker
    _import_modules()
    pyspark.daemon.manager()
