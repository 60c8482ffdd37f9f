"""Verb `cdc doctor`: whether every server is fit for the pipeline, before `register` and after."""

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.console import Json, call, out, print_json
from cdc.cli.status import COLOURS_OF_VERDICTS
from cdc.model.finding import Finding, exit_code, verdict


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(doctor)


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Examine the source, Kafka Connect, the topics, the sinks and this machine; change nothing.

    Says before `register` what it would meet. Each finding has a code, with a page in the runbooks,
    and the command to run next. Exit 0 when there is nothing but remarks, otherwise the exit code of
    the worst finding's class.
    """
    from cdc.observe.examination import Examination

    configured = context.obj.pipeline_to_examine
    findings = Examination(configured, context.obj.sinks(None), context.obj.state).findings()
    if as_json:
        print_json(document(configured.pipeline, findings))
    else:
        out.print(draw_doctor(findings))
    raise typer.Exit(exit_code(findings))


def document(pipeline: str, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Make the document of `cdc doctor --json`."""
    return {
        "pipeline": pipeline,
        "verdict": verdict(findings),
        "exit_code": exit_code(findings),
        "findings": findings,
    }


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
