"""The page in a real browser: it loads at once, follows, and is read by everybody."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from cdc.model.finding import find
from tests.browser.conftest import DESKTOP, PHONE, PICTURES, Tab
from tests.support.page import (
    Scene,
    ServedPage,
    away_status,
    fill_history,
    good_status,
    serve_page,
    sink,
    stuck_status,
)
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "overview": "/",
    "tables": "/tables",
    "generations": "/generations",
    "quarantine": "/quarantine",
    "runbook": "/runbooks/slot-at-risk",
}
HOPS = ("Postgres -> Kafka", "Kafka -> search", "Kafka -> cache", "Kafka -> warehouse")
AWAY = find("kafka-unreachable", "Kafka", "Kafka gives no answer within 4 s.", "cdc -p FILE up")
SCENES = {"well": good_status(), "stuck": stuck_status(), "away": away_status(AWAY)}
TOKEN = "correct-horse-battery-staple"
LOADS = 5
"""How often a page is loaded at most until it was painted in time once: the machine may be busy
during one.
"""
LOOKS = [
    ("well", "phone", "light"),
    ("well", "desktop", "dark"),
    ("stuck", "phone", "dark"),
    ("stuck", "desktop", "light"),
    ("away", "phone", "light"),
    ("away", "desktop", "dark"),
]
"""Scene, width and scheme: every two of them meet. No rule of the page's style asks for a width and
a scheme at once.
"""
PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"
LOADED = """() => ({
  painted: performance.getEntriesByName("first-contentful-paint")[0].startTime,
  bytes: [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter((entry) => !entry.name.endsWith("/events") && entry.initiatorType !== "fetch")
    .reduce((sum, entry) => sum + entry.transferSize, 0),
})"""


@pytest.fixture
def page() -> Iterator[ServedPage]:
    with serve_page(Scene()) as served:
        fill_history(served.dashboard, HOPS)
        yield served


def wait_for_text(tab: Tab, text: str) -> None:
    tab.page.get_by_text(text).first.wait_for()


def load(browser: "Browser", url: str) -> tuple[Any, Tab]:
    """Load a page where nothing is cached: the milliseconds until it was painted, and the bytes of
    that, without those of looks that came after it.
    """
    tab = Tab(browser)
    tab.page.goto(url, wait_until="load")
    wait_until(lambda: tab.page.evaluate(PAINTED), 20, "the first paint")
    return tab.page.evaluate(LOADED), tab


def test_it_is_painted_with_data_within_a_second_and_is_small(
    browser: "Browser", page: ServedPage
) -> None:
    tables = [f"public.t{number:03}" for number in range(500)]
    page.scene.status = good_status(*(sink(name, *tables) for name in ("cache", "search")))
    page.settle()
    for path, text in (("/", "shop is well"), ("/tables", "1000 of 1000 views")):
        painted = []
        for _ in range(LOADS):
            loaded, tab = load(browser, f"{page.url}{path}")
            painted.append(loaded["painted"])
            assert 5000 < loaded["bytes"] < 200_000, loaded
            assert text in tab.page.locator("body").inner_text()
            tab.context.close()
            assert {url for url in tab.requested if not url.startswith(page.url)} == set()
            assert tab.complaints == []
            if loaded["painted"] < 1000:
                break
        assert min(painted) < 1000, painted


def test_a_stuck_hop_is_shown_within_five_seconds_without_a_click(
    page: ServedPage, tab: Tab
) -> None:
    tab.page.goto(page.url)
    wait_for_text(tab, "shop is well")
    page.scene.status = stuck_status()
    wait_for_text(tab, "shop is degraded")
    wait_for_text(tab, "Kafka -> cache is slow, at least 754 s behind")
    picture = tab.page.locator("svg.picture.wide")
    assert "13 min behind" in (picture.text_content() or "")
    assert tab.page.locator("#verdict").inner_text().endswith("degraded")
    page.scene.status = good_status()
    wait_for_text(tab, "shop is well")


def test_a_server_that_ends_is_reported(tab: Tab) -> None:
    with serve_page(Scene()) as served:
        tab.page.goto(served.url)
        wait_for_text(tab, "shop is well")
    wait_for_text(tab, "cdc serve gives no answer: what is shown is old.")
    # The browser itself writes that the connection was refused, again and again while the page is
    # open.
    tab.page.goto("about:blank")
    assert all("ERR_" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_a_search_stays_while_the_page_follows(page: ServedPage, tab: Tab) -> None:
    tab.page.goto(f"{page.url}/tables")
    tab.page.get_by_label("Table or sink").fill("orders")
    tab.page.get_by_role("button", name="Show").click()
    wait_for_text(tab, "4 of 16 views match")
    tab.page.get_by_role("link", name="Waiting").click()
    page.scene.status = stuck_status()
    wait_for_text(tab, "3 of 12 views match")
    assert tab.page.locator("th[aria-sort=descending]").inner_text().startswith("Waiting")
    assert tab.page.get_by_label("Table or sink").input_value() == "orders"


def test_text_that_is_selected_stays_until_it_is_no_more(page: ServedPage, tab: Tab) -> None:
    tab.page.goto(page.url)
    tab.page.locator("#summary h1").click(click_count=3)
    page.scene.status = stuck_status()
    wait_for_text(tab, "Kafka -> cache is slow, at least 754 s behind")
    assert tab.page.locator("#summary h1").inner_text() == "shop is well"
    tab.page.evaluate("getSelection().empty()")
    wait_for_text(tab, "shop is degraded")


def test_it_is_used_by_keyboard_and_focus_stays_while_the_page_follows(
    page: ServedPage, tab: Tab
) -> None:
    page.scene.status = stuck_status()
    page.settle()
    tab.page.goto(page.url)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"
    runbook = tab.page.locator("#runbook-1")
    while not runbook.evaluate("link => link === document.activeElement"):
        tab.page.keyboard.press("Tab")
    page.scene.status = away_status(AWAY)
    wait_for_text(tab, "shop is down")
    assert tab.page.evaluate("document.activeElement.id") == "runbook-1"
    tab.page.keyboard.press("Enter")
    wait_for_text(tab, "What it means.")


def test_with_the_header_of_a_proxy_it_follows_and_says_when_the_proxy_has_none(tab: Tab) -> None:
    with serve_page(Scene(), TOKEN) as served:
        tab.context.set_extra_http_headers({"authorization": f"Bearer {TOKEN}"})
        tab.page.goto(served.url)
        wait_for_text(tab, "shop is well")
        served.scene.status = stuck_status()
        wait_for_text(tab, "shop is degraded")
        assert tab.complaints == []
        tab.context.set_extra_http_headers({})
        served.scene.status = good_status()
        wait_for_text(tab, "A token is needed")
        tab.page.goto("about:blank")
    assert all("401" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_it_is_read_without_the_script(browser: "Browser") -> None:
    with serve_page(Scene(stuck_status())) as served:
        plain = Tab(browser, java_script_enabled=False)
        for path in PAGES.values():
            plain.page.goto(f"{served.url}{path}")
            assert plain.page.locator("h1").count() == 1
        plain.page.goto(served.url)
        wait_for_text(plain, "Kafka -> cache is slow")
        plain.context.close()


def axe_is_content(tab: Tab) -> None:
    results = Axe().run(tab.page)
    assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize(("scene", "width", "scheme"), LOOKS)
def test_every_page_is_readable_by_everybody(
    browser: "Browser", page: ServedPage, scene: str, width: str, scheme: Any
) -> None:
    """Axe has nothing to say, nothing is wider than the window, and there is a picture to look at."""
    page.scene.status = SCENES[scene]
    page.settle()
    viewport = PHONE if width == "phone" else DESKTOP
    tab = Tab(browser, viewport=viewport, color_scheme=scheme)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, path in PAGES.items():
        tab.page.goto(f"{page.url}{path}")
        axe_is_content(tab)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], name
        picture = PICTURES / f"{name}-{scene}-{width}-{scheme}.png"
        tab.page.screenshot(path=picture, full_page=True)
    assert tab.complaints == []
    tab.context.close()
