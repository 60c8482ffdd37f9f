"""Through which moment a view is proved equal to its source.

In:  a comparison's beginning, and its results. Out: a `Proof` of each view, in the registry.
Invariant: a proof is of one generation, and says nothing of another.

A comparison of all rows proves a view through the moment at which it began. A comparison of
only the rows with a change in the log since then moves the proof forward. Changes that the log
lacks, and rows changed only in a sink, are only found by the next comparison of all rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from cdc.config.settings import Pipeline
from cdc.errors import CdcError, SinkRejected, SinkUnavailable
from cdc.generations.registry import Proof, Registry
from cdc.kafka.topic_setup import ensure_topic
from cdc.kafka.topics import Topics
from cdc.model.generation import FIRST
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.sink.contract import Sink, positions
from cdc.verify.barrier import read_time_ms
from cdc.verify.comparison import Comparison, Starts, View

log = structlog.get_logger()


@dataclass(frozen=True)
class Beginning:
    """What a comparison begins with.

    at           Unix seconds by Postgres' clock: what is committed later lies at or above `ends`
    ends         of the topics, by table
    generations  by view, the one that is compared
    proofs       of these generations, by view
    """

    at: float
    ends: Mapping[str, Position]
    generations: Mapping[View, str]
    proofs: Mapping[View, Proof]

    def unproved_since(self, keeps_deletes_s: float) -> Starts:
        """Find where the changes begin that the proofs don't cover, by view.

        A view isn't in it if it isn't proved, its topic was replaced, or its proof is so old that the
        log may have lost a delete since. `keeps_deletes_s`: for how long Kafka keeps tombstones.
        """
        return {
            view: proof.offsets
            for view, proof in self.proofs.items()
            if (end := self.ends.get(view[1]))
            and proof.topic_id == end.topic_id
            and len(proof.offsets) == end.partition_count
            and self.at - proof.through < keeps_deletes_s / 2
        }


def begin(pipeline: Pipeline, tables: Sequence[Table], sinks: Sequence[Sink]) -> Beginning:
    """Note where the logs end and which generations are there, before anything is compared.

    Raises:
        SourceError, ConnectorError: a server can't be read.
    """
    with Topics(pipeline.kafka) as kafka:
        # Before the time: a record below these ends was committed before it.
        by_topic = kafka.ends([table.topic for table in tables])
        at = read_time_ms(pipeline) / 1000
        registry = Registry(pipeline, kafka).read()
    ends = {table.qualified: by_topic[table.topic] for table in tables}
    generations = _read_generations(tables, sinks)
    proofs = {
        (sink.name, name): proof
        for sink in sinks
        for name, proof in registry.for_sink(sink.name).proofs.items()
        if generations.get((sink.name, name)) == proof.generation
    }
    return Beginning(at, ends, generations, proofs)


def record(
    pipeline: Pipeline,
    beginning: Beginning,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    comparisons: Sequence[Comparison],
) -> None:
    """Record what a comparison has proved; a view that differs is proved no longer.

    Does nothing for a view of which another comparison has recorded something meanwhile, unless it
    differs. If the registry can't be written, a warning is logged.
    """
    try:
        with Topics(pipeline.kafka) as kafka:
            ensure_topic(kafka, pipeline, pipeline.generations_topic)
            registry = Registry(pipeline, kafka).read()
            present = _read_generations(tables, sinks)
            entries: list[tuple[Sequence[str], dict[str, object] | None]] = []
            for comparison in comparisons:
                view = comparison.sink, comparison.table
                generation = beginning.generations.get(view)
                current = registry.for_sink(comparison.sink).proofs.get(comparison.table)
                known = current if current and current.generation == generation else None
                if comparison.verdict == "differs" and known:
                    entries.append((("proof", *view), None))
                if generation is None or present.get(view) != generation:
                    continue
                if not comparison.equal or known != beginning.proofs.get(view):
                    continue
                if comparison.proves == "all":
                    complete_at = beginning.at
                elif comparison.proves == "changes" and known:
                    complete_at = known.complete_at
                else:
                    continue
                end = beginning.ends[comparison.table]
                proof = Proof(generation, beginning.at, complete_at, end.topic_id, end.offsets)
                entries.append((("proof", *view), vars(proof)))
            if entries:
                registry.write(*entries)
    except CdcError as error:
        log.warning("proof_not_recorded", error=error.message)


def _read_generations(tables: Sequence[Table], sinks: Sequence[Sink]) -> dict[View, str]:
    """Read the generation of each view; the first one's where nothing was ever applied. A view that
    can't be read isn't in it: the comparison reports why.
    """
    generations: dict[View, str] = {}
    for sink in sinks:
        own = [table for table in tables if table.is_in(sink.name)]
        try:
            checkpoints = positions(sink, own)
        except SinkUnavailable:
            continue
        except SinkRejected:
            # One view fails the request for all of them.
            if len(own) > 1:
                for table in own:
                    generations |= _read_generations([table], [sink])
            continue
        generations |= {
            (sink.name, name): checkpoint.generation if checkpoint else FIRST
            for name, checkpoint in checkpoints.items()
        }
    return generations
