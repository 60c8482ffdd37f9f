"""Run several sinks' streams side by side: start, watch, stop; publish what each of them does.

A stream that fails for good ends alone; the others go on.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from cdc.change import Applied, Progress
from cdc.errors import CdcError
from cdc.stream import Stream

TICK_S = 1.0


def supervise(
    streams: Sequence[Stream],
    stopping: threading.Event,
    *,
    until_caught_up: bool = False,
    for_s: float | None = None,
    on_tick: Callable[[list[Progress]], None] = lambda _: None,
) -> list[CdcError]:
    """Run until every stream has ended, the time is over or `stopping` is set; the batch at hand is finished.

    Returns the errors that ended streams, in the order of the streams.

    Raises:
        Exception: a stream's failure that is no CdcError, so a bug.
    """
    failures: dict[int, BaseException] = {}
    threads = [
        threading.Thread(target=_run, args=(at, stream, until_caught_up, failures), name=stream.sink.name, daemon=True)
        for at, stream in enumerate(streams)
    ]
    end = time.monotonic() + for_s if for_s is not None else None
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if stopping.wait(TICK_S) or (end and time.monotonic() > end):
            break
        on_tick([stream.measure() for stream in streams])
    for stream in streams:
        stream.stop()
    for thread in threads:
        thread.join()
    on_tick([stream.measure() for stream in streams])
    errors = [failures[at] for at in sorted(failures)]
    for error in errors:
        if not isinstance(error, CdcError):
            raise error
    return [error for error in errors if isinstance(error, CdcError)]


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set."""
    stopping = threading.Event()
    restore = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in restore.items():
            signal.signal(number, handler)


def _run(at: int, stream: Stream, until_caught_up: bool, failures: dict[int, BaseException]) -> None:
    try:
        stream.run(until_caught_up=until_caught_up)
    except Exception as error:
        failures[at] = error


def publish(folder: Path, progress: Sequence[Progress]) -> None:
    """Leave each sink's progress where `cdc status` on this machine finds it; nothing else depends on it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in progress:
        path = folder / f"{one.sink}.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({**asdict(one), "pid": os.getpid(), "at": time.time()}), encoding="utf-8")
        fresh.replace(path)


def published(folder: Path) -> dict[str, Progress]:
    """What `publish` left; a run that has died since is shown as such."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        pid, at = record.pop("pid"), record.pop("at")
        one = Progress(**{**record, "applied": Applied(**record["applied"])})
        if one.state in ("starting", "running", "waiting") and not _alive(pid, at):
            one.state = "not running"
        found[one.sink] = one
    return found


def _alive(pid: int, at: float) -> bool:
    """A run writes every second; a pid alone may have been given to somebody else since."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return time.time() - at < 30
