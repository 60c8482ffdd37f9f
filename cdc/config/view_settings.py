"""What the pipeline file says of a view: documents of several tables, or of groups of rows.

Structure is YAML, every expression over the columns of a row is SQL. Here is what can be checked
without the database; `cdc.documents.resolve` checks the rest.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from cdc.config.durations import microseconds
from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Section
from cdc.config.source_settings import TABLE, TableSettings

NAME = r"[a-z][a-z0-9_]{0,47}"
SCHEMA = "view"
"""The schema that views stand under, in the names of their topics and in sinks."""
STATE = "documents"
"""What the state of documents is called where a sink's name is due: in logs, progress, quarantine."""
COMMIT = "commit"
"""The clock of a view that isn't a column: the time of commits."""
TOPIC_ONLY = "topic"
"""In `to`: the view's topic, which every view has."""
Function = Literal[
    "count", "sum", "min", "max", "avg", "first", "last", "distinct", "percentile_disc"
]
"""What an aggregate is; `distinct` is count(DISTINCT ...)."""
AGGREGATE = re.compile(r"\s*([a-zA-Z]+)\s*\(\s*(.*?)\s*\)\s*", re.DOTALL)
FUNCTIONS = ("count", "sum", "min", "max", "avg")
"""Aggregates over rows of an included table."""
ENDS = ("first", "last")
DISTINCT = re.compile(
    r"\s*count\s*\(\s*distinct\s+(?P<argument>.*?)\s*\)\s*", re.DOTALL | re.IGNORECASE
)
PERCENTILE = re.compile(
    r"\s*percentile_disc\s*\(\s*(?P<fraction>[^()_]*?)\s*\)"
    r"\s*within\s+group\s*\(\s*order\s+by\s+(?P<argument>.*?)\s*\)\s*",
    re.DOTALL | re.IGNORECASE,
)
GROUPED = ("from", "group_by", "window", "select")
"""Settings of grouped views."""
LATER = ("event", "join")
"""Settings of kinds of views that there aren't yet."""

FILTERED = re.compile(
    r"\s*(?P<call>.*?\))\s*filter\s*\(\s*where\b(?P<condition>.*)\)\s*", re.DOTALL | re.IGNORECASE
)
MOST_WINDOWS = 100
"""Windows that a row may be in: each of them is sent again when the row changes."""


class Order(NamedTuple):
    """A column that a list is ordered by. NULL comes last, texts by their code points."""

    column: str
    descending: bool = False


class AggregateCall(NamedTuple):
    """An aggregate as the file has it.

    argument   a column; "" for count(*)
    fraction   of percentile_disc, from 0 to 1
    condition  of FILTER
    """

    function: Function
    argument: str
    fraction: float | None = None
    condition: str | None = None


def ordering(text: str) -> Order:
    """Read `column`, `-column`, `column asc` or `column desc`."""
    column, _, direction = text.strip().rpartition(" ")
    if column and direction.lower() in ("asc", "desc"):
        return Order(column.strip(), direction.lower() == "desc")
    return Order(text.strip().removeprefix("-"), text.strip().startswith("-"))


def aggregate(text: str) -> AggregateCall:
    """Read `count(*)` or `function(column)`. Raises InvalidSetting."""
    call = _call(text, FUNCTIONS)
    if call is None:
        raise InvalidSetting(
            f"an aggregate is one of {', '.join(FUNCTIONS)} of a column of the included table",
            "for example: {late: count(*), longest: max(dep_delay)}",
        )
    return call


def _call(text: str, functions: Collection[str]) -> AggregateCall | None:
    match = AGGREGATE.fullmatch(text)
    function = match[1].lower() if match else ""
    argument = match[2] if match else ""
    if function not in functions or not argument or (argument == "*" and function != "count"):
        return None
    return AggregateCall(cast(Function, function), "" if argument == "*" else argument)


def selected(text: str) -> AggregateCall:
    """Read an aggregate over rows of a group, which may have FILTER (WHERE ...). Raises InvalidSetting."""
    match = FILTERED.fullmatch(text)
    if match is None:
        return _selected_call(text)
    return _selected_call(match["call"])._replace(condition=match["condition"].strip())


