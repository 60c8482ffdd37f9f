"""A real browser, the system's chromium: Debian's package of that name.

Without it these tests are skipped, except in CI, where they fail.
"""

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.pages import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
PICTURES = ROOT / "build" / "screenshots"
"""Screenshots of every page, made again by each run."""
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if path is None:
        reason = "there is no chromium: apt-get update && apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium's sandbox doesn't work for root, and no page is foreign here.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        started = playwright.chromium.launch(executable_path=path, args=arguments)
        yield started
        started.close()


class Tab:
    """A page of the browser, with everything that it complained about."""

    def __init__(self, browser: "Browser", **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.context.set_default_timeout(60_000)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", self._note_line)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note_request)

    def _note_line(self, line: "ConsoleMessage") -> None:
        if line.type in ("error", "warning"):
            self.complaints.append(line.text)

    def _note_request(self, request: "Request") -> None:
        self.requested.append(request.url)


@pytest.fixture
def tab(browser: "Browser") -> Iterator[Tab]:
    """A tab of a desktop; in the end nobody must have complained."""
    opened = Tab(browser)
    yield opened
    opened.context.close()
    assert opened.complaints == []
