"""What `cdc run` posts to a real receiver: that a finding opens, and that it closes."""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.cli.console import call
from cdc.cli.health import observed
from cdc.config import settings
from cdc.config.settings import NotifySettings
from cdc.model.finding import Finding, find
from cdc.observe.webhook import Webhook
from cdc.runtime.context import Context
from tests.support.pipelines import NOWHERE, unreachable_file
from tests.support.receiver import Receiver
from tests.support.wait import wait_until

BEHIND = find("sink-behind", "cache", "Kafka -> cache is slow.", "cdc -p FILE run", sink="cache")
LATE = find("heartbeat-late", "shop", "Nothing comes.", "cdc -p FILE register")
AT_RISK = find("slot-at-risk", "shop", "The slot goes.", "cdc -p FILE run")
AWAY = find("kafka-unreachable", "kafka", "Kafka is away.", "cdc -p FILE register")
UNLIMITED = find(
    "setting-differs/max_slot_wal_keep_size", "shop", "No limit.", "ALTER SYSTEM SET a = 1;"
)
OPENED = ("opened", "sink-behind")
CLOSED = ("closed", "sink-behind")
Look = tuple[float, tuple[Finding, ...]]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def webhook(url: str, **settings: object) -> Webhook:
    entry = NotifySettings(url=url, **settings)  # type: ignore[arg-type]
    return Webhook(entry, "shop", lambda text: text.replace("FILE", "shop.yaml"))


def wait_for(receiver: Receiver, *events: tuple[str, str]) -> None:
    wait_until(lambda: receiver.events == [*events], 60, lambda: f"{receiver.events}")


def test_a_finding_is_posted_when_it_opens_and_when_it_closes(receiver: Receiver) -> None:
    slower = replace(BEHIND, message="Kafka -> cache is slower.")
    with closing(webhook(receiver.url)) as shop:
        shop.take([BEHIND], 1000)
        shop.take([slower], 1059)
        assert receiver.events == []
        shop.take([BEHIND], 1060)
        wait_for(receiver, OPENED)
        shop.take([slower], 1070)
        shop.take([], 1080)
        shop.take([], 1139)
        assert receiver.events == [OPENED]
        shop.take([], 1140)
        wait_for(receiver, OPENED, CLOSED)
    opened = {
        "pipeline": "shop",
        "event": "opened",
        "time": 1060,
        "code": "sink-behind",
        "severity": "degraded",
        "hop": "Kafka -> cache",
        "subject": "cache",
        "message": "Kafka -> cache is slow.",
        "fix": "cdc -p shop.yaml run",
        "since": 1000,
        "runbook": "docs/operate/runbooks/sink-behind.md",
        "text": "shop: degraded opened: Kafka -> cache is slow. Next: cdc -p shop.yaml run. (sink-behind)",
    }
    closed = {
        **opened,
        "event": "closed",
        "time": 1140,
        "message": "Kafka -> cache is slower.",
        "text": "shop: degraded closed: Kafka -> cache is slower. (sink-behind)",
    }
    assert receiver.bodies == [opened, closed]


@pytest.mark.parametrize(
    ("looks", "events"),
    [
        pytest.param([(t, (BEHIND,) if t < 45 else ()) for t in range(0, 900, 15)], [], id="brief"),
        pytest.param(
            [(t, (BEHIND,) if t % 60 < 30 else ()) for t in range(0, 86_400, 15)],
            [OPENED],
            id="comes and goes",
        ),
        pytest.param(
            [(0, (BEHIND,)), (60, (BEHIND,)), *((t, (AWAY,)) for t in range(75, 900, 15))],
            [OPENED, ("opened", "kafka-unreachable")],
            id="nobody can look",
        ),
        pytest.param([(t, (UNLIMITED,)) for t in range(0, 900, 15)], [], id="a remark"),
        pytest.param([(0, (AT_RISK,)), (60, (AT_RISK,))], [("opened", "slot-at-risk")], id="risk"),
    ],
)
def test_what_lasts_is_posted_once(
    looks: list[Look], events: list[tuple[str, str]], receiver: Receiver
) -> None:
    with closing(webhook(receiver.url)) as shop:
        for now, findings in looks:
            shop.take(findings, now)
        wait_for(receiver, *events)
    assert receiver.events == events


