"""Time and threads, as those who wait are given them. Standard library only."""

import threading
import time
from collections.abc import Callable


class Clock:
    """The computer's clock, and its threads."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event, so many seconds at most. Returns whether it is set."""
        return event.wait(seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def start(self, work: Callable[[], object]) -> Callable[[], None]:
        """Do work in a thread. Returns the function that waits for its end."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread.join