def _selected_call(text: str) -> AggregateCall:
    if match := DISTINCT.fullmatch(text):
        return AggregateCall("distinct", match["argument"])
    if match := PERCENTILE.fullmatch(text):
        try:
            fraction = float(match["fraction"])
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise InvalidSetting(
                f"percentile_disc takes a number from 0 to 1, and this is {match['fraction']}",
                "for example: percentile_disc(0.9) WITHIN GROUP (ORDER BY dep_delay)",
            )
        return AggregateCall("percentile_disc", match["argument"], fraction)
    call = _call(text, (*FUNCTIONS, *ENDS))
    if call is None:
        raise InvalidSetting(
            f"an aggregate is one of {', '.join((*FUNCTIONS, *ENDS))} or count(DISTINCT ...) of a"
            " column, count(*), or percentile_disc(...) WITHIN GROUP (ORDER BY ...)",
            "for example: {flights: count(*), longest: max(dep_delay)}",
        )
    return call


def _checked_by(read: Callable[[str], object]) -> AfterValidator:
    """Refuse a text, or one of the texts of a mapping, that can't be read."""

    def check(value: str | dict[str, str]) -> str | dict[str, str]:
        for text in [value] if isinstance(value, str) else value.values():
            read(text)
        return value

    return AfterValidator(check)


def _as_mapping(value: object) -> object:
    """Read a list of columns as a mapping from their names to themselves."""
    names = [value] if isinstance(value, str) else value
    return {name: name for name in names} if isinstance(names, list) else names


def _time_pair(pair: dict[str, str] | None) -> dict[str, str] | None:
    if pair is not None and len(pair) != 1:
        raise InvalidSetting(
            "compares one time of the parent with one of the included table",
            "for example: as_of: {dep_time: time_hour}",
        )
    return pair


def _member(name: str) -> str:
    if not name or name.startswith("_cdc"):
        raise InvalidSetting(
            "a member's name isn't empty and doesn't begin with _cdc", "for example: airline"
        )
    return name


def _view_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise InvalidSetting(
            "a view's name is a letter and up to 47 lower case letters, digits and _",
            "for example: flight_docs",
        )
    return name


Member = Annotated[str, AfterValidator(_member)]
ViewName = Annotated[str, AfterValidator(_view_name)]
Texts = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
Duration = Annotated[str, _checked_by(microseconds)]
TimePair = Annotated[dict[str, str] | None, AfterValidator(_time_pair)]
TimeKind = Literal["as_of", "previous", "next", "during"]
TIME_KINDS: tuple[TimeKind, ...] = ("as_of", "previous", "next", "during")
Aggregates = Annotated[dict[Member, str], _checked_by(aggregate)]
Selected = Annotated[dict[Member, str], _checked_by(selected)]
GroupedBy = Annotated[dict[Member, str], BeforeValidator(_as_mapping)]


