"""Findings: what `cdc status`, `cdc doctor` and `cdc topics audit` have to say of a pipeline.

In:  a key of `cdc.model.finding_codes`, what it is about, what was seen, the command to run next.
Out: `Finding`. Codes are stable; each has a page in docs/operate/runbooks.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cdc.errors import CdcError
from cdc.model.finding_codes import AUDIT, KINDS, code_of
from cdc.model.wording import advice, full_stopped


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    DOWN = "down"
    """No change comes through, or it is unknown whether one does."""
    DEGRADED = "degraded"
    """Not all changes come through, not in time, or not as they should be."""
    WARNING = "warning"
    """Changes come through, and something that may well happen would end that."""
    INFO = "info"
    """Nothing has to be done."""


ORDER = tuple(Severity)
PROGRAMS = "cdc|(?:/\\S+/)?python[\\d.]*|apt|curl|df|du|echo|kafka-[a-z]+(?:\\.sh)?|ls|pip|ps|redis-cli|timedatectl"
SHELL = rf"(?:{PROGRAMS})(?: (?!&&)[^ ,;:]\S*(?<![,;:]))+"
"""A command of the shell: no word ends with a sentence's punctuation."""
COMMAND = re.compile(rf"{SHELL}(?: && {SHELL})*|[A-Z]+ .+;", re.DOTALL)
"""Commands of the shell, one after the other, or a statement of SQL."""
COMMAND_FIRST = re.compile(rf"({SHELL}(?: && {SHELL})*)[;:] (.+)", re.DOTALL)
COMMAND_LAST = re.compile(rf".+?: ({SHELL}(?: && {SHELL})*)", re.DOTALL)
"""Hints that have a command before a sentence, or at the end of one."""
LOOKS = re.compile(
    r"cdc -p FILE (?:doctor|plan|quarantine list|status|topics audit|verify)(?!.* --repair).*"
    r"|(?:SELECT (?!pg_)|SHOW ).*|(?:df|du|ls|ps|timedatectl) .*|curl (?!.*-X ).*"
    r"|kafka-\S+ .*--describe .*|redis-cli .*INFO \w+",
    re.DOTALL,
)
"""Commands that change nothing."""
LOOK_AGAIN = "cdc -p FILE doctor"
"""The command to run next where only a sentence says what is to be done."""
AUDIT_AGAIN = "cdc -p FILE topics audit"
"""The same for a finding of `topics audit`."""


@dataclass(frozen=True)
class Finding:
    """A trouble, a risk or a remark, with the command to run next.

    `hop` says where on the way of a change it is: `Postgres`, `Postgres -> Kafka`, `Kafka`,
    `Kafka -> SINK` or `this machine`. `since` is in Unix seconds, where that is known.
    """

    code: str
    severity: Severity
    hop: str
    subject: str
    """What it is about: the name of a table, a sink, a slot, a topic, a setting, a server."""
    message: str
    why: str
    """What becomes of it if nobody acts."""
    fix: str
    """Commands of the shell, or an SQL statement, which ends with a semicolon: see `is_command`."""
    exit_code: int = 0
    table: str | None = None
    sink: str | None = None
    since: float | None = None
    count: int = 1
    """Rows, keys, records, partitions or tables that it is about: `message` says which."""
    keys: tuple[str, ...] = ()
    """Some of the keys of rows that it is about."""

    @property
    def sentence(self) -> str:
        """The message, and the command to run next."""
        return advice(self.message, self.fix)


def find(
    key: str,
    subject: str,
    message: str,
    fix: str,
    *,
    table: str | None = None,
    sink: str | None = None,
    since: float | None = None,
    count: int = 1,
) -> Finding:
    """Make a finding of a key of the catalogue, which has its severity, hop and consequence. Where
    `fix` is more than a command, its sentence joins the message. If the command only shows
    something, what a person has to decide joins it.
    """
    kind = KINDS[key]
    sentence, command = _split(fix)
    command = command or (AUDIT_AGAIN if key in AUDIT else LOOK_AGAIN)
    if not sentence and only_looks(command):
        sentence = kind.decision
    if sentence:
        message = f"{full_stopped(message)} {full_stopped(_capitalised(sentence))}"
    hop = f"Kafka -> {sink}" if sink and kind.hop == "Kafka -> SINK" else kind.hop
    return Finding(
        code_of(key),
        Severity(kind.severity),
        hop,
        subject,
        message,
        kind.why,
        command,
        kind.failure.exit_code,
        table,
        sink,
        since,
        count,
    )


def find_setting(
    name: str, message: str, fix: str, *, of: str | None = None, sink: str | None = None
) -> Finding:
    """Make the finding on a setting, of a topic for example, that isn't what the pipeline needs. Where the
    catalogue has a setting twice, `name` is `setting=value`.
    """
    setting = name.partition("=")[0]
    subject = f"{setting} of {of}" if of else setting
    return find(f"setting-differs/{name}", subject, message, fix, sink=sink)


def is_command(text: str) -> bool:
    """Whether a text can be pasted as it is, into a shell or, where it is a statement, into psql."""
    return COMMAND.fullmatch(text) is not None


def only_looks(command: str) -> bool:
    """Whether a command changes nothing, so that no finding ends by it."""
    return LOOKS.fullmatch(command) is not None


def _split(hint: str) -> tuple[str, str]:
    """Split a hint into its sentence and its command; either may be empty."""
    text = hint.replace(", then cdc ", " && cdc ")
    if is_command(text):
        return "", text
    if parts := COMMAND_FIRST.fullmatch(text):
        return parts[2], parts[1]
    if parts := COMMAND_LAST.fullmatch(text):
        return hint, parts[1]
    return hint, ""


def _capitalised(sentence: str) -> str:
    """Begin a sentence as sentences do, unless it begins with a name."""
    begins_with_word = re.match(r"[a-z]+[ ,]", sentence) and not sentence.startswith("cdc ")
    return sentence[:1].upper() + sentence[1:] if begins_with_word else sentence


def find_error(key: str, subject: str, error: CdcError, *, sink: str | None = None) -> Finding:
    """Make a finding of an error: its message, and its hint as the command to run next."""
    finding = find(key, subject, error.message, error.hint, sink=sink)
    return replace(finding, exit_code=error.exit_code)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity. Findings of one severity stay in their order."""
    return tuple(sorted(findings, key=lambda finding: ORDER.index(finding.severity)))


def verdict(findings: Sequence[Finding]) -> str:
    """Judge sorted findings by the worst: `ok` where it is a remark or there is none."""
    return findings[0].severity if is_trouble(findings) else "ok"


def exit_code(findings: Sequence[Finding]) -> int:
    """Give the exit code for sorted findings: the worst one's, by its class of errors, else 0."""
    return findings[0].exit_code if is_trouble(findings) else 0


def is_trouble(findings: Sequence[Finding]) -> bool:
    """Say whether the worst of sorted findings is more than a remark."""
    return bool(findings) and findings[0].severity is not Severity.INFO


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Fold findings of one case in one hop, of which only the subjects differ, into the first of
    them: those have one consequence. For screens: with 500 tables there may be hundreds.
    """
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.hop, finding.why), []).append(finding)
    return [
        replace(
            group[0],
            message=f"{group[0].message.rstrip('.')} (and {len(group) - 1} more like it).",
            count=len(group),
        )
        if len(group) > 1
        else group[0]
        for group in groups.values()
    ]
