"""The pipeline as hops with words and a state each: what the picture draws and a screen reader
reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from cdc.apply.progress import WORKING
from cdc.config.view_settings import STATE
from cdc.model.finding import Finding, Severity
from cdc.model.finding_codes import CAPTURE, LOG, SOURCE
from cdc.model.wording import clock, duration
from cdc.observe.status import SinkStatus, Status
from cdc.serve.dashboard import Series

UNREAD = "could not be read"
SYMBOLS = {"ok": "✓", "info": "✓", "warning": "!", "degraded": "!", "down": "✕", "unknown": "?"}
"""The sign of each state, so that colour isn't its only mark."""
UNREAD_CODES = {"source-unreachable", "connect-unreachable", "kafka-unreachable"}
LINE = 18
"""Distance of two lines of text."""
LINES = 3
"""Lines of a sink's box of the usual height."""
BOX = 96
"""That height."""
APART = 20
"""Distance of two boxes."""
AROUND = (-28, -10, 20)
"""Where the lines of a level arrow stand: two above it, one below."""
WIDTH = 360
HEIGHT = 80
TOPS = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400)
"""Tops of the scale, in seconds. Less lag than the least isn't slow and stays near the ground."""


@dataclass(frozen=True)
class Part:
    """A server or a hop: its name, its state, and a few short lines. `state` is a severity, `ok` or
    `unknown`.
    """

    name: str
    state: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Branch:
    """What comes after Kafka: the hop to a sink, and the sink. `returns`: it writes documents back
    into Kafka.
    """

    hop: Part
    sink: Part
    returns: bool


@dataclass(frozen=True)
class Hops:
    """A pipeline from its source to its views."""

    source: Part
    capture: Part
    kafka: Part
    branches: tuple[Branch, ...]


def describe_hops(status: Status) -> Hops:
    """Describe each part of a diagnosed status. A part that couldn't be read says so."""
    return Hops(
        _source(status),
        _capture(status),
        _kafka(status),
        tuple(_branch(status, sink) for sink in status.sinks),
    )


def _state(findings: Sequence[Finding], *hops: str, unread: bool = False) -> str:
    """Choose the worst severity of the findings on hops; `unknown` where the hop wasn't read."""
    if unread:
        return "unknown"
    severities = [finding.severity for finding in findings if finding.hop in hops]
    return min(severities, key=list(Severity).index, default="ok")


def _source(status: Status) -> Part:
    slot = status.slot
    codes = {finding.code for finding in status.findings}
    if "source-unreachable" in codes:
        return Part("Postgres", "unknown", (UNREAD,))
    state = _state(status.findings, SOURCE)
    if slot is None:
        return Part("Postgres", "down", ("no replication slot",))
    retained = "" if slot.retained_bytes is None else f"{decimal(slot.retained_bytes)} of log kept"
    state_of_slot = "active" if slot.active else "not read"
    if status.slot_loss_s is not None:
        state_of_slot = f"is lost in {duration(status.slot_loss_s)}"
    words = (f"slot {state_of_slot}", retained)
    return Part("Postgres", state, tuple(filter(None, words)))


def _capture(status: Status) -> Part:
    beat = status.heartbeat
    connector = status.connector
    codes = {finding.code for finding in status.findings}
    state = _state(status.findings, CAPTURE, unread=bool(codes & UNREAD_CODES))
    lines = []
    if status.snapshot_records is not None:
        lines.append(f"first snapshot, {status.snapshot_records:,} records")
    elif beat is None:
        lines.append(f"lag {UNREAD}" if "kafka-unreachable" in codes else "no heartbeat yet")
    else:
        lines.append(f"{lag_text(beat.age_s if beat.late else beat.delay_s)} behind")
    if connector is None:
        lines.append(f"connector {UNREAD}")
    else:
        tasks = ", ".join(connector.tasks) or "none"
        at_work = connector.state == tasks == "RUNNING"
        lines.append(f"connector {connector.state}{'' if at_work else f', task {tasks}'}")
    if status.slot and status.slot.lag_bytes is not None:
        lines.append(f"{decimal(status.slot.lag_bytes)} not confirmed")
    return Part(CAPTURE, state, tuple(lines))


def _kafka(status: Status) -> Part:
    if any(finding.code == "kafka-unreachable" for finding in status.findings):
        return Part("Kafka", "unknown", (UNREAD,))
    beat = status.heartbeat
    line = "no heartbeat yet" if beat is None else f"heartbeat {lag_text(beat.age_s)} ago"
    return Part("Kafka", _state(status.findings, LOG), ("the log", line))


