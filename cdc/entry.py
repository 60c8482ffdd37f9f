"""Where the command line begins: it answers signals from its first moment on, also while its parts are still read."""

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    signal.signal(signal.SIGINT, _leave)
    restored = signal.signal(signal.SIGTERM, _leave)
    from cdc.cli import verbs

    if "run" not in sys.argv:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, restored)
    verbs.main()


def _leave(number: int, _: object) -> NoReturn:
    """Nothing has begun: the clean end of `cdc run`, and what a shell expects of any other verb."""
    os._exit(0 if "run" in sys.argv else 128 + number)


if __name__ == "__main__":
    main()