class IncludeSettings(Section):
    """Rows of another table, in the document of a row."""

    table: str = Field(pattern=TABLE, description="schema.table", examples=["public.airlines"])
    on: dict[str, str] = Field(min_length=1, examples=["{carrier: carrier}"])
    """Which rows: those whose column (at the right) equals the parent's column (at the left). SQL
    expressions are accepted on both sides; NULL equals nothing.
    """
    as_of: TimePair = Field(default=None, examples=["{dep_time: time_hour}"])
    """Of these rows the last one whose time (at the right) isn't after the parent's (at the left)."""
    previous: TimePair = Field(default=None, examples=["{dep_time: arr_time}"])
    """Of these rows the last one whose time is before the parent's."""
    next: TimePair = Field(default=None, examples=["{placed: paid_at}"])
    """Of these rows the first one whose time is after the parent's."""
    during: TimePair = Field(default=None, examples=["{dep_time: time_hour}"])
    """Of these rows all whose time is at most `before` earlier and `after` later than the parent's."""
    within: Duration | None = Field(default=None, examples=["2 hours"])
    """How far the row of `as_of`, `previous` or `next` may be from the parent's time; any when None."""
    before: Duration | None = Field(default=None, examples=["1 hour"])
    """How much earlier than the parent's time a row of `during` may be; not at all when None."""
    after: Duration | None = Field(default=None, examples=["1 hour"])
    """How much later than the parent's time a row of `during` may be; not at all when None."""
    many: bool = False
    """Whether the member is a list; else it is one object or null, and at most one row can match.
    """
    order_by: Texts = Field(default=(), examples=["[-year, title]"])
    """Columns that a list is ordered by, `-column` or `column desc` from the largest on. NULL comes
    last, texts are ordered by their code points (COLLATE "C"), equal rows by their ids.
    """
    limit: int = Field(default=1000, ge=1, le=10_000)
    """The longest that a list gets; what it is ordered by decides who stays."""
    flatten: str | None = Field(default=None, examples=["name"])
    """A column or a member whose value stands for the whole object."""
    columns: tuple[str, ...] | None = Field(default=None, examples=["[name, city]"])
    """What the document shows of a row: all captured columns when None."""
    where: str | None = Field(default=None, examples=["\"status <> 'draft'\""])
    """The condition in SQL that a row has to meet; others are as if they weren't there."""
    aggregates: Aggregates = Field(default={}, examples=["{late: count(*), mean: avg(dep_delay)}"])
    """Members of the parent, by name: count, sum, min, max or avg over all its rows of this table
    that meet `where`, whatever the limit.
    """
    show: bool = True
    """Whether the document has the member itself; false where only its aggregates are wanted."""
    include: dict[Member, "IncludeSettings"] = {}
    """Members of its objects, by name."""

    @property
    def time(self) -> tuple[TimeKind, str, str] | None:
        """Which join in time it is, the parent's column and its own; None where it is none."""
        for kind in TIME_KINDS:
            pair: Mapping[str, str] | None = getattr(self, kind)
            if pair:
                [(parent, child)] = pair.items()
                return kind, parent, child
        return None

    @model_validator(mode="after")
    def _check_time(self) -> "IncludeSettings":
        listed = self.model_fields_set
        kinds = [kind for kind in TIME_KINDS if kind in listed]
        if len(kinds) > 1:
            raise InvalidSetting(
                f"{kinds[0]} and {kinds[1]} can't both say which row",
                f"keep one of {', '.join(TIME_KINDS)}",
            )
        if "during" in kinds and not self.many:
            raise InvalidSetting("during may find several rows", "add many: true")
        if kinds and self.many and "during" not in kinds:
            raise InvalidSetting(f"{kinds[0]} finds one row", "take out many, or use during")
        if self.within is not None and not {"as_of", "previous", "next"}.intersection(kinds):
            raise InvalidSetting(
                "within is of as_of, previous or next", "for example: as_of: {dep_time: time_hour}"
            )
        if "during" not in kinds and (unused := {"before", "after"} & listed):
            raise InvalidSetting(
                f"{min(unused)} is of during", "for example: during: {dep_time: time_hour}"
            )
        return self

    @model_validator(mode="after")
    def _check_many(self) -> "IncludeSettings":
        listed = self.model_fields_set
        lists = [name for name in ("order_by", "limit", "aggregates") if name in listed]
        if lists and not self.many:
            raise InvalidSetting(
                f"{lists[0]} is a list's, and this is one object", "add many: true"
            )
        shown = ("order_by", "limit", "flatten", "columns", "include")
        if not self.show and not self.aggregates:
            raise InvalidSetting(
                "shows nothing: no member and no aggregates",
                "for example: aggregates: {n: count(*)}",
            )
        if unseen := [name for name in shown if name in listed and not self.show]:
            raise InvalidSetting(
                f"{unseen[0]} says how the member looks, which isn't shown",
                f"take out {unseen[0]} or show: false",
            )
        if self.flatten is not None and self.columns is not None:
            raise InvalidSetting(
                "flatten leaves one value, so columns mean nothing", "take out columns"
            )
        return self


class StepSettings(Section):
    """A step of a pattern."""

    where: str = Field(examples=["dep_delay > 30"])
    """The condition in SQL that a row of this step has to meet."""
    times: int = Field(default=1, ge=1)
    """How many rows have to meet it, one after the other."""


Step = Annotated[
    StepSettings,
    BeforeValidator(lambda value: {"where": value} if isinstance(value, str) else value),
]
LONGEST = 10
"""Rows of a pattern: each takes a look at the state, of every document."""


