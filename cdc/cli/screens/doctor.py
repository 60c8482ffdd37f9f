"""The screen of `cdc doctor`: every finding, with its consequence and the command to run next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.console import call
from cdc.cli.screens.status import COLOURS_OF_VERDICTS
from cdc.model.finding import verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.model.finding import Finding


def draw_doctor(findings: Sequence[Finding]) -> RenderableType:
    """Draw all findings of `cdc doctor`: each with its consequence and the command to run next."""
    judgement = verdict(findings)
    lines = [Text(judgement, f"bold {COLOURS_OF_VERDICTS[judgement]}")]
    for finding in findings:
        severity = (f"{finding.severity:<9}", COLOURS_OF_VERDICTS[finding.severity])
        lines += [
            Text.assemble(severity, f"{call.complete_commands(finding.message)} ({finding.code})"),
            Text(f"{'':9}{finding.why}", "dim"),
            Text(f"{'':9}{call.complete_commands(finding.fix)}"),
        ]
    return Group(*lines)
