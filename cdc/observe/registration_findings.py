"""Findings on the registration: how it differs from the file, the catalog and the server."""

from collections.abc import Callable, Sequence
from typing import Any

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.errors import CdcError, Unexpected
from cdc.kafka.topics import TopicsPool
from cdc.model.finding import Finding, find, find_error
from cdc.model.obstacle import Obstacle
from cdc.model.wording import full_stopped
from cdc.postgres import catalog, source


def find_registration_troubles(pipeline: Pipeline, pool: TopicsPool) -> list[Finding]:
    """Find all that makes the registration differ from the file, the catalog or the server.

    Raises:
        SourceError, ConnectorError: it can't be read.
    """
    with source.connect(pipeline.source.dsn) as conn, pool.borrowed(pipeline.kafka) as topics:
        registration = registrations.read(topics, pipeline)
        server = source.server(conn)
        if not registration:
            choice = _choose_tables(conn, pipeline)
            return [choice] if isinstance(choice, Finding) else []
        captured = registration.names
        findings = [
            *_refusal(
                "another-server", registrations.refuse_another, registration, server, pipeline
            ),
            *_refusal("file-changed", registrations.refuse_changed, registration, pipeline),
            *_refusal(
                "tables-undecided/pattern", registrations.refuse_meaningless, captured, pipeline
            ),
            *_refusal(
                "server-promoted", registrations.refuse_promoted, registration, server, pipeline
            ),
        ]
        findings += [
            find_aside(table, obstacle)
            for table, obstacle in registration.aside.items()
            if any(entry.matches(table) for entry in pipeline.listed)
        ]
        # Last: the catalog may not answer, and that must hide none of the others.
        choice = _choose_tables(conn, pipeline)
        if isinstance(choice, Finding):
            # A pattern that means nothing registered means nothing in the catalog either.
            if not any(finding.code == choice.code for finding in findings):
                findings.append(choice)
            return findings
        findings += _refusal("table-slipped", catalog.refuse_slipped, captured, choice, pipeline)
        findings += _refusal(
            "file-changed/tables", registrations.refuse_waiting, registration, choice.names
        )
    return findings


def choose_findings(
    registration: tuple[list[Finding] | None, Finding | None], unread: Sequence[Finding | None]
) -> list[Finding]:
    """Choose the findings on the registration. A server that is silent is reported by the request
    to that server.
    """
    changed, unsure = registration
    codes = {finding.code for finding in unread if finding}
    silent = {"source-unreachable", "kafka-unreachable"} & codes
    if unsure:
        return [unsure] if unsure.exit_code == Unexpected.exit_code or not silent else []
    return changed or []


def find_aside(table: str, obstacle: Obstacle) -> Finding:
    """Make the finding on a table that was set aside."""
    message = f"{table} is aside, and its views keep the rows they had: {obstacle.reason}."
    message += f" {full_stopped(obstacle.remedy)}"
    return find("table-aside", table, message, "cdc -p FILE register", table=table)


def _choose_tables(conn: source.Connection, pipeline: Pipeline) -> catalog.Choice | Finding:
    """Choose the tables of the file in this database, or say why that isn't possible."""
    try:
        return catalog.find_tables(conn, pipeline)
    except CdcError as error:
        return find_error("tables-undecided", "source.tables", error)


def _refusal(key: str, check: Callable[..., None], *arguments: Any) -> list[Finding]:
    """Run a check that raises, and make a finding of its error."""
    try:
        check(*arguments)
    except CdcError as error:
        return [find_error(key, _subject(error), error)]
    return []


def _subject(error: CdcError) -> str:
    return str(error.details.get("table") or "the registration")