class PatternSettings(Section):
    """Rows of one table in succession."""

    by: Texts = Field(min_length=1, examples=["[tailnum]"])
    """Columns that have the same values in all rows of a match, such as the number of an aircraft. SQL
    expressions are accepted; NULL equals nothing.
    """
    order_by: str = Field(examples=["dep_time"])
    """The time column that says which row comes next; rows of one time follow each other by their ids."""
    steps: dict[Member, Step] = Field(
        min_length=1, examples=["{late: {where: dep_delay > 30, times: 3}}"]
    )
    """Conditions in SQL by name, in the order in which rows have to meet them. Instead of the text of a
    condition a step may have `where` and `times`.
    """
    rows: Literal["next", "any"] = "next"
    """Which row a step looks at: the `next` one of the same `by`; or `any` later one, so that other rows
    may lie between.
    """
    within: Duration = Field(examples=["24 hours"])
    """The longest time between the first and the last row; with `unless` also how long it waits after the
    last row.
    """
    unless: str | None = Field(default=None, examples=["kind = 'landed'"])
    """A condition in SQL: the pattern is complete only once `within` has passed since its last row, and
    no later row of the same `by` within that time meets the condition.
    """

    @model_validator(mode="after")
    def _check_length(self) -> "PatternSettings":
        rows = sum(step.times for step in self.steps.values())
        if rows > LONGEST:
            raise InvalidSetting(
                f"a pattern has {LONGEST} rows at most, and these are {rows}",
                "take fewer times, or fewer steps",
                ("steps",),
            )
        if rows == 1 and self.unless is None:
            raise InvalidSetting(
                "one row is no pattern",
                "for example: steps: {late: {where: dep_delay > 30, times: 3}}; or add unless",
                ("steps",),
            )
        return self


class ViewSettings(Section):
    """A view: a document for each row of its root."""

    tag: ClassVar[str] = "a view with root"

    root: str = Field(pattern=TABLE, description="schema.table", examples=["public.flights"])
    """The table whose rows have a document each, under their own keys."""
    columns: tuple[str, ...] | None = Field(default=None, examples=["[carrier, flight]"])
    """The row's columns in the document, in addition to its key: all captured columns when None."""
    where: str | None = Field(default=None, examples=["\"status <> 'scheduled'\""])
    """The condition in SQL that a row has to meet to have a document."""
    include: dict[Member, IncludeSettings] = {}
    """Members from other tables, by name."""
    having: str | None = Field(default=None, examples=['"inbound.arr_delay > 30"'])
    """The condition in SQL that a document has to meet, over what it shows: its members, and with a dot
    the members of an object. A document that doesn't meet it isn't sent, or is removed.
    """
    clock: str = Field(default=COMMIT, examples=["dep_time"])
    """What `now()` is: `commit` for the time of Postgres up to which all commits are processed, or a time
    column of the root for the latest time that any row had there.
    """
    alerts: bool = False
    """Whether the view's topic has each change of a document exactly once, for consumers that read
    committed records: `c` when it appears, `u` when it changes, a tombstone when it goes. Views with
    `having` or `now()`, and those with a pattern, do so anyway.
    """
    to: tuple[str, ...] = Field(min_length=1, examples=["[search, cache]"])
    """The sinks that hold the documents; `topic` for none but the view's topic, which it always
    has.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and (grouped := [name for name in GROUPED if name in tree]):
            raise InvalidSetting(
                f"{grouped[0]} is of a view that begins with from: a document for each group of rows",
                "for example: from: public.flights, group_by: [origin], select: {flights: count(*)}",
            )
        if isinstance(tree, Mapping) and (later := [name for name in LATER if name in tree]):
            raise InvalidSetting(
                f"{later[0]} isn't supported",
                "a view begins with root, with from and pattern, or with from and select",
            )
        return tree


class PatternViewSettings(ViewSettings):
    """A view with a pattern: a document for each row that completes it."""

    tag: ClassVar[str] = "a view with a pattern"

    root: str = Field(
        alias="from", pattern=TABLE, description="schema.table", examples=["public.flights"]
    )
    """The table in whose rows the pattern is looked for."""
    where: str | None = None
    """Refused: each step of the pattern has a condition."""
    pattern: PatternSettings
    """Conditions on rows in succession. Each row that completes them has a document, under its own key,
    with one more member for each step before it.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and "where" in tree:
            raise InvalidSetting(
                "each step of a pattern has a condition, so where means nothing",
                "move it to steps, or to having",
                ("where",),
            )
        return tree


