"""The JSON API, the stream of events, and what Prometheus and a supervisor ask for.

All of it is what was last seen; `/api/sample` says when that was.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from cdc.model.wording import completed_document
from cdc.observe.diagnosis import document
from cdc.observe.pipeline_metrics import LookMetrics
from cdc.observe.sampler import Sampler
from cdc.observe.status import Status
from cdc.serve.dashboard import SPANS, ControlState, Dashboard

POLL_S = 0.25
"""Seconds between two looks for something new."""
SILENCE_S = 15.0
"""Seconds of silence after which an empty event is sent."""


def dashboard_of(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


async def status(request: Request) -> Response:
    """The document of `cdc status --json`, as of the last look; 503 before the first."""
    dashboard = dashboard_of(request)
    described = document(_last_value(dashboard.status))
    return JSONResponse(completed_document(described, dashboard.complete))


async def sample(request: Request) -> Response:
    """When each look ended, how long it took, and why it fails if it does."""
    dashboard = dashboard_of(request)
    parts: dict[str, Sampler[Any]] = {"status": dashboard.status, "control": dashboard.control}
    described = {name: _freshness(sampler) for name, sampler in parts.items()}
    return JSONResponse(completed_document(described, dashboard.complete))


async def lag(request: Request) -> Response:
    """The lag of each hop over the last hour or day: the worst of each slot, null: unmeasured."""
    span = SPANS.get(request.path_params["span"])
    if span is None:
        raise HTTPException(404, f"There are {', '.join(SPANS)}.")
    series = dashboard_of(request).history.series(span, time.time())
    return JSONResponse(
        {
            "slot_s": span.slot_s,
            "until": max((hop.until for hop in series), default=None),
            "hops": {hop.hop: hop.values for hop in series},
        }
    )


async def generations(request: Request) -> Response:
    """The live generation of each view, those kept for a rollback, and what is being built."""
    dashboard = dashboard_of(request)
    control: ControlState = _last_value(dashboard.control)
    status: Status = _last_value(dashboard.status)
    live = [
        {"sink": sink.name, "table": view.table, "generation": view.generation}
        for sink in status.sinks
        for view in sink.views
    ]
    retained = [asdict(view) for view in control.retained]
    builds = [asdict(build) for build in control.builds]
    return JSONResponse({"live": live, "kept": retained, "builds": builds})


async def quarantine(request: Request) -> Response:
    """The records in quarantine: places and reasons, never values."""
    control: ControlState = _last_value(dashboard_of(request).control)
    records = [
        {
            "place": record.entry.place,
            "sink": record.entry.sink,
            "topic": record.entry.topic,
            "reason": record.reason,
            "at": record.at,
        }
        for record in control.quarantine
    ]
    return JSONResponse({"quarantine": records})


async def events(request: Request) -> Response:
    """A stream of server-sent events, `sample` whenever there is something new."""
    return StreamingResponse(_events(dashboard_of(request)), media_type="text/event-stream")


async def _events(dashboard: Dashboard) -> AsyncIterator[str]:
    shown = -1
    sent_at = time.monotonic()
    with dashboard.status.watched(), dashboard.control.watched():
        while not dashboard.closing.is_set():
            if dashboard.number != shown:
                shown = dashboard.number
                sent_at = time.monotonic()
                yield f"event: sample\ndata: {shown}\n\n"
            elif time.monotonic() - sent_at > SILENCE_S:
                sent_at = time.monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(POLL_S)


async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    text = generate_latest(LookMetrics(dashboard_of(request).status))
    return Response(text, media_type="text/plain; version=0.0.4")


async def live(request: Request) -> Response:
    """Answer a liveness probe: 503 when a round of questions to the servers never ends."""
    return _probe(*dashboard_of(request).live())


async def ready(request: Request) -> Response:
    """Answer a readiness probe: 503 before the first round of questions has ended."""
    return _probe(*dashboard_of(request).ready())


def _probe(good: bool, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", 200 if good else 503)


def _last_value(sampler: Sampler[Any]) -> Any:
    """The last sample. Raises HTTPException: there is none yet, or never was one."""
    if sampler.sample is None:
        reason = sampler.trouble.message if sampler.trouble else "The first look is under way."
        raise HTTPException(503, reason)
    return sampler.sample.value


def _freshness(sampler: Sampler[Any]) -> dict[str, Any]:
    sample = sampler.sample
    trouble = sampler.trouble
    return {
        "taken_at": sample.taken_at if sample else None,
        "took_s": round(sample.took_s, 3) if sample else None,
        "failure": asdict(trouble) if trouble else None,
    }
