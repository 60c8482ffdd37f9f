"""The part of Prometheus' query language that our alert rules use, evaluated over given samples.

What isn't known here is an error, never an empty answer: selectors, `sum`, `max` and `min` with `by`
or `without`, `increase`, arithmetic, comparisons that filter, `and` and `unless`, with `on`.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

LOOK_BACK_S = 300.0
"""A series whose newest sample is older has no value."""
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
TOKEN = re.compile(
    r"\s*(?:(?P<text>\"[^\"]*\")|(?P<number>\d+(?:\.\d+)?(?![\w.]))|(?P<range>\[\d+[smh]\])"
    r"|(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>=~|!~|==|!=|>=|<=|[-+*/%^<>=(){},@\[\]]))"
)
Labels = frozenset[tuple[str, str]]
Samples = Sequence[tuple[float, float]]
"""Seconds and values, in the order of time."""
Vector = dict[Labels, float]
Operation = Callable[[float, float], float | bool]
COMPARISONS: Mapping[str, Operation] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
SUMS: Mapping[str, Operation] = {"+": operator.add, "-": operator.sub}
PRODUCTS: Mapping[str, Operation] = {"*": operator.mul, "/": operator.truediv}
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
MATCHERS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "=~": lambda value, pattern: re.fullmatch(pattern, value) is not None,
    "!~": lambda value, pattern: re.fullmatch(pattern, value) is None,
}


class Unsupported(Exception):
    """An expression has something that this evaluator doesn't know."""


