"""Kafka Connect and the connector: the worker's plugin and settings, dangerous values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cdc.connectors.client import SECRET, Connect
from cdc.connectors.debezium import PLUGIN
from cdc.errors import ConnectorError
from cdc.model.finding import LOOK_AGAIN, Finding, find, find_setting
from cdc.model.wording import full_stopped

REGISTER = "cdc -p FILE register"
LOSING = ("3.6.",)
"""Beginnings of versions that lose rows when they are restarted: dbz#76, dbz#51, dbz#1554."""
DANGEROUS: Mapping[str, tuple[str, str]] = {
    "slot.drop.on.stop": ("false", "every stop loses the log since then"),
    "errors.tolerance": ("none", "records that fail are left out"),
    "event.converting.failure.handling.mode": ("fail", "values that it can't convert become null"),
    "tombstones.on.delete": ("true", "deleted rows never leave Kafka"),
    "publication.autocreate.mode": ("disabled", "it publishes tables by itself"),
    "decimal.handling.mode": ("string", "numbers lose digits"),
    "exactly.once.support": ("required", "records may come twice"),
    "offset.mismatch.strategy": ("trust_offset", "it goes on from wherever the slot stands"),
    "snapshot.mode": ("initial", "rows from before may never be sent"),
    "include.unknown.datatypes": ("true", "columns of unknown types are left out"),
    "skipped.operations": ("t", "a truncate event stops it, or changes are left out"),
}
"""By setting of the connector: the value that it needs, and what another one does."""
BEATS = ("heartbeat.interval.ms", "heartbeat.action.query")


@dataclass(frozen=True)
class ConnectFacts:
    """What was read of Connect. Texts hold no password."""

    connector: str
    plugin: str | None
    """Version of Debezium's plugin; None where the worker hasn't got it."""
    refusal: str | None
    """Why the worker refuses the configuration that `register` would put."""
    current: Mapping[str, str] | None
    """The connector's settings; None where there is no connector."""
    expected: Mapping[str, str]
    """The settings that `register` would put."""


def read_connect(connect: Connect, connector: str, expected: Mapping[str, str]) -> ConnectFacts:
    """Read the facts. Has the worker check the configuration, with a login to Postgres.

    Raises:
        ConnectorError: Connect can't be reached.
    """
    plugin = connect.plugins().get(PLUGIN)
    refusal = None
    if plugin is not None:
        try:
            connect.validate(expected)
        except ConnectorError as error:
            refusal = error.message
    return ConnectFacts(connector, plugin, refusal, connect.config(connector), expected)


def check_connect(facts: ConnectFacts) -> Iterator[Finding]:
    """Judge the worker and the connector's settings."""
    if facts.plugin is None:
        message = "The worker has no plugin for Postgres: Debezium isn't in its plugin.path."
        yield find("plugin-unfit", "plugin.path", message, "ls /path/of/plugin.path")
    elif facts.plugin.startswith(LOSING):
        message = f"Debezium {facts.plugin} loses rows when it is restarted."
        yield find("plugin-unfit/loses-rows", "Debezium", message, "ls /path/of/plugin.path")
    if facts.refusal:
        yield _refusal(facts.refusal)
    if facts.current is not None:
        yield from _check_settings(facts.connector, facts.current, facts.expected)


def _refusal(text: str) -> Finding:
    if "exactly.once.support" in text or "exactly-once" in text:
        message = (
            "The worker has exactly.once.source.support off. It takes a restart to be turned on."
        )
        fix = "echo exactly.once.source.support=enabled >> connect-distributed.properties"
        return find_setting("exactly.once.source.support", message, fix)
    if ".override." in text:
        message = full_stopped(f"The worker doesn't let the connector set its producer: {text}")
        message += " It takes a restart to let it."
        fix = "echo connector.client.config.override.policy=All >> connect-distributed.properties"
        return find_setting("connector.client.config.override.policy", message, fix)
    return find("connector-refused", "the connector", full_stopped(text), LOOK_AGAIN)


def _check_settings(
    connector: str, current: Mapping[str, str], expected: Mapping[str, str]
) -> Iterator[Finding]:
    dangerous = set()
    for setting, (value, danger) in DANGEROUS.items():
        if current.get(setting) != value:
            dangerous.add(setting)
            actual = current.get(setting, "not set")
            message = f"{setting} of the connector is {actual}, not {value}: {danger}."
            yield find_setting(setting, message, REGISTER)
    if any(current.get(setting) in (None, "", "0") for setting in BEATS):
        dangerous |= set(BEATS)
        message = "The connector sends no heartbeat: an idle database keeps its log for ever."
        yield find_setting(BEATS[0], message, REGISTER)
    differing = sorted(
        name
        for name in {*current, *expected} - dangerous
        if current.get(name) != expected.get(name) and not _may_be_hidden(name)
    )
    if differing:
        message = (
            f"The connector has other settings than the file gives it: {', '.join(differing)}."
        )
        yield find("connector-differs", connector, message, REGISTER)


def _may_be_hidden(name: str) -> bool:
    return bool(SECRET.search(name))
