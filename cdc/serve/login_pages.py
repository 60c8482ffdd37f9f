"""Log in with the token, and out."""

import asyncio
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cdc.serve import pages
from cdc.serve.access.guard import cookie_header, cookie_name, form_of, visitor_of
from cdc.serve.access.sessions import Sessions

REFUSAL_S = 0.5
"""Seconds before a wrong token is answered."""


async def show_form(request: Request) -> Response:
    """The form for name and token."""
    return pages.show(request, "login.html", "Log in", message="")


async def log_in(request: Request) -> Response:
    """Compare the token; a browser that has it gets a new cookie."""
    sessions: Sessions = request.app.state.sessions
    form = form_of(request)
    name = form.get("who", "").strip()[:80]
    if not name or not sessions.is_token(form.get("token", "")):
        await asyncio.sleep(REFUSAL_S)
        message = "Name and token are needed; the token was wrong or missing."
        return pages.show(request, "login.html", "Log in", 403, message=message)
    response = RedirectResponse("/", 303)
    secure = urlsplit(request.headers.get("origin", "")).scheme == "https"
    header = cookie_header(cookie_name(request.scope), sessions.log_in(name), secure=secure)
    response.headers["set-cookie"] = header
    return response


async def log_out(request: Request) -> Response:
    """End the session."""
    sessions: Sessions = request.app.state.sessions
    sessions.log_out(visitor_of(request).cookie)
    return RedirectResponse("/login", 303)
