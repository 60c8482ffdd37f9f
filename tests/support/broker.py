"""A Kafka for one test module, which checks rights. Everything is allowed that no ACL forbids."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from cdc.compose import artifacts, host, process
from cdc.compose.servers import Kafka, ServerDirs
from tests.support.wait import wait_until

SETTINGS = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
"""
START_S = 120


class AclBroker:
    """The broker's address, and its ACLs."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        # A resource for which there is any ACL is forbidden to everyone whom none allows it.
        allow = AclPermissionType.ALLOW
        rules = [_rule(kind, "*", "ALL", allow) for kind in ("TOPIC", "GROUP", "TRANSACTIONAL_ID")]
        # At once, as the broker itself needs them. Without Create and Delete, which would be so for
        # every topic.
        rules += [
            _rule("BROKER", "kafka-cluster", operation, allow)
            for operation in ("ALTER", "CLUSTER_ACTION", "DESCRIBE", "IDEMPOTENT_WRITE")
        ]
        self._add(rules)

    def forbid(self, kind: str, name: str, operation: str) -> AclBindingFilter:
        """Forbid everyone an operation, named as kafka-acls.sh does, on a resource: `kind` is TOPIC,
        GROUP, TRANSACTIONAL_ID or BROKER.
        """
        member = re.sub(r"\B([A-Z])", r"_\1", operation).upper()
        rule = _rule(kind, name, member, AclPermissionType.DENY)
        self._add([rule])
        return _filter(rule)

    def remove(self, rule: AclBindingFilter) -> None:
        """Remove a rule."""
        self._admin.delete_acls([rule])[rule].result()
        wait_until(lambda: not self._admin.describe_acls(rule).result(), 30, "the rule to end")

    def _add(self, rules: Sequence[AclBinding]) -> None:
        for answer in self._admin.create_acls(list(rules)).values():
            answer.result()
        # A broker goes by rules some time after its controller has accepted them.
        for rule in rules:
            wait_until(lambda rule=rule: self._is_in_force(rule), 30, "the rule to be in force")  # type: ignore[misc]

    def _is_in_force(self, rule: AclBinding) -> bool:
        return bool(self._admin.describe_acls(_filter(rule)).result())


def _rule(kind: str, name: str, operation: str, permission: AclPermissionType) -> AclBinding:
    return AclBinding(
        ResourceType[kind],
        name,
        ResourcePatternType.LITERAL,
        "User:*",
        "*",
        AclOperation[operation],
        permission,
    )


def _filter(rule: AclBinding) -> AclBindingFilter:
    """What finds one rule alone."""
    return AclBindingFilter(
        rule.restype,
        rule.name,
        rule.resource_pattern_type,
        rule.principal,
        rule.host,
        rule.operation,
        rule.permission_type,
    )


@contextmanager
def acl_broker() -> Iterator[AclBroker]:
    """A new broker, in its own process."""
    home = Path(tempfile.mkdtemp(prefix="cdc-kafka-")) / Kafka.name
    server = Kafka()
    chosen = host.choose_ports(server.port_names)
    dirs = ServerDirs(home, chosen, artifacts.servers(), host.java())
    server.prepare(dirs)
    properties = dirs.conf / "server.properties"
    properties.write_text(properties.read_text() + SETTINGS)
    running = process.spawn(
        server.command(dirs), home=home, log=dirs.log, env=server.environment(dirs), user=None
    )
    try:
        wait_until(lambda: server.ready(chosen), START_S, "the broker")
        yield AclBroker(f"127.0.0.1:{chosen[server.name]}")
    finally:
        process.kill(running)
        shutil.rmtree(home.parent, ignore_errors=True)
