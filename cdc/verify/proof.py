"""Through which moment a view is proved equal to its source.

In:  a comparison's beginning, and its results. Out: a `Proof` of each view, in the registry.
Invariant: a proof is of one generation and one shape, and says nothing of another.

A comparison of all rows proves a view through the moment at which it began. `cdc run` moves the proof
forward (`cdc.verify.prover`): by comparing the rows with a change in the log since then, and slowly all others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import structlog

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.errors import CdcError, SinkRejected, SinkUnavailable
from cdc.generations.registry import Damage, Proof, Registry
from cdc.kafka.topic_setup import ensure_topic
from cdc.kafka.topics import Topics
from cdc.model.generation import FIRST
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres.row_query import source_names
from cdc.postgres.schema_changes import consequences
from cdc.sink.contract import Sink, positions
from cdc.verify.barrier import read_time_ms
from cdc.verify.comparison import Comparison, View

log = structlog.get_logger()


@dataclass(frozen=True)
class Beginning:
    """What a comparison begins with.

    at           Unix seconds by Postgres' clock: what is committed later lies at or above `ends`
    ends         of the topics, by table
    generations  by view, the one that is compared
    shapes       by view
    """

    at: float
    ends: Mapping[str, Position]
    generations: Mapping[View, str]
    shapes: Mapping[View, str]


def begin(pipeline: Pipeline, tables: Sequence[Table], sinks: Sequence[Sink]) -> Beginning:
    """Note where the logs end and which generations are there: once the views are current, because the first
    change names the first generation, and before anything is compared.

    Raises:
        SourceError, ConnectorError: a server can't be read.
    """
    with Topics(pipeline.kafka) as kafka:
        # Before the time: a record below these ends was committed before it.
        by_topic = kafka.ends([table.topic for table in tables])
        at = read_time_ms(pipeline) / 1000
        control = Control(pipeline, kafka)
        control.read()
    ends = {table.qualified: by_topic[table.topic] for table in tables}
    generations = _read_generations(tables, sinks)
    return Beginning(at, ends, generations, view_shapes(tables, sinks, control))


def view_shapes(
    tables: Sequence[Table], sinks: Sequence[Sink], control: Control
) -> dict[View, str]:
    """Hash what the rows of each view depend on, beside the changes in the log.

    That is the columns, key and rows that the file gives the sink, or the query of a view of several
    tables; and of each table that it is made of, the last command that changed rows without a record
    (ADD COLUMN ... DEFAULT), and the last TRUNCATE.
    """
    names = {name for table in tables for name in source_names(table)}
    changed_by = {
        consequence.table: consequence.id
        for consequence in consequences(control.definitions, names)
        if consequence.kind != "none"
    }
    floors = control.floors
    shapes: dict[View, str] = {}
    for table in tables:
        parts = source_names(table)
        changes = [(name, changed_by.get(name)) for name in parts]
        truncated = [floors.number(name) for name in {table.qualified: 0, **dict.fromkeys(parts)}]
        query = table.derivation.query if table.derivation else None
        for sink in sinks:
            if table.is_in(sink.name):
                own = table.for_sink(sink.name)
                text = repr((own.columns, own.key, own.shape, query, changes, truncated))
                shapes[sink.name, table.qualified] = sha256(text.encode()).hexdigest()[:12]
    return shapes


def record(
    pipeline: Pipeline,
    beginning: Beginning,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    comparisons: Sequence[Comparison],
) -> None:
    """Record what a comparison has proved; a view that differs is proved no longer.

    If the registry can't be written, a warning is logged.
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
                if generation is None or present.get(view) != generation:
                    continue
                if comparison.verdict == "differs":
                    damage = damage_of(comparison, generation, beginning.at)
                    entries.append((("proof", *view), asdict(damage)))
                elif comparison.equal and comparison.proves:
                    end = beginning.ends[comparison.table]
                    shape = beginning.shapes[view]
                    proof = Proof(
                        generation, beginning.at, beginning.at, end.topic_id, end.offsets, shape
                    )
                    is_known = current and (current.generation, current.shape) == (
                        generation,
                        shape,
                    )
                    # `cdc run` may have proved the rows that have changed through a later moment.
                    if current and is_known and current.through > beginning.at:
                        proof = replace(current, complete_at=beginning.at, sweep=None, repaired=0)
                    entries.append((("proof", *view), asdict(proof)))
            if entries:
                registry.write(*entries)
    except CdcError as error:
        log.warning("proof_not_recorded", error=error.message)


def damage_of(
    comparison: Comparison, generation: str, found_at: float, unrepaired: str = ""
) -> Damage:
    ids = [difference.id for difference in comparison.sample]
    return Damage(generation, found_at, comparison.wrong, ids, unrepaired)


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
