"""Wires notifications: for verbs that run until they are stopped, and for what a comparison found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from cdc.cli.console import call
from cdc.cli.observation.health import check_health
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.model.finding import Finding
    from cdc.verify.comparison import Comparison


@contextmanager
def notifying(context: Context) -> Iterator[None]:
    """Tell the addresses of the file of trouble while the block runs."""
    from cdc.notify.loop import NotifyLoop
    from cdc.notify.notifier import Notifier

    def findings() -> "list[Finding]":
        # A context of its own for each look: tables come and go.
        status = check_health(replace(context))
        return [_completed(finding) for finding in status.findings]

    pipeline = context.load()
    if not pipeline.notify:
        yield
        return
    loop = NotifyLoop(lambda: Notifier(pipeline, "status"), findings)
    try:
        yield
    finally:
        loop.close()


def notify_comparisons(context: Context, results: "Sequence[Comparison]") -> None:
    """Tell of views that differ, and of those that no longer do."""
    from cdc.notify.comparisons import find_differences, judge
    from cdc.notify.notifier import Notifier

    if not context.pipeline.notify:
        return
    notifier = Notifier(context.pipeline, "verify")
    try:
        differences = [_completed(finding) for finding in find_differences(results)]
        notifier.notify(differences, judge(results))
    finally:
        notifier.close()


def _completed(finding: "Finding") -> "Finding":
    """A finding with the file's real name in its command."""
    return replace(finding, fix=call.complete_commands(finding.fix))
