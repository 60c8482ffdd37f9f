"""Actions of the page: which command each starts, what is refused, what is logged."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from cdc.control.operator import current_operator
from cdc.serve.actions import Actions, Refusal, Request, choose
from tests.support import http
from tests.support.page import Scene, control_state, good_status, serve_page
from tests.support.pages import refusal
from tests.support.wait import wait_until

PLACE = "cache/shop.public.orders/0/11"


def chosen(**form: str) -> Request:
    return choose(form, good_status(), control_state().quarantine)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"verb": "verify"}, ["verify"]),
        ({"verb": "verify", "sink": "cache"}, ["verify", "--sink", "cache"]),
        (
            {"verb": "verify", "sink": "cache", "table": "public.orders"},
            ["verify", "--sink", "cache", "--table", "public.orders"],
        ),
        ({"verb": "rebuild", "sink": "cache"}, ["rebuild", "--", "cache"]),
        (
            {"verb": "rebuild", "sink": "cache", "table": "public.orders"},
            ["rebuild", "--table", "public.orders", "--", "cache"],
        ),
        ({"verb": "rollback", "sink": "cache"}, ["rollback", "--", "cache"]),
        ({"verb": "pause", "sink": "cache"}, ["pause", "--", "cache"]),
        ({"verb": "resume", "sink": "cache", "table": "public.orders"}, ["resume", "--", "cache"]),
        ({"verb": "redrive"}, ["quarantine", "redrive"]),
        ({"verb": "redrive", "place": PLACE}, ["quarantine", "redrive", "--", PLACE]),
    ],
)
def test_the_command_of_each_action_is_one_that_there_is(
    form: Mapping[str, str], words: list[str]
) -> None:
    assert chosen(**form).words == words
    assert refusal(words) is None
    program = Actions(["python", "-m", "cdc.entry", "-p", "a b.yaml"])
    command = program.command(chosen(**form))
    assert command == ["python", "-m", "cdc.entry", "-p", "a b.yaml", *words]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"verb": "down"},
        {"verb": "verify; rm -rf /"},
        {"verb": "rebuild"},
        {"verb": "rollback"},
        {"verb": "pause"},
        {"verb": "pause", "sink": "documents"},
        {"verb": "rebuild", "sink": "documents"},
        {"verb": "rebuild", "sink": "--clean"},
        {"verb": "rebuild", "sink": "cache", "table": "public.nothing"},
        {"verb": "verify", "table": "--repair"},
        {"verb": "redrive", "place": "cache/shop.public.orders/0/99"},
    ],
)
def test_what_the_page_does_not_know_is_refused(form: Mapping[str, str]) -> None:
    with pytest.raises(Refusal):
        chosen(**form)


@contextmanager
def actions(code: str) -> Iterator[Actions]:
    started = Actions([sys.executable, "-u", "-c", code])
    try:
        yield started
    finally:
        started.close()


def ended(started: Actions) -> Callable[[], bool]:
    return lambda: bool(started.history) and started.current is None


def test_an_action_is_logged_with_who_and_when_and_its_output_is_remembered() -> None:
    with capture_logs() as events, actions("print('one'); raise SystemExit(8)") as started:
        action = started.start(chosen(verb="verify"), "Ada", "10.0.0.9")
        # The end is logged after it can be seen.
        wait_until(lambda: len(events) == 2, 20, "the action to end")
    assert (list(action.output), action.code) == (["one"], 8)
    assert action.ended_at
    assert time.time() - 20 < action.started_at <= action.ended_at
    begin, end = events
    assert (begin["event"], begin["who"], begin["address"]) == ("action_started", "Ada", "10.0.0.9")
    assert begin["words"] == ["verify"]
    assert (end["event"], end["code"]) == ("action_ended", 8)


def test_the_operation_log_names_who_asked() -> None:
    code = "from cdc.control.operator import current_operator; print(current_operator())"
    with actions(code) as started:
        started.start(chosen(verb="verify"), "Ada\0", "10.0.0.9")
        wait_until(ended(started), 20, "the action to end")
        (line,) = started.history[-1].output
    assert line.startswith("Ada (10.0.0.9) by ")
    assert line.removeprefix("Ada (10.0.0.9) by ") == current_operator()


def test_one_action_at_a_time_and_it_can_be_interrupted() -> None:
    # A shell starts what it puts in the background with interrupts ignored, which the action inherits
    # where no server handles them. In short waits, a signal just before one is heeded after it.
    heeds = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    waits = "print('on', flush=True); [time.sleep(0.1) for _ in range(600)]"
    with actions(f"{heeds}; {waits}") as started:
        action = started.start(chosen(verb="verify"), "Ada", "")
        with pytest.raises(Refusal, match="at work"):
            started.start(chosen(verb="verify"), "Bob", "")
        wait_until(lambda: action.output, 20, "output")
        started.interrupt("Bob", "")
        wait_until(ended(started), 20, "the action to end")
        assert action.code
        started.start(chosen(verb="verify"), "Bob", "")


def test_an_action_ends_with_the_server() -> None:
    with actions("import time; time.sleep(60)") as started:
        action = started.start(chosen(verb="verify"), "Ada", "")
    wait_until(lambda: action.code is not None, 20, "the action to end")


def test_much_output_is_cut_and_strange_bytes_are_shown() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\n' * 5000)"
    with actions(code) as started:
        action = started.start(chosen(verb="verify"), "Ada", "")
        wait_until(ended(started), 20, "the action to end")
    assert list(action.output) == ["\\xff"] * 400


def test_an_action_is_asked_for_with_what_it_does_and_needs_a_name() -> None:
    with serve_page(Scene(), program=["-c", "print('done')"]) as served:
        client = http.Client(base_url=served.url, headers={"origin": served.url})
        text = client.get("/actions/new?verb=rebuild&sink=cache").raise_for_status().text
        assert "Rebuild cache?" in text
        assert "cdc -p shop.yaml rebuild -- cache" in text
        assert client.get("/actions/new?verb=rebuild&sink=nothing").status_code == 400
        csrf = text.partition('name="csrf" value="')[2].partition('"')[0]
        form = {"csrf": csrf, "verb": "rebuild", "sink": "cache"}
        assert client.post("/actions", data=form).status_code == 400
        assert client.post("/actions", data={**form, "who": "<i>Ada"}).status_code == 303
        assert served.dashboard.actions
        wait_until(ended(served.dashboard.actions), 20, "the action to end")
        text = client.get("/activity").text
        assert "Asked for by &lt;i&gt;Ada (127.0.0.1)" in text
        assert "done</pre>" in text


def test_a_second_action_is_refused_on_the_page() -> None:
    with serve_page(Scene(), "x" * 16, ["-c", "import time; time.sleep(60)"]) as served:
        address, headers = f"{served.url}/api/actions", {"authorization": f"Bearer {'x' * 16}"}
        form = {"verb": "verify", "who": "x"}
        assert http.post(address, data=form, headers=headers).status_code == 202
        second_answer = http.post(address, data=form, headers=headers)
        assert second_answer.status_code == 409
        assert "at work" in second_answer.json()["error"]


def test_a_name_that_looks_like_an_option_stays_a_name() -> None:
    status = good_status()
    odd = replace(status, sinks=(replace(status.sinks[0], name="-x"),))
    assert choose({"verb": "rebuild", "sink": "-x"}, odd, ()).words == ["rebuild", "--", "-x"]
