"""Notifications through a real broker to a real receiver: once an incident, signed, tried again."""

import hashlib
import hmac
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from cdc.config.notify_settings import NotifySettings
from cdc.config.settings import Pipeline
from cdc.kafka.clients import kafka
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.model.finding import find
from cdc.notify import incidents, webhook
from cdc.notify import notifier as notifications
from cdc.notify.incident_log import IncidentLog
from cdc.notify.notifier import Notifier
from tests.support.pipelines import NOWHERE, pipeline
from tests.support.receiver import Receiver

BEHIND = find("sink-behind", "cache", "Kafka -> cache is slow.", "cdc -p FILE run", sink="cache")
QUARANTINED = find("records-quarantined", "public.t", "1 record.", "cdc quarantine", sink="cache")
AWAY = find("kafka-unreachable", "kafka", "Kafka is away.", "cdc -p FILE status")
SECRET = "a secret of the shop's"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def shop(stack: Any, unique: str, receiver: Receiver) -> Iterator[Pipeline]:
    described = pipeline(
        unique, "postgresql://127.0.0.1:1/none", "public.orders", kafka=stack.endpoints.kafka
    )
    entry = NotifySettings(url=receiver.url, secret=SECRET, after_s=0)
    shop_pipeline = described.model_copy(update={"notify": (entry,)})
    with Topics(shop_pipeline.kafka) as topics:
        ensure_topics(topics, shop_pipeline)
    yield shop_pipeline
    with kafka.KafkaAdminClient(bootstrap_servers=shop_pipeline.kafka) as admin:
        admin.delete_topics([topic for topic in admin.list_topics() if unique in topic])


@contextmanager
def notifier(shop: Pipeline, quiet_s: float = 0) -> Iterator[Notifier]:
    notifier = Notifier(shop, "status", quiet_s)
    try:
        yield notifier
    finally:
        notifier.close()


def test_processes_that_look_at_once_tell_once(shop: Pipeline, receiver: Receiver) -> None:
    def look(_: int) -> None:
        with notifier(shop) as process:
            for _ in range(5):
                process.notify([BEHIND])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(look, range(3)))
    assert receiver.events == [("opened", "sink-behind")]
    for _ in range(2):
        with notifier(shop) as process:
            process.notify([])
    assert receiver.events == [("opened", "sink-behind"), ("recovered", "sink-behind")]


def test_a_message_is_signed_and_tried_again(shop: Pipeline, receiver: Receiver) -> None:
    receiver.answers = [503, 429]
    with notifier(shop) as process:
        process.notify([BEHIND])
    (body,), (signature,) = receiver.bodies, receiver.signatures
    assert (body["pipeline"], body["hop"], body["fix"]) == (
        shop.pipeline,
        "Kafka -> cache",
        "cdc -p FILE run",
    )
    moment, digest = (part.partition("=")[2] for part in signature.split(","))
    signed = f"{moment}.".encode() + body["body"]
    assert digest == hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()


