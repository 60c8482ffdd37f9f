"""A page about constructed states, served by a real server."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

from cdc.model.finding import Finding
from cdc.observe import sampler
from cdc.observe.diagnosis import diagnose
from cdc.observe.status import (
    ConnectorStatus,
    DocumentsStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.quarantine.log import QuarantinedRecord, QuarantineKey
from cdc.readiness.facts import Slot
from cdc.serve.access import LOOPBACK, Access
from cdc.serve.dashboard import BuildProgress, ControlState, Dashboard, RetainedGeneration
from cdc.serve.server import PageServer
from tests.support.wait import wait_until

SLOT = Slot(True, 1, "0/1", "0/2", "reserved", 152, 3_300_000, None, "pgoutput", "shop", None, None)
TABLES = ("public.customers", "public.orders", "public.order_items", "billing.invoices")
GENERATION = "20261125t120000000000"


def sink(name: str, *tables: str, **settings: object) -> SinkStatus:
    views = tuple(
        ViewStatus(table, 0, 0.0, 1200 * (number + 1), time.time() - 30, generation=GENERATION)
        for number, table in enumerate(tables or TABLES)
    )
    return replace(
        SinkStatus(name, "running", time.time() - 3600, rows_per_s=120.0, views=views),
        **settings,  # type: ignore[arg-type]
    )


def good_status(*sinks: SinkStatus, **settings: object) -> Status:
    """A pipeline that is well, with views of several tables."""
    status = Status(
        "shop",
        ConnectorStatus("RUNNING", ("RUNNING",), None),
        SLOT,
        HeartbeatStatus(0.6, 0.045, 2.0),
        sinks or (sink("search"), sink("cache"), sink("warehouse"), sink("documents")),
        definitions="event triggers",
        documents=DocumentsStatus({"public.orders": 10}, {"public.orders": 900}, {"orders": 3}, 0),
    )
    return diagnose(replace(status, **settings))  # type: ignore[arg-type]


def stuck_status() -> Status:
    """RUNNING, and yet the cache doesn't get on; a table of it is in quarantine, another waits."""
    views = (
        ViewStatus("public.customers", 48_211, 754.0, 1200, time.time() - 760, generation=""),
        ViewStatus("public.orders", 12, 61.0, 1200, time.time() - 70, quarantined=2),
        ViewStatus("public.order_items", 0, 0.0, 900, time.time() - 70),
        ViewStatus("billing.invoices"),
    )
    waits = {
        "public.order_items": ["Column price has changed its type.", "cdc -p FILE rebuild cache"]
    }
    return good_status(sink("search"), sink("cache", views=views, aside=waits), sink("warehouse"))


def away_status(*unread: Finding) -> Status:
    """Nothing could be read."""
    views = tuple(ViewStatus(table) for table in TABLES)
    return diagnose(
        Status("shop", sinks=(SinkStatus("cache", views=views),), findings=tuple(unread))
    )


def control_state() -> ControlState:
    now = time.time()
    keys = [QuarantineKey("cache", "shop.public.orders", 0, offset, "7") for offset in (11, 12)]
    return ControlState(
        tuple(
            QuarantinedRecord(key, "The value is no <b>number</b>.", now - 60, number)
            for number, key in enumerate(keys)
        ),
        (
            BuildProgress("search", "replay", TABLES, True, now - 30, 61_000, 250_000, 14_000.0),
            BuildProgress("warehouse", "verify", TABLES[:1], False, now - 900, 10, 10),
        ),
        (RetainedGeneration("cache", "public.orders", "20261124t120000000000", now + 1800),),
    )


@dataclass
class Scene:
    """What the page's looks see; a test may change it, or have them fail."""

    status: Status = field(default_factory=good_status)
    control: ControlState = field(default_factory=control_state)
    error: Exception | None = None

    def see_status(self) -> Status:
        if self.error:
            raise self.error
        return self.status

    def see_control(self) -> ControlState:
        if self.error:
            raise self.error
        return self.control


@dataclass(frozen=True)
class ServedPage:
    """A page that is served, and what it is made of."""

    url: str
    scene: Scene
    dashboard: Dashboard

    def settle(self) -> None:
        """Wait until the page shows the scene as it is now."""
        number = self.dashboard.status.number
        wait_until(lambda: self.dashboard.status.number > number + 1, 10, "two more looks")


def fill_history(dashboard: Dashboard, hops: Sequence[str]) -> None:
    """Add a day with one outage, and an hour in which nothing was measured."""
    now = time.time()
    for age_s in (*range(86_400, 3600, -60), *range(3600, 0, -15)):
        lag: float | None = 0.2 + (age_s % 600) / 400
        if 30_000 < age_s < 34_000:
            lag = None
        elif 1200 < age_s < 2400 or 50_000 < age_s < 52_000:
            lag = 40.0 + age_s % 50
        dashboard.history.add(now - age_s, dict.fromkeys(hops, lag))


@contextmanager
def serve_page(scene: Scene, token: str | None = None) -> Iterator[ServedPage]:
    """Serve a scene on a free port. Looks are ten times as frequent as for people."""
    dashboard = Dashboard(
        "shop",
        scene.see_status,
        scene.see_control,
        lambda text: text.replace("-p FILE", "-p shop.yaml"),
    )
    server = PageServer(dashboard, Access("127.0.0.1", LOOPBACK, token), 0)
    thread = threading.Thread(target=server.answer)
    pauses = patch.multiple(sampler, PAUSE_S=0.1, IDLE_PAUSE_S=0.1)
    pauses.start()
    thread.start()
    try:
        wait_until(lambda: dashboard.status.number and dashboard.control.number, 10, "a first look")
        yield ServedPage(server.url.rstrip("/"), scene, dashboard)
    finally:
        server.close()
        thread.join(30)
        pauses.stop()
        assert not thread.is_alive()