def _branch(status: Status, sink: SinkStatus) -> Branch:
    hop = f"Kafka -> {sink.name}"
    documents = sink.name == STATE
    findings = [finding for finding in status.findings if finding.sink == sink.name]
    codes = {finding.code for finding in findings}
    # Offsets without a record, such as the marks of transactions, aren't waited for.
    measured = [
        view.lag_records if view.lag_seconds else 0
        for view in sink.views
        if view.lag_records is not None
    ]
    unread = not measured and bool(sink.views)
    if unread:
        lines: tuple[str, ...] = (f"lag {UNREAD}",)
    else:
        lag = (
            f"lag {UNREAD}" if sink.lag_seconds is None else f"{lag_text(sink.lag_seconds)} behind"
        )
        lines = (lag, f"{sum(measured):,} records waiting")
    if sink.state in WORKING and sink.rows_per_s:
        remaining = "" if sink.catch_up_s is None else f", {duration(sink.catch_up_s)} left"
        lines = (*lines, f"{sink.rows_per_s:,.0f} changes/s{remaining}")
    state = _state(findings, hop)
    silent = unread and "sink-unreachable" not in codes
    arrow = Part(hop, "unknown" if silent and state == "ok" else state, lines)
    words = tuple(_sink_lines(status, sink, unread="sink-unreachable" in codes))
    shown = "unknown" if unread and state in ("ok", "down") else state
    return Branch(arrow, Part(sink.name, shown, words), documents)


def _sink_lines(status: Status, sink: SinkStatus, *, unread: bool) -> Iterator[str]:
    yield UNREAD if unread else sink.state
    tables = len(sink.views)
    yield f"{tables} table{'' if tables == 1 else 's'}"
    if quarantined := sum(view.quarantined for view in sink.views):
        yield f"{quarantined:,} in quarantine"
    if sink.name == STATE and status.documents:
        yield f"{sum(status.documents.dirty.values()):,} documents to send"
        if late := sum(status.documents.late.values()):
            yield f"{late:,} changes after their windows had closed"
        views_by_time: dict[str, list[str]] = {}
        for view, status_of_clock in status.documents.clocks.items():
            views_by_time.setdefault(clock(status_of_clock.at), []).append(view)
        for time, views in views_by_time.items():
            yield f"clock {time}: {', '.join(views)}"


def lag_text(seconds: float) -> str:
    """A lag as people say it; what is next to nothing is 0 s."""
    return duration(seconds) if seconds >= 0.05 else "0 s"


@dataclass(frozen=True)
class Box:
    """A server: a rectangle with its name and its lines."""

    x: int
    y: int
    width: int
    height: int
    part: Part


@dataclass(frozen=True)
class Arrow:
    """A hop: a path with the lines of its numbers, and where they stand."""

    path: str
    part: Part
    x: int
    y: int
    anchor: str
    head: str
    shifts: tuple[int, ...] = (0, LINE, 2 * LINE)
    """How far below `y` each line stands; there are no more lines than these."""
    returning: bool = False
    """The way of documents back into Kafka: dashed, without lines."""


@dataclass(frozen=True)
class Picture:
    """All shapes of a layout, and its size."""

    name: str
    width: int
    height: int
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


def lay_out_wide(hops: Hops) -> Picture:
    """From left to right: three columns, a row for each sink."""
    box_width = 200
    gap = 230
    log_x = box_width + gap
    sinks_x = log_x + box_width + gap
    heights = [_box_height(branch.sink) for branch in hops.branches]
    height = max(BOX + APART, sum(heights) + APART * len(heights))
    middle = height // 2
    boxes = [
        Box(2, middle - 46, box_width, 92, hops.source),
        Box(log_x, middle - 46, box_width, 92, hops.kafka),
    ]
    arrows = [
        Arrow(
            f"M {box_width + 2} {middle} H {log_x - 8}",
            hops.capture,
            box_width + gap // 2,
            middle,
            "middle",
            _head(log_x, middle),
            AROUND,
        )
    ]
    top = APART // 2
    for branch, box_height in zip(hops.branches, heights, strict=True):
        y = top + BOX // 2
        boxes.append(Box(sinks_x, top, box_width, box_height, branch.sink))
        top += box_height + APART
        start = log_x + box_width
        bend = log_x + box_width + 22
        path = f"M {start} {middle} H {bend} V {y} H {sinks_x - 8}"
        label_x = (bend + sinks_x) // 2
        head = _head(sinks_x, y)
        arrows.append(Arrow(path, branch.hop, label_x, y, "middle", head, AROUND))
        if branch.returns:
            path_back = f"M {sinks_x} {y + 36} H {bend - 10} V {middle + 30} H {start + 8}"
            arrows.append(
                Arrow(
                    path_back,
                    branch.hop,
                    0,
                    0,
                    "start",
                    _head(start, middle + 30, -1),
                    returning=True,
                )
            )
    return Picture("wide", sinks_x + box_width + 2, height, boxes, arrows)


