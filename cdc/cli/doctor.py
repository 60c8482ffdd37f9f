"""Verb `cdc doctor`: whether every server is fit for the pipeline, before `register` and after."""

from typing import Any

import typer

from cdc.cli.console import Json, out, print_json
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
    from cdc.cli.screens.doctor import draw_doctor
    from cdc.doctor.examination import Examination

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