class WindowSettings(Section):
    """Windows of time: a grouped view has a document for each group and window."""

    time: str = Field(examples=["placed"])
    """The column whose time decides which windows a row is in. A row without a time is in none."""
    tumbling: Duration | None = Field(default=None, examples=["1 hour"])
    """How long windows are that follow each other."""
    hopping: Duration | None = Field(default=None, examples=["1 hour"])
    """How long windows are that overlap: one begins after each `every`."""
    every: Duration | None = Field(default=None, examples=["10 minutes"])
    """The time between the beginnings of two windows of `hopping`, which is a multiple of it."""
    session: Duration | None = Field(default=None, examples=["30 minutes"])
    """The longest pause between two rows of a window that lasts as long as rows follow each other."""
    sliding: Duration | None = Field(default=None, examples=["1 hour"])
    """How long before each row its window begins, which ends with the row: so each row has a document."""
    start: date = Field(default=date(1970, 1, 1), examples=["2013-01-07"])
    """A day, in UTC, at whose beginning a window begins: for weeks, a Monday."""
    lateness: Duration | None = Field(default=None, examples=["1 hour"])
    """How long after its end a window of `tumbling` or `hopping` is corrected: then it is closed, and
    changes that come later are counted and listed instead. For ever when None.
    """

    @model_validator(mode="after")
    def _check_kind(self) -> "WindowSettings":
        kinds = (self.tumbling, self.hopping, self.session, self.sliding)
        if sum(kind is not None for kind in kinds) != 1:
            raise InvalidSetting(
                "a window is one of tumbling, hopping, session and sliding",
                "for example: window: {tumbling: 1 hour, time: placed}",
            )
        if (self.hopping is None) != (self.every is None):
            raise InvalidSetting(
                "every is of hopping, which needs it",
                "for example: window: {hopping: 1 hour, every: 10 minutes, time: placed}",
            )
        if "start" in self.model_fields_set and not (self.tumbling or self.hopping):
            raise InvalidSetting(
                "start says where windows of one length begin, and these begin with rows",
                "take out start",
            )
        if self.lateness is not None and not (self.tumbling or self.hopping):
            kind = "a session" if self.session else "the window of a row"
            raise InvalidSetting(
                f"lateness needs windows that end by themselves: {kind} is corrected for ever",
                "take out lateness, or use tumbling",
                ("lateness",),
            )
        size = self.size
        if self.session is not None or (self.sliding is not None and size):
            return self
        if size == 0 or self.step == 0:
            kind = "sliding" if self.sliding else "tumbling"
            example = "hopping: 1 hour, every: 10 minutes" if self.hopping else f"{kind}: 1 hour"
            raise InvalidSetting("a window has a length", f"for example: {example}")
        if size % self.step:
            raise InvalidSetting(
                f"{self.hopping} is no multiple of every: {self.every}",
                "for example: hopping: 1 hour, every: 10 minutes",
            )
        if size // self.step > MOST_WINDOWS:
            raise InvalidSetting(
                f"{self.hopping} every {self.every}: a row would be in {size // self.step:,} windows,"
                f" at most {MOST_WINDOWS} are",
                "choose a longer every",
            )
        return self

    @property
    def size(self) -> int:
        """The length of a window, in microseconds; of a session the longest pause."""
        return microseconds(self.tumbling or self.hopping or self.session or self.sliding or "")

    @property
    def step(self) -> int:
        """The time between the beginnings of two windows, in microseconds."""
        return microseconds(self.every) if self.every else self.size


