"""A figure: one line of the table."""

from dataclasses import dataclass, field

from bench.batches import Span
from bench.output.cost import Cost


@dataclass
class Figure:
    """`ours`, `limit` and `rival` hold one value per repetition. `goal` is what the ratio of ours
    to `against` has to be at least, or at most, and `rate` the same for ours itself; 0 where
    nothing is asked.
    """

    name: str
    unit: str
    goal: float = 0.0
    against: str = "limit"
    rate: float = 0.0
    at_most: bool = False
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    rival: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    hops: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from the commit of watched rows to each hop, in the order of the hops."""
    unseen: int = 0
    """Rows that were watched and didn't become visible in time."""
    asked: tuple[float, ...] = ()
    """The most that p50 and p99 of the last hop may be."""
    over_time: dict[str, list[Span]] = field(default_factory=dict)
    """Spans of each sink and of Kafka, counted from the first record in Kafka."""
    part: str = ""
    """The word of `--only` that measures this figure alone."""
    changes: int = 0
    """The number of changes of one repetition, to which `costs` belong."""
