"""Options of decoding other than the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DecodeOptions:
    """How the records of some topics are decoded. Immutable; can be pickled."""

    placeholder: str = "__debezium_unavailable_value"
    floors: Mapping[str, int] = field(default_factory=dict)
    """By topic: the LSN below which changes are dead."""
    first_offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By topic, for each partition: the offset below which records are dead, whatever they hold."""
