"""`cdc run --standby`: wait while another run is at work on the same sinks.

In:  what runs publish in the topic of runs. Out: whose run it is, or that there is none.
Invariant: nothing depends on it but when a run begins. That two runs never write both is held by the
sinks: each moves its position only where the run before it has left it.

Of several that wait one takes over. Who sees no run claims the sinks in the topic, and reads on up to
its claim: it takes over if nobody was at work at that place of the topic, other claims included. All
see the same order, so of claims of one sink the first is good and no other is. One that isn't is
followed by records of the run that it gave way to; were there none, it would count for SILENT_S.

A run that says that it has ended, or whose process has ended on this host, is over at once. Any other
is over when it has published nothing for SILENT_S, by the clock of the one that waits: clocks of hosts
differ.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from threading import Event
from typing import Any
from uuid import uuid4

import structlog

from cdc.apply.progress import LIVING, Progress, RunState
from cdc.config.settings import Pipeline
from cdc.errors import CdcError
from cdc.kafka.records import Record, Records
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.observe.run_log import WRITE_S, claim_entry, process_exists, write_entries

SILENT_S = 4 * WRITE_S
"""A run that publishes nothing for so long is dead: it writes every WRITE_S seconds."""
LOOK_S = 1.0
"""Seconds between two looks at the topic."""
log = structlog.get_logger()


class OtherRuns:
    """The runs at work on some sinks, as the topic of runs tells. One thread uses it."""

    def __init__(
        self,
        kafka: Topics,
        topic: str,
        sinks: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka, self._topic, self._sinks, self._clock = kafka, topic, set(sinks), clock
        self.claimant = uuid4().hex
        """The name under which this one claims sinks."""
        self.before_claim: dict[str, str] = {}
        """By sink, the runs at work where this one's last claim stands in the topic."""
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._silent_s: dict[str, float] = {}
        """By sink: for how long its run has been silent while somebody listened."""
        self._looked_at = clock()
        self._tail = Tail(kafka, topic, begin=self._entries.clear, take=self.take)

    def at_work(self) -> dict[str, str]:
        """Read what is new: by sink, the host and process of the run at work on it. Raises
        ConnectorError.
        """
        if self._topic not in self._kafka.existing([self._topic]):
            return {}
        self.listen()
        self._tail.read()
        return self.living()

    def claim(self, records: Records) -> dict[str, str]:
        """Claim the sinks: the runs at work, as `at_work`, where the claim stands in the topic. If
        there are none, the sinks are this run's. Raises ConnectorError.
        """
        if self._topic not in self._kafka.existing([self._topic]):
            return {}
        self.before_claim = {}
        write_entries(records, self._topic, [claim_entry(self.claimant, self._sinks)])
        self._tail.read()
        return self.before_claim

    def listen(self) -> None:
        """Count the time since the last look as silence. Not more than two looks' worth: a broker
        that was away, or a standby that stood still, has heard nothing.
        """
        now = self._clock()
        heard_s = min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        self._silent_s = {sink: silent_s + heard_s for sink, silent_s in self._silent_s.items()}

    def take(self, record: Record) -> None:
        """Take a record of the topic."""
        kind, name, *_ = json.loads(record.key or b"[null, null]")
        if kind not in ("run", "claim") or not record.value:
            return
        entry = json.loads(record.value)
        if kind == "claim" and entry["claimant"] == self.claimant:
            self.before_claim = self.living()
            return
        for sink in self._sinks.intersection([name] if kind == "run" else entry["sinks"]):
            self._entries[sink], self._silent_s[sink] = entry, 0.0

    def living(self) -> dict[str, str]:
        """The runs that are neither over nor silent, as `at_work`."""
        return {
            sink: f"{entry['host']}/{entry['pid']}"
            for sink, entry in self._entries.items()
            if (RunState(entry["state"]) in LIVING or entry.get("restart_at"))
            and self._silent_s[sink] < SILENT_S
            and process_exists(entry)
        }


def outwait_others(
    pipeline: Pipeline,
    sinks: Collection[str],
    stopping: Event,
    say: Callable[[str], object],
    tick: Callable[[list[Progress]], object],
) -> None:
    """Wait until no other run is at work on any of the sinks, or `stopping` is set. While the broker
    is away nobody can tell, so that is waited for, too. `tick` is called at each look, without any
    progress.
    """
    reported = ""
    with Topics(pipeline.kafka) as kafka, closing(Records(pipeline.kafka)) as records:
        others = OtherRuns(kafka, pipeline.runs_topic, sinks)
        while not stopping.is_set() and (news := _news_of(others, records)):
            tick([])
            if news != reported:
                say(news)
                reported = news
            stopping.wait(LOOK_S)
    if reported and not stopping.is_set():
        say("taking over: no other run is at work")
        log.info("taking_over", sinks=sorted(sinks))


def _news_of(others: OtherRuns, records: Records) -> str:
    """Say what is waited for; nothing where nothing is."""
    try:
        runs = others.at_work() or others.claim(records)
    except CdcError as error:
        return f"standing by: {error.message}"
    places = ", ".join(sorted(set(runs.values())))
    return f"standing by: {places} is at work on {', '.join(sorted(runs))}" if runs else ""
