"""Actions of the page: verbs of this program, each started as a process of its own.

In:  a verb with a sink, a table or a place that the page knows; who asks.
Out: its output and its exit code, for the page; an event in the log when it begins and when it
     ends.
No shell, no text of a request but what is in the lists that the page shows. One at a time: most of
them start Spark.
"""

import itertools
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from cdc.config.view_settings import STATE
from cdc.control.operator import OPERATOR_VARIABLE
from cdc.observe.status import Status
from cdc.quarantine.log import QuarantinedRecord

TOKEN_VARIABLE = "CDC_SERVE_TOKEN"  # noqa: S105  # the name of the variable
MOST_LINES, MOST_ACTIONS = 400, 20
"""Most lines of an action's output, and most actions, that are remembered."""
END_S = 15.0
"""Seconds that an action has to end when the server ends."""
log = structlog.get_logger()


@dataclass(frozen=True)
class Verb:
    """A verb that the page may start. `words` begin its command."""

    name: str
    words: tuple[str, ...]
    title: str
    effect: str
    """What becomes of it, for whoever is asked."""


VERBS: Mapping[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "verify",
            ("verify",),
            "Verify",
            "Compares every row of the views with Postgres, which reads all of them. Changes nothing.",
        ),
        Verb(
            "rebuild",
            ("rebuild",),
            "Rebuild",
            "Builds the views again from the log, beside the live ones, and compares them with Postgres."
            " Readers are switched only if they are equal.",
        ),
        Verb(
            "rollback",
            ("rollback",),
            "Roll back",
            "Switches readers to the previous generation, which is as current as the live one."
            " To do it again undoes it.",
        ),
        Verb(
            "pause",
            ("pause",),
            "Pause",
            "Has the sink stand still, also through restarts, until it is resumed. Its views grow old,"
            " and are brought up to date from the log afterwards.",
        ),
        Verb(
            "resume",
            ("resume",),
            "Resume",
            "Has the sink go on from where it stands.",
        ),
        Verb(
            "redrive",
            ("quarantine", "redrive"),
            "Redrive",
            "Has the running pipeline try records in quarantine again."
            " A newer state of their rows is never overwritten.",
        ),
    )
}

WHOLE_SINK_VERBS = ("rollback", "pause", "resume")
SINK_VERBS = ("rebuild", *WHOLE_SINK_VERBS)
"""Verbs that need a sink, and among them those that are never about one table."""


@dataclass(frozen=True)
class Request:
    """An action that was asked for. Empty texts: all sinks, all tables, all places."""

    verb: Verb
    sink: str = ""
    table: str = ""
    place: str = ""

    @property
    def subject(self) -> str:
        """What it is about, in words."""
        parts = [self.table, f"in {self.sink}" if self.table and self.sink else self.sink]
        return " ".join(filter(None, parts)) or self.place or "everything"

    @property
    def words(self) -> list[str]:
        """The words of its command, after the name of the program and the pipeline file."""
        if self.verb.name == "redrive":
            return [*self.verb.words, *(["--", self.place] if self.place else [])]
        table = ["--table", self.table] if self.table else []
        if self.verb.name == "verify":
            return [*self.verb.words, *(["--sink", self.sink] if self.sink else []), *table]
        return [*self.verb.words, *table, "--", self.sink]


@dataclass
class Action:
    """An action that was started. `code` is None while it is at work."""

    number: int
    request: Request
    who: str
    address: str
    started_at: float
    output: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    code: int | None = None
    ended_at: float | None = None


class Refusal(Exception):
    """An action that can't be started, in a sentence."""


def choose(
    form: Mapping[str, str], status: Status, quarantine: Sequence[QuarantinedRecord]
) -> Request:
    """Make a request of the fields of a form. Raises Refusal: only what the page shows can be
    named.
    """
    verb = VERBS.get(form.get("verb", ""))
    if verb is None:
        raise Refusal("There is no such action.")
    sink, table, place = (form.get(name, "") for name in ("sink", "table", "place"))
    tables = {
        sink_status.name: {view.table for view in sink_status.views}
        for sink_status in status.sinks
        if sink_status.name != STATE
    }
    if sink and sink not in tables:
        raise Refusal(f"There is no sink {sink!r} whose views could be made again.")
    of_sink = tables.get(sink, set().union(*tables.values()))
    if table and table not in of_sink:
        raise Refusal(f"There is no table {table!r} in {sink or 'any sink'}.")
    if place and place not in {record.entry.place for record in quarantine}:
        raise Refusal(f"{place!r} isn't in quarantine.")
    if verb.name in SINK_VERBS and not sink:
        raise Refusal("Say which sink.")
    if verb.name in WHOLE_SINK_VERBS:
        table = ""
    return Request(verb, sink, table, place)


class Actions:
    """Starts actions, and remembers the last ones. Any thread may call it."""

    def __init__(self, program: Sequence[str]) -> None:
        """`program`: the words of the command before those of a request."""
        self._program = tuple(program)
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._process: subprocess.Popen[str] | None = None
        self.history: deque[Action] = deque(maxlen=MOST_ACTIONS)
        self.changes = 0
        """Grows with every line of output, and with every start and end."""

    @property
    def current(self) -> Action | None:
        """The action that is at work."""
        latest = self.history[-1] if self.history else None
        return latest if latest and latest.code is None else None

    def command(self, request: Request) -> list[str]:
        """The command of a request, as a list of words."""
        return [*self._program, *request.words]

    def start(self, request: Request, who: str, address: str) -> Action:
        """Start an action. Raises Refusal: another one is at work."""
        with self._lock:
            if current := self.current:
                raise Refusal(
                    f"{current.request.verb.title} of {current.request.subject} is at work."
                )
            action = Action(next(self._numbers), request, who, address, time.time())
            environment = {key: text for key, text in os.environ.items() if key != TOKEN_VARIABLE}
            # No process can be started with a NUL in its environment.
            person = "".join(letter for letter in who if letter.isprintable())
            environment[OPERATOR_VARIABLE] = f"{person} ({address})"
            # In a group of its own: Ctrl-C on this server's terminal is not meant for it.
            self._process = subprocess.Popen(
                self.command(request),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
                env=environment,
                start_new_session=True,
            )
            self.history.append(action)
            self.changes += 1
        facts = {"number": action.number, "words": request.words, "who": who, "address": address}
        log.info("action_started", **facts)
        threading.Thread(target=self._follow, args=(action, self._process), daemon=True).start()
        return action

    def interrupt(self, who: str, address: str) -> None:
        """Interrupt the action at work, as Ctrl-C does. A rebuild goes on when it is asked for
        again.
        """
        with self._lock:
            process, current = self._process, self.current
        if process and current:
            log.info("action_interrupted", number=current.number, who=who, address=address)
            _signal(process, signal.SIGINT)

    def close(self) -> None:
        """End the action at work, by force if it takes long."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)

    def _follow(self, action: Action, process: "subprocess.Popen[str]") -> None:
        """Take over the output of an action until it ends."""
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                action.output.append(line.rstrip("\n"))
                self.changes += 1
        code = process.wait()
        action.ended_at, action.code = time.time(), code
        self.changes += 1
        log.info("action_ended", number=action.number, code=code, who=action.who)


def _signal(process: "subprocess.Popen[str]", number: int) -> None:
    """Signal the group of a process, unless that has ended."""
    if process.poll() is None:
        os.killpg(process.pid, number)
