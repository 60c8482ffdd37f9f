"""Findings on the registration: how it differs from the file, the catalog and the server."""

from collections.abc import Callable
from typing import Any

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.errors import CdcError
from cdc.kafka.pool import TopicsPool
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
            *_refusal(registrations.refuse_another, registration, server, pipeline),
            *_refusal(registrations.refuse_changed, registration, pipeline),
            *_refusal(registrations.refuse_meaningless, captured, pipeline),
            *_refusal(registrations.refuse_promoted, registration, server, pipeline),
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
        findings += _refusal(catalog.refuse_slipped, captured, choice, pipeline)
        findings += _refusal(registrations.refuse_waiting, registration, choice.names)
    return findings


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


def _refusal(check: Callable[..., None], *arguments: Any) -> list[Finding]:
    """Run a check that raises, and make a finding of its error."""
    try:
        check(*arguments)
    except CdcError as error:
        subject = str(error.details.get("table") or "the registration")
        return [find_error(str(error.finding_key), subject, error)]
    return []
