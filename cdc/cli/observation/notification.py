"""Wires notifications: for verbs that run until they are stopped, and for what a comparison found."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from cdc.cli.console import call
from cdc.runtime.context import Context

if TYPE_CHECKING:
    from cdc.model.finding import Finding
    from cdc.observe.status import Status
    from cdc.verify.comparison import Comparison

    Tell = Callable[[Status], object]


@contextmanager
def notifying(context: Context) -> Iterator["Tell | None"]:
    """Give a function that takes the status of each look, and tells the addresses of the file of
    trouble while the block runs; None where nobody is to be told.
    """
    from cdc.notify.loop import NotifyLoop
    from cdc.notify.notifier import Notifier

    pipeline = context.load()
    if not pipeline.notify:
        yield None
        return
    loop = NotifyLoop(lambda: Notifier(pipeline, "status"))
    try:
        yield lambda status: loop.take(_completed(finding) for finding in status.findings)
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
    return replace(
        finding,
        message=call.complete_commands(finding.message),
        fix=call.complete_commands(finding.fix),
    )
