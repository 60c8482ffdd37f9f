"""What a comparison of views has to tell people: views that differ, and those that no longer do."""

from collections.abc import Callable, Iterable, Sequence

from cdc.model.finding import Finding, find
from cdc.notify.incidents import Incident
from cdc.verify.comparison import Comparison

ALL_ROWS = Comparison("", "").scope


def find_differences(results: Iterable[Comparison]) -> list[Finding]:
    """Find the views that differ from their source."""
    findings = []
    for result in results:
        if result.verdict != "differs":
            continue
        count = result.missing + result.extra + result.different
        rows = f"{count:,} row{'s' if count > 1 else ''}"
        message = f"{result.table} in {result.sink}: {rows} not as in Postgres."
        fix = f"cdc -p FILE verify --repair --table {result.table} --sink {result.sink}"
        findings.append(
            find("view-differs", result.table, message, fix, table=result.table, sink=result.sink)
        )
    return findings


def judge(results: Sequence[Comparison]) -> Callable[[Incident], bool]:
    """Return the function that says which incidents a comparison may declare over: those of views
    whose every row was equal.
    """
    equal = {
        (f"Kafka -> {result.sink}", result.table)
        for result in results
        if result.equal and result.scope == ALL_ROWS
    }
    return lambda incident: (incident.hop, incident.subject) in equal