def test_a_refusal_is_logged_without_the_address_and_ends_nobody(
    shop: Pipeline, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver.answers = [404]
    with notifier(shop, 300) as process:
        process.notify([BEHIND])
        process.notify([BEHIND])
    assert receiver.events == []
    printed = "".join(capfd.readouterr())
    assert "notification_not_delivered" in printed
    assert receiver.url not in printed


def test_an_address_that_no_client_takes_ends_nobody_and_others_are_told(
    shop: Pipeline, receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever looks has a result to show, which is about something else."""
    wrong = [
        shop.notify[0].model_copy(update={"url": f"http://{host}/"})
        for host in ("a-secret\u200b", "a-secret..com")
    ]
    with notifier(shop.model_copy(update={"notify": (*wrong, *shop.notify)})) as process:
        process.notify([BEHIND])
        process.notify([BEHIND])
    assert receiver.events == [("opened", "sink-behind")]
    printed = "".join(capfd.readouterr())
    assert printed.count("notification_not_delivered") == 2
    assert "a-secret" not in printed


@pytest.fixture
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is tried once, and a receiver that was away is asked again at the next look."""
    monkeypatch.setattr(webhook, "PATIENCE_S", 0.0)
    monkeypatch.setattr(incidents, "TAKEOVER_S", 0.0)
    monkeypatch.setattr(notifications, "REST_S", 0.0)


@pytest.mark.usefixtures("without_patience")
def test_what_a_receiver_missed_while_it_was_away_is_told_later(
    shop: Pipeline, receiver: Receiver
) -> None:
    receiver.answers = [503, 503]
    with notifier(shop) as process:
        process.notify([BEHIND])
        process.notify([BEHIND])
        assert receiver.events == []
        process.notify([BEHIND])
        process.notify([BEHIND])
        assert receiver.events == [("opened", "sink-behind")]
        receiver.answers = [503]
        process.notify([])
        process.notify([])
    assert receiver.events == [("opened", "sink-behind"), ("recovered", "sink-behind")]


@pytest.mark.usefixtures("without_patience")
def test_what_was_over_while_the_receiver_was_away_is_told_by_another(
    shop: Pipeline, receiver: Receiver
) -> None:
    receiver.answers = [503]
    with notifier(shop) as process:
        process.notify([BEHIND])
    with notifier(shop) as another:
        another.notify([])
        another.notify([])
    assert receiver.events == [("opened", "sink-behind"), ("recovered", "sink-behind")]


@pytest.mark.usefixtures("without_patience")
def test_what_nobody_heard_of_while_kafka_was_away_is_told_later(
    shop: Pipeline, receiver: Receiver
) -> None:
    receiver.answers = [503]
    with Topics(shop.kafka) as topics, notifier(shop) as process:
        topics.remove([shop.incidents_topic])
        process.notify([BEHIND])
        ensure_topics(topics, shop)
        process.notify([])
        process.notify([])
    assert receiver.events == [("opened", "sink-behind"), ("recovered", "sink-behind")]


def test_a_receiver_that_is_away_rests_and_another_is_told(
    shop: Pipeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "PATIENCE_S", 0.0)
    away = shop.notify[0].model_copy(update={"url": f"{receiver.url}/away"})
    receiver.answers = [503]
    with notifier(shop.model_copy(update={"notify": (away, *shop.notify)})) as process:
        process.notify([BEHIND, QUARANTINED])
        process.notify([BEHIND, QUARANTINED])
    assert receiver.events == [("opened", "sink-behind"), ("opened", "records-quarantined")]
    with Topics(shop.kafka) as topics:
        logged = IncidentLog(topics, shop.incidents_topic, "test").read().values()
    assert sorted((entry.phase, entry.code) for entry in logged) == [
        ("open", "records-quarantined"),
        ("open", "sink-behind"),
        ("opening", "records-quarantined"),
        ("opening", "sink-behind"),
    ]


def test_slack_gets_a_text(shop: Pipeline, receiver: Receiver) -> None:
    entry = shop.notify[0].model_copy(update={"format": "slack"})
    with notifier(shop.model_copy(update={"notify": (entry,)})) as process:
        process.notify([BEHIND])
        process.notify([])
    assert [body["text"] for body in receiver.bodies] == [
        f"{shop.pipeline}: degraded: Kafka -> cache is slow. Next: cdc -p FILE run. (sink-behind)",
        f"{shop.pipeline}: over: Kafka -> cache is slow. (sink-behind)",
    ]


def test_without_kafka_a_process_tells_what_it_sees(shop: Pipeline, receiver: Receiver) -> None:
    with notifier(shop.model_copy(update={"kafka": NOWHERE})) as process:
        process.notify([AWAY])
        process.notify([AWAY, BEHIND])
    assert receiver.events == [("opened", "kafka-unreachable"), ("opened", "sink-behind")]


def test_what_was_told_while_the_log_was_away_is_noted_later(
    shop: Pipeline, receiver: Receiver
) -> None:
    with Topics(shop.kafka) as topics, notifier(shop) as process:
        topics.remove([shop.incidents_topic])
        process.notify([BEHIND])
        ensure_topics(topics, shop)
        process.notify([BEHIND])
    with notifier(shop) as another:
        another.notify([BEHIND])
        assert receiver.events == [("opened", "sink-behind")]
        another.notify([])
    assert receiver.events == [("opened", "sink-behind"), ("recovered", "sink-behind")]
