"""Findings on the registration: how it differs from the file, the catalog and the server."""

from collections.abc import Callable
from typing import Any

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.errors import CdcError
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
    findings: list[Finding] = []
    with source.connect_to_read(pipeline.source) as conn, pool.borrowed(pipeline.kafka) as topics:
        registration = registrations.read(topics, pipeline)
        server = source.server(conn)
        if registration:
            findings = [
                *_refusal(registrations.refuse_another, registration, server, pipeline),
                *_refusal(registrations.refuse_changed, registration, pipeline),
                *_refusal(registrations.refuse_meaningless, registration.names, pipeline),
                *_refusal(registrations.refuse_promoted, registration, server, pipeline),
            ]
            findings += [
                find_aside(table, obstacle)
                for table, obstacle in registration.aside.items()
                if any(entry.matches(table) for entry in pipeline.listed)
            ]
        # Last: the catalog may not answer, and that must hide none of the others.
        try:
            choice = catalog.find_tables(conn, pipeline)
        except CdcError as error:
            undecided = find_error("tables-undecided", "source.tables", error)
            # A pattern that means nothing registered means nothing in the catalog either.
            is_known = any(finding.code == undecided.code for finding in findings)
            return findings if is_known else [*findings, undecided]
        if not any(finding.code == "tables-undecided" for finding in findings):
            findings += _refusal(pipeline.with_tables(choice.names).refuse_unknown_tables)
        if registration:
            findings += _refusal(catalog.refuse_slipped, registration.names, choice, pipeline)
            findings += _refusal(registrations.refuse_waiting, registration, choice.names)
    return findings


def find_aside(table: str, obstacle: Obstacle) -> Finding:
    """Make the finding on a table that was set aside."""
    message = f"{table} is aside, and its views keep the rows they had: {obstacle.reason}."
    message += f" {full_stopped(obstacle.remedy)}"
    return find("table-aside", table, message, "cdc -p FILE register", table=table)


def _refusal(check: Callable[..., None], *arguments: Any) -> list[Finding]:
    """Run a check that raises, and make a finding of its error."""
    try:
        check(*arguments)
    except CdcError as error:
        subject = str(error.details.get("table") or "the registration")
        return [find_error(str(error.finding_key), subject, error)]
    return []
