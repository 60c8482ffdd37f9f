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
    ends         by topic
    generations  by view, the one that is compared
    proofs       by view, those of these generations
    """

    at: float
    ends: Mapping[str, Position]
    generations: Mapping[View, str]
    proofs: Mapping[View, Proof]

    def unproved_since(self, tables: Sequence[Table], sinks: Sequence[Sink]) -> Starts:
        """Find where the changes begin that the proofs of a table's views don't cover.

        A table isn't in it if one of its views isn't proved, or its topic was replaced.
        """
        starts: dict[str, tuple[int, ...]] = {}
        for table in tables:
            views = [(sink.name, table.qualified) for sink in sinks if table.is_in(sink.name)]
            proofs = [self.proofs[view] for view in views if view in self.proofs]
            end = self.ends[table.topic]
            is_same_log = all(
                proof.topic_id == end.topic_id and len(proof.offsets) == end.partition_count
                for proof in proofs
            )
            if proofs and len(proofs) == len(views) and is_same_log:
                offsets = [proof.offsets for proof in proofs]
                starts[table.qualified] = tuple(map(min, zip(*offsets, strict=True)))
        return starts


def begin(pipeline: Pipeline, tables: Sequence[Table], sinks: Sequence[Sink]) -> Beginning:
    """Note where the logs end and which generations are there, before anything is compared.

    Raises:
        SourceError, ConnectorError: a server can't be read.
    """
    with Topics(pipeline.kafka) as kafka:
        # Before the time: a record below these ends was committed before it.
        ends = kafka.ends([table.topic for table in tables])
        at = read_time_ms(pipeline) / 1000
        registry = Registry(pipeline, kafka).read()
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
    starts: Starts,
) -> None:
    """Record what a comparison has proved; a view that differs is proved no longer.

    `starts`: the options' of that comparison. If the registry can't be written, a warning is logged.
    """
    try:
        present = _read_generations(tables, sinks)
        topics = {table.qualified: table.topic for table in tables}
        entries: list[tuple[Sequence[str], dict[str, object] | None]] = []
        for comparison in comparisons:
            view = comparison.sink, comparison.table
            generation = beginning.generations.get(view)
            former = beginning.proofs.get(view)
            if comparison.verdict == "differs" and former:
                entries.append((("proof", *view), None))
            if not comparison.equal or generation is None or present.get(view) != generation:
                continue
            if comparison.complete:
                complete_at = beginning.at
            elif former and comparison.table in starts:
                complete_at = former.complete_at
            else:
                continue
            end = beginning.ends[topics[comparison.table]]
            proof = Proof(generation, beginning.at, complete_at, end.topic_id, end.offsets)
            entries.append((("proof", *view), vars(proof)))
        if entries:
            with Topics(pipeline.kafka) as kafka:
                ensure_topic(kafka, pipeline, pipeline.generations_topic)
                Registry(pipeline, kafka).write(*entries)
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
