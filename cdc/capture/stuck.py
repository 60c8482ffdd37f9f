"""End a transaction that a failed task keeps open.

A task that fails while its records are committed asks for its stored offsets before it gives its
transaction up, and those are read only up to an open transaction: its own. Until the broker aborts
that, after a minute, Connect calls the task RUNNING, and every other connector of the worker waits
at the same topic of offsets.

In:  the broker's transactions. Out: the transaction is aborted, so that the task ends with the
error that it had.
Invariant: a task that is at work loses a transaction only if that was open for seconds; it reads
the same changes again then.
"""

import time

from cdc.config.settings import Pipeline
from cdc.kafka.transactions import OpenTransaction, end_transaction, find_open

OPEN_S = 3.0
"""Seconds after which a transaction is taken for one that nobody commits. Each takes milliseconds:
it holds what the connector sends at once.
"""
FAILS_S = 5.0
"""Seconds in which a task notices that its transaction is over, and Connect says that it failed."""
LONGEST_S = 60.0
"""After so many seconds the broker has aborted it."""


class StuckTransaction:
    """Looks for the pipeline's transaction that stays open. One thread uses it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._bootstrap = pipeline.kafka
        self._name = pipeline.pipeline
        self._seen: OpenTransaction | None = None
        self._since = 0.0
        self._patience_s = OPEN_S
        self._fails_until = 0.0

    def look(self) -> bool:
        """Look once, and end the transaction that has been open for too long. False if none is
        open, or another one than at the last look; not yet just after the end of one, when the task
        is about to fail.

        Raises:
            KafkaUnavailable: the broker can't be reached, or refuses.
        """
        # Connect's name for the writer of a task: its group, the connector, the task's number.
        opened = find_open(self._bootstrap, f"-{self._name}-0", f"{self._name}.")
        former = self._seen
        self._seen = opened[0] if opened else None
        if self._seen is None:
            return time.monotonic() < self._fails_until
        if self._seen != former:
            self._since = time.monotonic()
            return former is None
        if time.monotonic() - self._since >= self._patience_s:
            end_transaction(self._bootstrap, self._seen.name)
            self._fails_until = time.monotonic() + FAILS_S
            # Where the task was at work after all, it gets longer for what it does.
            self._patience_s = min(2 * self._patience_s, LONGEST_S)
        return True