class GroupedViewSettings(Section):
    """A grouped view: a document for each group of a table's rows, and window of time."""

    tag: ClassVar[str] = "a view with from"

    root: str = Field(
        alias="from", pattern=TABLE, description="schema.table", examples=["public.flights"]
    )
    """The table whose rows are grouped."""
    where: str | None = Field(default=None, examples=["\"status <> 'scheduled'\""])
    """The condition in SQL that a row has to meet to count."""
    window: WindowSettings | None = Field(
        default=None, examples=["{tumbling: 1 hour, time: placed}"]
    )
    """The windows of time that there are documents for; one for all times when None."""
    group_by: GroupedBy = Field(default={}, examples=["[origin]"])
    """Columns, or names with SQL expressions: rows with equal values are a group. The names are
    members of the document, and its key. A row in which one of them is NULL is in no group.
    """
    select: Selected = Field(
        min_length=1, examples=["{flights: count(*), late: count(*) FILTER (WHERE dep_delay > 15)}"]
    )
    """The other members of the document, over the rows of a group: `count(*)`; count, sum, avg, min, max,
    first, last or count(DISTINCT ...) of a column; or percentile_disc(0.9) WITHIN GROUP (ORDER BY
    column). Each may have FILTER (WHERE ...), for the rows that meet a condition.
    """
    order_by: str | None = Field(default=None, examples=["id"])
    """The column that says which row of a group is its first and its last one, where there is no window:
    the rows of a window are in the order of its time. A row in which it is NULL is neither.
    """
    having: str | None = Field(default=None, examples=['"flights >= 5"'])
    """The condition in SQL that a document has to meet, over its members. A document that doesn't meet
    it isn't sent, or is removed.
    """
    clock: str = Field(default=COMMIT, examples=["dep_time"])
    """What `now()` is in `having`, and what windows with `lateness` close by: `commit` for the time of
    Postgres up to which all commits are processed, or a time column of the table for the latest time that
    any row had there.
    """
    alerts: bool = False
    """Whether the view's topic has each change of a document exactly once. Views with `having`,
    `lateness` or sessions do so anyway.
    """
    to: tuple[str, ...] = Field(min_length=1, examples=["[search, cache]"])
    """The sinks that hold the documents; `topic` for none but the view's topic, which it always
    has.
    """

    @property
    def include(self) -> dict[str, IncludeSettings]:
        """Nothing: a group has no rows of other tables."""
        return {}

    @model_validator(mode="after")
    def _check_order(self) -> "GroupedViewSettings":
        ends = [name for name, text in self.select.items() if selected(text).function in ENDS]
        if self.order_by is not None and self.window is not None:
            raise InvalidSetting(
                "the rows of a window are in the order of its time",
                "take out order_by",
                ("order_by",),
            )
        if self.order_by is not None and not ends:
            raise InvalidSetting(
                "order_by is of first and last, and select has neither",
                "take out order_by",
                ("order_by",),
            )
        if ends and self.order_by is None and self.window is None:
            raise InvalidSetting(
                "nothing says which row is the first and the last one",
                "for example: order_by: id",
                ("select", ends[0]),
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> "GroupedViewSettings":
        if self.window is None and not self.group_by:
            raise InvalidSetting(
                "neither group_by nor window says what a document is of",
                "for example: group_by: [origin]",
            )
        return self


def closes(view: "AnyView") -> bool:
    window = view.window if isinstance(view, GroupedViewSettings) else None
    return window is not None and window.lateness is not None


def _tag(tree: object) -> str:
    """Say which kind of view a section of the file is, or what was made of it."""
    if not isinstance(tree, Mapping):
        return str(getattr(tree, "tag", ViewSettings.tag))
    if "pattern" in tree:
        return PatternViewSettings.tag
    return GroupedViewSettings.tag if "from" in tree and "root" not in tree else ViewSettings.tag


AnyView = Annotated[
    Annotated[ViewSettings, Tag(ViewSettings.tag)]
    | Annotated[PatternViewSettings, Tag(PatternViewSettings.tag)]
    | Annotated[GroupedViewSettings, Tag(GroupedViewSettings.tag)],
    Discriminator(_tag),
]


def includes(
    settings: AnyView | IncludeSettings, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], IncludeSettings]]:
    """Yield every include of a view, at whatever depth, with the keys that lead to it."""
    for name, include in settings.include.items():
        place = (*keys, "include", name)
        yield place, include
        yield from includes(include, place)


def tables_of(view: AnyView) -> list[str]:
    return sorted({view.root, *(include.table for _, include in includes(view))})


def check_views(
    views: Mapping[str, AnyView], sinks: Collection[str], entries: Sequence[TableSettings]
) -> None:
    """Check what views name of the rest of the file: sinks, and entries of `source.tables`. Raises
    InvalidSetting.
    """
    for name, view in views.items():
        for number, sink in enumerate(view.to):
            if sink != TOPIC_ONLY and sink not in sinks:
                raise InvalidSetting(
                    "there is no such sink",
                    f"one of: {', '.join([*sinks, TOPIC_ONLY])}",
                    (name, "to", str(number)),
                )
        root = type(view).model_fields["root"].alias or "root"
        places: list[tuple[tuple[str, ...], str]] = [((name, root), view.root)]
        places += [((name, *keys, "table"), part.table) for keys, part in includes(view)]
        for keys, table in places:
            if not any(entry.matches(table) for entry in entries):
                raise InvalidSetting(
                    "the table isn't captured", f"add {table} to source.tables", keys
                )
