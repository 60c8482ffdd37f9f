"""What runs and commands tell in their topics, read on from look to look.

In:  the pipeline, at each look. Out: `Activity`.
Invariant: reads only. A look costs the records since the one before it, however long runs have been
telling.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from cdc.apply.progress import Progress
from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.generations.registry import Generations, Registry
from cdc.kafka.pool import TopicsPool
from cdc.kafka.topics import Topics
from cdc.observe.run_log import LagSample, RunTopic


class Activity(NamedTuple):
    """What runs do, as they last published it, their lag of the last day, and what commands have
    registered; by sink.
    """

    progress: Mapping[str, Progress]
    lags: Mapping[str, Sequence[LagSample]]
    generations: Mapping[str, Generations]


class ActivityReader:
    """Reads through a connection that stays open. Any thread may call it, while none is at it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._address: tuple[str, str] | None = None
        self._topics: tuple[Topics, RunTopic, Registry] | None = None

    def read(self, pipeline: Pipeline) -> Activity:
        """Read what is new. Raises ConnectorError: the broker is away, or the last call hasn't
        ended.
        """
        if not self._lock.acquire(blocking=False):
            raise ConnectorError("The last look at the topic of runs hasn't ended.", hint="wait")
        try:
            kafka, run_topic, registry = self._connected(pipeline)
            kafka.require_reachable()
            runs = run_topic.read()
            registry.read()
            generations = {sink: registry.for_sink(sink) for sink in pipeline.sinks}
            return Activity(runs.progress, runs.lags, generations)
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def _connected(self, pipeline: Pipeline) -> tuple[Topics, RunTopic, Registry]:
        """Return the topics, through another connection if the file names other servers now."""
        address = (pipeline.kafka, pipeline.pipeline)
        if self._topics is None or self._address != address:
            self._disconnect()
            kafka = Topics(pipeline.kafka)
            self._topics = kafka, RunTopic(pipeline, kafka), Registry(pipeline, kafka)
            self._address = address
        return self._topics

    def close(self) -> None:
        """Close the connection, unless a `read` hangs at it. The next one makes another."""
        if self._lock.acquire(blocking=False):
            self._disconnect()
            self._lock.release()

    def _disconnect(self) -> None:
        if self._topics:
            self._topics[0].close()
        self._topics = None


class LookConnections:
    """What stays open from look to look. Any thread may use it."""

    def __init__(self) -> None:
        self.topics, self.activity = TopicsPool(), ActivityReader()

    def close(self) -> None:
        """Close what nobody uses at this moment."""
        self.topics.close()
        self.activity.close()