def test_an_address_gets_findings_of_its_severity(receiver: Receiver) -> None:
    with closing(webhook(receiver.url, severity="down", after_s=0)) as shop:
        shop.take([AT_RISK, BEHIND, AWAY], 0)
        wait_for(receiver, ("opened", "kafka-unreachable"))


@pytest.mark.parametrize("answer", [503, 0])
def test_a_receiver_that_was_away_gets_the_newest_state_of_each_finding_in_order(
    answer: int, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.observe.webhook.PAUSE_S", 0.1)
    receiver.answer = 429
    with closing(webhook(receiver.url, after_s=0)) as shop:
        shop.take([BEHIND], 1)
        wait_until(lambda: receiver.refused, 60, "the first post")
        receiver.answer = answer
        for now in range(2, 1000, 2):
            shop.take([BEHIND, LATE], now)
            shop.take([LATE], now + 1)
        seen = receiver.refused
        wait_until(lambda: receiver.refused > seen, 60, "another post")
        receiver.answer = 200
        wait_for(receiver, ("opened", "heartbeat-late"), CLOSED)
    assert [body["time"] for body in receiver.bodies] == [2, 999]


def test_what_closes_while_it_is_posted_is_posted_as_closed(receiver: Receiver) -> None:
    receiver.goes_on.clear()
    with closing(webhook(receiver.url, after_s=0)) as shop:
        shop.take([BEHIND], 1)
        wait_for(receiver, OPENED)
        shop.take([], 2)
        receiver.goes_on.set()
        wait_for(receiver, OPENED, CLOSED)


@pytest.mark.parametrize("answer", [404, 307])
def test_a_refusal_is_logged_without_the_address_and_holds_up_no_other_post(
    answer: int, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver.answer = answer
    with closing(webhook(receiver.url, after_s=0)) as shop:
        shop.take([BEHIND], 1)
        wait_until(lambda: receiver.refused, 60, "the refusal")
        receiver.answer = 200
        shop.take([BEHIND, LATE], 2)
        wait_for(receiver, ("opened", "heartbeat-late"))
    assert receiver.refused == 1
    for host in ("a-secret\u200b", "a-secret..com", NOWHERE):
        with closing(webhook(f"http://{host}/a-secret", after_s=0)) as shop:
            shop.take([BEHIND], 1)
    printed = "".join(capfd.readouterr())
    assert printed.count("notification_not_delivered") >= 4
    assert f"answer {answer}" in printed
    assert "ConnectError" in printed
    assert "a-secret" not in printed


def test_a_login_in_files_is_read_at_each_post(
    receiver: Receiver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = unreachable_file(tmp_path, "public.orders")
    secret = tmp_path / "secret"
    secret.write_text("fir/st@")
    url = receiver.url.replace("://", f"://me:${{file:{secret}}}@")
    with path.open("a") as text:
        text.write(f"notify: [{{url: '{url}', after_s: 0}}]\n")
    (entry,) = settings.load(path).notify
    logins = [f"Basic {b64encode(f'me:{text}'.encode()).decode()}" for text in ("fir/st@", "2nd")]
    with closing(Webhook(entry, "shop", str)) as shop:
        shop.take([BEHIND], 1)
        wait_for(receiver, OPENED)
        secret.unlink()
        shop.take([], 2)
        printed = ""
        while "notification_not_delivered" not in printed:
            printed += "".join(capfd.readouterr())
        secret.write_text("2nd")
        wait_for(receiver, OPENED, CLOSED)
    assert receiver.logins == logins
    assert "SecretUnreadable" in printed


def test_a_run_posts_what_it_finds_and_the_next_run_posts_it_again(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To each address: one that is away holds up neither the others nor the end."""
    file = unreachable_file(tmp_path, "public.orders")
    monkeypatch.setattr(call, "file", file)
    with file.open("a") as settings:
        for url in (f"http://{NOWHERE}/", receiver.url):
            entry = f"{{url: {url}, after_s: 0, severity: down}}"
            settings.write(f"notify: [{entry}" if url != receiver.url else f", {entry}]\n")
    for _ in range(2):
        receiver.bodies.clear()
        with observed(Context(file, tmp_path), None, "127.0.0.1", lambda: True):
            wait_until(
                lambda: ("opened", "kafka-unreachable") in receiver.events, 60, "what is away"
            )
    assert f"-p {file}" in receiver.bodies[0]["text"]
