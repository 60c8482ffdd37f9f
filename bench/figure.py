"""One line of the table."""

from dataclasses import dataclass, field

from bench.cost import Cost


@dataclass
class Figure:
    """`ours`, `limit` and `rival` hold one value per repetition; `goal` is the least ratio of ours to `against`."""

    name: str
    unit: str
    goal: float
    against: str
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    rival: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    """Single latencies, seconds."""
    changes: int = 0
    """How many one repetition handles: what `costs` are of."""
