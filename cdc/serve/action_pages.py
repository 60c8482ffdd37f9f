"""Ask before an action, start it, interrupt it."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cdc.serve import pages
from cdc.serve.access.guard import form_of, visitor_of
from cdc.serve.actions import Action, Actions, Refusal, choose
from cdc.serve.actions import Request as ActionRequest


async def ask(request: Request) -> Response:
    """Say what an action does, and ask whether it is meant."""
    _actions(request)
    chosen = _choose(request, dict(request.query_params))
    return pages.show(request, "ask.html", chosen.verb.title, chosen=chosen)


async def start(request: Request) -> Response:
    """Start an action, and show its output."""
    start_requested(request)
    return RedirectResponse("/activity", 303)


async def interrupt(request: Request) -> Response:
    """Interrupt the action at work."""
    visitor = visitor_of(request)
    _actions(request).interrupt(visitor.name, visitor.address)
    return RedirectResponse("/activity", 303)


def start_requested(request: Request) -> Action:
    """Start the action that a form names. Raises HTTPException."""
    actions, visitor = _actions(request), visitor_of(request)
    chosen = _choose(request, form_of(request))
    if not visitor.name:
        raise HTTPException(400, "Say who you are: the log of actions names everybody.")
    try:
        return actions.start(chosen, visitor.name, visitor.address)
    except Refusal as refusal:
        raise HTTPException(409, str(refusal)) from None


def _actions(request: Request) -> Actions:
    actions: Actions | None = request.app.state.dashboard.actions
    if actions is None:
        raise HTTPException(403, "Actions aren't allowed: cdc serve runs without --allow-actions.")
    return actions


def _choose(request: Request, form: Mapping[str, str]) -> ActionRequest:
    dashboard = request.app.state.dashboard
    if dashboard.status.sample is None:
        raise HTTPException(503, "The first look is under way.")
    control = dashboard.control.sample
    records = control.value.quarantine if control else ()
    try:
        return choose(form, dashboard.status.sample.value, records)
    except Refusal as refusal:
        raise HTTPException(400, str(refusal)) from None