@dataclass
class Query:
    """An expression at a moment; `series`: samples by labels, with the metric's `__name__`."""

    text: str
    series: Mapping[Labels, Samples]
    time_s: float

    def evaluate(self) -> Vector:
        """Evaluate the whole expression. Raises Unsupported."""
        self._tokens = _tokens(self.text)
        answer = self._sets()
        if self._tokens or isinstance(answer, float):
            raise Unsupported(f"{self.text}: not understood from {self._tokens[:3]} on")
        return answer

    def _sets(self) -> Vector | float:
        left = self._binary(0)
        while self._peek() in ("and", "unless"):
            word = self._take()
            on, right = self._matching(), self._binary(0)
            if isinstance(left, float) or isinstance(right, float):
                raise Unsupported(f"{self.text}: {word} of a number")
            keys = {_key(labels, on) for labels in right}
            wanted = word == "and"
            left = {
                labels: value
                for labels, value in left.items()
                if (_key(labels, on) in keys) is wanted
            }
        return left

    def _binary(self, level: int) -> Vector | float:
        levels = (COMPARISONS, SUMS, PRODUCTS)
        if level == len(levels):
            return self._operand()
        left = self._binary(level + 1)
        while (sign := self._peek()) in levels[level]:
            self._take()
            on, right = self._matching(), self._binary(level + 1)
            left = self._apply(levels[level][sign], left, right, on)
        return left

    def _apply(
        self,
        operation: Operation,
        left: Vector | float,
        right: Vector | float,
        on: Sequence[str] | None,
    ) -> Vector | float:
        filters = operation in COMPARISONS.values()
        if isinstance(left, float):
            if isinstance(right, float) or filters:
                raise Unsupported(f"{self.text}: a number on the left")
            return {_unnamed(labels): operation(left, value) for labels, value in right.items()}
        if isinstance(right, float):
            pairs = [(labels, value, right) for labels, value in left.items()]
        else:
            others = {_key(labels, on): value for labels, value in right.items()}
            pairs = [
                (labels, value, others[_key(labels, on)])
                for labels, value in left.items()
                if _key(labels, on) in others
            ]
        if filters:
            return {labels: value for labels, value, other in pairs if operation(value, other)}
        return {_unnamed(labels): operation(value, other) for labels, value, other in pairs}

    def _operand(self) -> Vector | float:
        token = self._take()
        if re.fullmatch(r"[\d.]+", token):
            return float(token)
        if token == "(":
            inner = self._sets()
            self._expect(")")
            return inner
        if token in AGGREGATES:
            return self._aggregate(AGGREGATES[token])
        if token == "increase":
            self._expect("(")
            matching = self._selected(self._take())
            range_s = self._range()
            self._expect(")")
            grown = {
                _unnamed(labels): _increase(samples, self.time_s - range_s, self.time_s)
                for labels, samples in matching.items()
            }
            return {labels: value for labels, value in grown.items() if value is not None}
        if not re.fullmatch(r"[a-zA-Z_:][\w:]*", token) or self._peek() == "(":
            raise Unsupported(f"{self.text}: {token}")
        newest = {
            labels: [value for at, value in samples if 0 <= self.time_s - at < LOOK_BACK_S]
            for labels, samples in self._selected(token).items()
        }
        return {labels: values[-1] for labels, values in newest.items() if values}

    def _aggregate(self, reduce: Callable[[Sequence[float]], float]) -> Vector:
        if (word := self._take()) not in ("by", "without"):
            raise Unsupported(f"{self.text}: an aggregate {word}")
        names = self._names()
        self._expect("(")
        inner = self._sets()
        self._expect(")")
        if isinstance(inner, float):
            raise Unsupported(f"{self.text}: an aggregate of a number")
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            group = {
                (name, text) for name, text in _unnamed(labels) if (name in names) is (word == "by")
            }
            groups.setdefault(frozenset(group), []).append(value)
        return {group: reduce(values) for group, values in groups.items()}

    def _selected(self, metric: str) -> Mapping[Labels, Samples]:
        conditions = [("__name__", "=", metric)]
        if self._peek() == "{":
            self._take()
            while self._peek() != "}":
                conditions.append((self._take(), self._take(), self._take().strip('"')))
                if self._peek() == ",":
                    self._take()
            self._take()
        return {
            labels: samples
            for labels, samples in self.series.items()
            if all(
                MATCHERS[sign](dict(labels).get(name, ""), text) for name, sign, text in conditions
            )
        }

    def _range(self) -> float:
        token = self._take().strip("[]")
        return float(token[:-1]) * UNITS_S[token[-1]]

    def _matching(self) -> Sequence[str] | None:
        if self._peek() in ("ignoring", "bool", "group_left", "group_right"):
            raise Unsupported(f"{self.text}: {self._peek()}")
        if self._peek() != "on":
            return None
        self._take()
        return self._names()

    def _names(self) -> Sequence[str]:
        self._expect("(")
        names = []
        while (token := self._take()) != ")":
            if token != ",":
                names.append(token)
        return names

    def _peek(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self) -> str:
        if not self._tokens:
            raise Unsupported(f"{self.text}: ends too early")
        return self._tokens.pop(0)

    def _expect(self, token: str) -> None:
        if (taken := self._take()) != token:
            raise Unsupported(f"{self.text}: {taken} where {token} was expected")


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    while text[place:].strip():
        match = TOKEN.match(text, place)
        if match is None:
            raise Unsupported(f"{text}: not understood at {text[place:]!r}")
        tokens.append(match[0].strip())
        place = match.end()
    return tokens


def _key(labels: Labels, on: Sequence[str] | None) -> Labels:
    """The labels by which series are matched: those of `on`, else all but the metric's name."""
    if on is None:
        return _unnamed(labels)
    return frozenset((name, text) for name, text in labels if name in on)


def _unnamed(labels: Labels) -> Labels:
    return frozenset((name, text) for name, text in labels if name != "__name__")


def _increase(samples: Samples, start_s: float, end_s: float) -> float | None:
    """How much a counter has grown within (start, end], extrapolated to its bounds as Prometheus
    does; None for fewer than two samples.
    """
    inside = [(at, value) for at, value in samples if start_s < at <= end_s]
    if len(inside) < 2:
        return None
    grown = sum(
        now - before if now >= before else now for (_, before), (_, now) in pairwise(inside)
    )
    (first_s, first), (last_s, _) = inside[0], inside[-1]
    length_s = last_s - first_s
    between_s = length_s / (len(inside) - 1)
    before_s, after_s = first_s - start_s, end_s - last_s
    if grown > 0 and first >= 0:
        # A counter was never below zero.
        before_s = min(before_s, length_s * first / grown)
    reach_s = sum(
        gap_s if gap_s < between_s * 1.1 else between_s / 2 for gap_s in (before_s, after_s)
    )
    return grown * (length_s + reach_s) / length_s
