"""Abort a transaction that a failed task keeps open.

A task that fails while it commits records reads its stored offsets before it gives up its
transaction. That read waits for open transactions, and so for the task's own. Until the broker
aborts it, after a minute, Connect reports the task as RUNNING. The worker's other connectors wait
too, because the offsets of all are in one topic.

In:  the broker's transactions. Out: the transaction is aborted, and the task ends with its error.
Invariant: a healthy task loses a transaction only if it was open for seconds. The task then reads
the same changes again.
"""

import time

from cdc.config.settings import Pipeline
from cdc.kafka.transactions import OpenTransaction, end_transaction, find_open

OPEN_S = 3.0
"""Seconds after which an open transaction counts as stuck. It has one batch of the connector, and
normally takes milliseconds.
"""
FAILS_S = 5.0
"""Seconds within which a task fails whose transaction was aborted, and Connect reports it."""
LONGEST_S = 60.0
"""Seconds after which the broker aborts an open transaction."""


class StuckTransaction:
    """Finds a transaction of the pipeline that stays open, and aborts it. Not thread-safe."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._bootstrap = pipeline.kafka
        self._name = pipeline.pipeline
        self._seen: OpenTransaction | None = None
        self._since = 0.0
        self._patience_s = OPEN_S
        self._fails_until = 0.0

    def look(self) -> bool:
        """Look once, and abort a transaction that has been open for too long. Returns whether to
        look again soon: a transaction stays open, or was just aborted and the task is about to
        fail.

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
            # If the task was healthy after all, its next transaction gets more time.
            self._patience_s = min(2 * self._patience_s, LONGEST_S)
        return True
