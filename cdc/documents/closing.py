"""Windows that close: `lateness` after the end of a window, by the clock of its view.

    closed      end + lateness <= clock, when the last document of a window is sent, with `final: true`
    late        a change to a pane all of whose windows are closed: refused, counted and listed
    forgotten   the first pane of a window, with its last document: no later window has it

What happens in a turn, in order; a crash may come between any two steps:

1. The clock is set forward. From then on the script that applies rows refuses changes to closed panes.
   It compares with the same clock in the same step, so no change is half in time: a row that leaves a
   closed pane for an open one is refused there and counted here. Its entries carry the times at which
   their panes close, so a former version is refused by what it was stored with.
2. Windows that were due are dirty. Their documents are made of the panes, which nothing changes now.
   With hopping windows a pane of a closed window may also be one of a later window, and still change:
   until the last document is sent, it may have such a change in it.
3. That a transaction begins is noted, then it is written, as for all views that send each change once.
4. In one step the marks go, the panes are dropped, and where panes of later windows are left, `SAID`
   takes the place of the document's digest until they are gone.

What the topic says is final is final. Wherever the state doesn't know what the topic has, the topic is
read (`cdc.documents.tasks`): a final document is noted as `SAID`, and the state keeps the latest time
at which such a window closed. A state that lost all is filled again while its clock hasn't begun, so
nothing is refused. Then its clock begins at that time at least. Final documents aren't sent again,
whatever their panes have now, and the panes are dropped.

The topic has nothing of a window without a document, such as one that doesn't meet `having`: in a state
that lost all it may still get its last document.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from cdc.documents.plan import FINAL, WINDOW_END, WINDOW_START, View, Window
from cdc.documents.state import Pane
from cdc.scalar.instants import microseconds

SAID = b"final"
"""What the state has in place of a digest where the topic has the last document of a window."""


class ClosedWindow(NamedTuple):
    """What is left of a window that is closed.

    panes   lists and tallies of its first pane, which no other window needs
    is_over whether no other pane of it has rows, or can get one
    """

    panes: Sequence[Pane]
    is_over: bool


def closed_at(view: View, row: bytes) -> int | None:
    """Return when the window of a document closed, in microseconds since 1970, given as the connector
    writes it; None where it isn't final, or its window isn't as long as the view's are now.
    """
    grouping = view.grouping
    if grouping is None or grouping.closing is None or not isinstance(grouping.window, Window):
        return None
    document = json.loads(row)
    if document.get(FINAL) is not True:
        return None
    begin = _instant(document[WINDOW_START])
    end = _instant(document[WINDOW_END])
    if begin is None or end is None or end - begin != grouping.window.size:
        return None
    return begin + grouping.closing.after


def _instant(time: str | int) -> int | None:
    """Read a time with a zone, or one without, which is a number already."""
    return time if isinstance(time, int) else microseconds(time)
