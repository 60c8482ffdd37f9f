"""What decoding has to know besides the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DecodeOptions:
    """How the records of some topics are to be taken."""

    placeholder: str = "__debezium_unavailable_value"
    floors: Mapping[str, int] = field(default_factory=dict)
    """Per topic, the LSN below which its changes are dead."""
    first_offsets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Per topic, by partition: the offset below which its records are dead, whatever is in them."""