def lay_out_tall(hops: Hops) -> Picture:
    """From top to bottom: a line goes down from Kafka, each sink branches off it."""
    width = 340
    indent = 44
    boxes = [Box(2, 2, width - 4, 88, hops.source)]
    arrows = [
        Arrow("M 22 90 V 160", hops.capture, indent, 108, "start", _head(22, 168, 0, 1)),
    ]
    boxes.append(Box(2, 168, width - 4, 88, hops.kafka))
    y = 256
    for branch in hops.branches:
        label_y = y + 22
        box_y = y + 70
        middle = box_y + 46
        path = f"M 22 256 V {middle} H {indent - 8}"
        head = _head(indent, middle)
        arrows.append(Arrow(path, branch.hop, indent, label_y, "start", head))
        box_height = _box_height(branch.sink)
        boxes.append(Box(indent, box_y, width - indent - 2, box_height, branch.sink))
        if branch.returns:
            path_back = f"M {indent} {middle + 24} H 10 V 266"
            arrows.append(
                Arrow(path_back, branch.hop, 0, 0, "start", _head(10, 258, 0, -1), returning=True)
            )
        y = box_y + box_height
    return Picture("tall", width, y + 4, boxes, arrows)


def _box_height(part: Part) -> int:
    return BOX + LINE * max(0, len(part.lines) - LINES)


def _head(x: int, y: int, right: int = 1, down: int = 0) -> str:
    """The head of an arrow that ends at (x, y). (right, down) is its direction: (1, 0) is to the
    right, (0, -1) is up.
    """
    back_x = x - 10 * right
    back_y = y - 10 * down
    side_x = 6 * abs(down)
    side_y = 6 * abs(right)
    return (
        f"M {back_x - side_x} {back_y - side_y} L {x} {y} L {back_x + side_x} {back_y + side_y} Z"
    )


@dataclass(frozen=True)
class Plot:
    """A plot with its words. `path` may be empty: nothing was measured."""

    hop: str
    span: str
    path: str
    area: str
    top: str
    summary: str


def lay_out_plot(series: Series) -> Plot:
    """Make the path of a series, and say it in words."""
    worst = series.worst or 0.0
    top = float(next((top for top in TOPS if top >= worst), worst))
    pieces = _pieces(series.values)
    lines = [_line(piece, top) for piece in pieces]
    return Plot(
        series.hop,
        series.span.name,
        " ".join(lines),
        " ".join(
            f"{line} L {_x(piece[-1][0])} {HEIGHT} L {_x(piece[0][0])} {HEIGHT} Z"
            for piece, line in zip(pieces, lines, strict=True)
        ),
        duration(top),
        _summary(series),
    )


def _summary(series: Series) -> str:
    measured = [value for value in series.values if value is not None]
    if not measured:
        return "not measured"
    latest = series.values[-1] if series.values[-1] is not None else series.values[-2]
    current = "not measured now" if latest is None else f"now {lag_text(latest)}"
    return f"{current}, at most {lag_text(max(measured))}"


def _pieces(values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Split a series where nothing was measured: (place from 0 to 1, value) of each piece. A piece of
    one value gets a width.
    """
    pieces: list[list[tuple[float, float]]] = []
    previous: float | None = None
    step = 1 / max(1, len(values))
    for number, value in enumerate(values):
        if value is not None:
            if previous is None:
                pieces.append([(number * step, value)])
            pieces[-1].append(((number + 1) * step, value))
        previous = value
    return pieces


def _line(piece: Sequence[tuple[float, float]], top: float) -> str:
    points = [f"{_x(place)} {HEIGHT - HEIGHT * value / top:.1f}" for place, value in piece]
    return "M " + " L ".join(points)


def _x(place: float) -> str:
    return f"{place * WIDTH:.1f}"
