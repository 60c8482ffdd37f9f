"""Constants of expressions: numbers, and texts in quotes, which get a group from what they are compared
with.

In:  what stands in the SQL. Out: terms whose value has the document form.
Invariant: a text passes only in a form that Postgres takes alike whatever its settings.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from cdc.config.mistakes import InvalidSetting
from cdc.views.scalar import terms
from cdc.views.scalar.terms import Term

UNKNOWN = "unknown"
"""The group of a text in quotes until what it is compared with gives it one."""
COMPARED = (
    *(terms.BOOLEAN, terms.INTEGERS, terms.NUMERIC, terms.TEXTS, terms.CHARACTER, terms.ENUM),
    *(terms.UUID, terms.DATE, terms.TIMESTAMP, terms.TIMESTAMPTZ),
)
UNORDERED = (terms.ENUM,)
PLAIN = (terms.TEXTS, terms.CHARACTER, terms.ENUM)
"""Groups whose constants are what stands between the quotes."""
NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?(Z|\+00(?::?00)?)?",
    re.ASCII,
)


def parse_number(digits: str, sign: str = "") -> Term:
    """Parse an integer or a numeric; `sign` is empty or a minus. Raises InvalidSetting."""
    if not NUMBER.fullmatch(digits):
        raise InvalidSetting("a number has digits and a decimal point", "for example: 10.5")
    if "." not in digits:
        return Term("constant", terms.INTEGERS, (), int(sign + digits))
    sign = sign if digits.strip("0.") else ""
    return Term("constant", terms.NUMERIC, (), sign + digits)


def common_group(groups: Sequence[str]) -> str:
    """Return the group that values of these have in common. Raises InvalidSetting."""
    typed = set(groups) - {UNKNOWN} or {terms.TEXTS}
    if typed == {terms.INTEGERS, terms.NUMERIC}:
        return terms.NUMERIC
    if len(typed) > 1 or not typed <= set(COMPARED):
        raise InvalidSetting(
            f"{' and '.join(sorted(typed))} can't be compared", "compare values of one type"
        )
    return typed.pop()


def compared(operator: str, left: Term, right: Term) -> Term:
    """Compare two terms, of which a text in quotes gets the group of the other. Raises
    InvalidSetting.
    """
    group = common_group([left.group, right.group])
    if operator not in ("=", "<>") and group in UNORDERED:
        raise InvalidSetting("the order of an enum isn't in the log", "compare with = or IN")
    return Term(operator, terms.BOOLEAN, (settle(left, group), settle(right, group)))


def settle(term: Term, group: str) -> Term:
    """Give a text in quotes the group of what it is compared with. Raises InvalidSetting."""
    if term.group == terms.INTEGERS and group == terms.NUMERIC:
        return Term(term.operator, group, term.arguments, term.detail)
    if term.group != UNKNOWN:
        return term
    text = str(term.detail)
    convert = DOCUMENT_FORMS.get(group)
    value = convert(text) if convert else text if group in PLAIN else None
    if value is None:
        raise InvalidSetting(
            f"a text in quotes is no {group} here",
            "for example: '2013-01-31', '2013-01-31 10:00:00', with a zone '2013-01-31 10:00:00Z'",
        )
    return Term("constant", terms.TEXTS if group == terms.ENUM else group, (), value)


def _date(text: str) -> str | None:
    match = TIME.fullmatch(text)
    if match is None or match[2] or match[4]:
        return None
    return _existing(f"{match[1]}T00:00:00") and match[1]


def _stamp(text: str, *, zone: bool) -> str | None:
    match = TIME.fullmatch(text)
    if match is None or (match[5] is not None) != zone:
        return None
    clock = f"{match[1]}T{match[2] or '00:00'}:{match[3] or '00'}"
    fraction = (match[4] or "").ljust(6, "0")
    return _existing(clock) and f"{clock}.{fraction}{'Z' if zone else ''}"


def _existing(text: str) -> str | None:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return None
    return text


def _uuid(text: str) -> str | None:
    return text.lower() if UUID_TEXT.fullmatch(text) else None


DOCUMENT_FORMS: Mapping[str, Callable[[str], str | None]] = {
    terms.DATE: _date,
    terms.TIMESTAMP: lambda text: _stamp(text, zone=False),
    terms.TIMESTAMPTZ: lambda text: _stamp(text, zone=True),
    terms.UUID: _uuid,
    terms.NUMERIC: lambda text: text if re.fullmatch(r"-?\d+(\.\d+)?", text, re.ASCII) else None,
}
"""The document form of a text in quotes; None where it is none."""
