"""Entry point of the command `cdc`: it handles signals from the start, also while modules are still
imported.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

ASKING = "ask-"
"""The names of threads that `cdc.observe.collection` no longer waits for begin with this. While one of them
reads a warehouse, the process can't end by itself: Arrow's exit handler waits for the thread, and the thread
for the interpreter, which has ended.
"""


def main() -> NoReturn:
    """Run the command line, with signals handled before the slow imports."""
    signal.signal(signal.SIGINT, _leave)
    restored = signal.signal(signal.SIGTERM, _leave)
    from cdc.cli import verbs

    if "run" not in sys.argv:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, restored)
    try:
        verbs.main()
    except SystemExit as ended:
        if any(thread.name.startswith(ASKING) for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        raise


def _leave(number: int, _: object) -> NoReturn:
    """Exit before anything has begun: 0 for `cdc run`, 128 and the signal for any other verb, as
    shells expect.
    """
    os._exit(0 if "run" in sys.argv else 128 + number)


if __name__ == "__main__":
    main()
