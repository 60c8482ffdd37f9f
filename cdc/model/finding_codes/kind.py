"""What the findings of one code have in common, and the hops of a change that findings are about."""

from dataclasses import dataclass

from cdc.errors import CdcError

SOURCE, CAPTURE, LOG, APPLY = "Postgres", "Postgres -> Kafka", "Kafka", "Kafka -> SINK"
MACHINE = "this machine"
"""Hops. In the last one SINK is the name of the finding's sink."""


@dataclass(frozen=True)
class Kind:
    """What all findings of one code have in common. `severity` is a word of `Severity`."""

    severity: str
    hop: str
    failure: type[CdcError]
    why: str
    decision: str = ""
    """What a person has to decide, or that it ends by itself, where the command to run next only
    shows something.
    """
