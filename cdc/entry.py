"""Entry point of the command `cdc`: it handles signals from the start, also while modules are still
imported.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

ASKING = "ask-"
"""How the names of threads begin that `cdc.observe.collection` may have stopped waiting for. If one is reading
a warehouse, Arrow's exit handler waits for it, and it for the interpreter that has just ended: for ever.
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
