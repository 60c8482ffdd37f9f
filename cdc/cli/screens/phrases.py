"""Phrases that several screens share: advice with its commands, times, counts of keys."""

from __future__ import annotations

import time

from cdc.cli.console import call
from cdc.model.wording import advice, duration, since_text


def with_advice(message: str, hint: str) -> str:
    return advice(message, call.complete_commands(hint)) if hint else message


def with_since(text: str, moment: float | None) -> str:
    return f"{text} ({since_text(moment)})" if moment else text


def age(moment: float | None) -> str:
    return "never" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"
