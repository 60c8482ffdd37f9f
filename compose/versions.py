"""Versions of all servers and jars, which a unit test compares with the module files, the compose
file and the lock; which version wrote the data of a state folder, and which ones can read it.

A server that meets data of a newer version, or of another kind, dies with a line in its log at
best. So a stack checks the versions here, and records them before it starts a server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import StackError

KAFKA = "4.2.1"
CONNECT = KAFKA
DEBEZIUM = "3.7.0.Final"
ELASTICSEARCH = "8.19.21"
POSTGRES = "18.6"
POSTGRES_WHEEL = "18.6.3"
POSTGRES_WITH_TLS = "18.0.0"
VALKEY = "9.1"
PROMETHEUS = "v3.5.0"
GRAFANA = "12.1.1"
LOG4J = "2.25.3"

SPARK = "4.2.0"
DELTA = "4.4.0"
UNITY_CATALOG = "0.6.0"
SPARK_JARS = {
    "spark-sql-kafka-0-10_2.13": SPARK,
    # Older than Spark on purpose: newer ones can't be resolved everywhere, and only a Kerberos
    # class differs.
    "spark-token-provider-kafka-0-10_2.13": "4.0.0",
    "kafka-clients": "3.9.2",
    "commons-pool2": "2.12.1",
    "delta-spark_4.2_2.13": DELTA,
    "delta-storage": DELTA,
    "delta-kernel-api": DELTA,
    "delta-kernel-defaults": DELTA,
    "delta-kernel-unitycatalog": DELTA,
    "unitycatalog-client": UNITY_CATALOG,
    "unitycatalog-hadoop": UNITY_CATALOG,
}

JAVA_MIN = 17
# Version 7.0 is the first with the script effects and functions that the cache sink relies on.
REDIS_MIN = 7
REDIS_READABLE = (7, 2)
"""The last version of Redis whose files Valkey reads: their formats differ since then."""


@dataclass(frozen=True)
class ServerVersion:
    """A kind of server and its version."""

    server: str
    version: str

    def __str__(self) -> str:
        return f"{self.server} {self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        """The parts of the version, to compare."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version))


SERVER_VERSIONS: Mapping[str, ServerVersion] = {
    "postgres": ServerVersion("Postgres", POSTGRES),
    "kafka": ServerVersion("Kafka", KAFKA),
    "elasticsearch": ServerVersion("Elasticsearch", ELASTICSEARCH),
    "redis": ServerVersion("Valkey", VALKEY),
}
"""By server; the connector has no data."""


def readable(previous: ServerVersion, current: ServerVersion) -> bool:
    """Whether a server can read the data of another version. Newer ones of the same kind can."""
    if previous.server != current.server:
        return (previous.server, current.server) == ("Redis", "Valkey") and previous.numbers[
            :2
        ] <= REDIS_READABLE
    if current.server == "Postgres":
        return previous.numbers[:1] == current.numbers[:1]
    if current.server == "Elasticsearch":
        # A node refuses data of any newer version, and of one more than one major version older.
        return previous.numbers <= current.numbers and current.numbers[0] - previous.numbers[0] <= 1
    return previous.numbers[:2] <= current.numbers[:2]


def require_readable(
    state: Path,
    previous_versions: Mapping[str, ServerVersion],
    current_versions: Mapping[str, ServerVersion],
) -> None:
    """Check that every server of a stack, by name, can read its data. Raises StackError for the
    first that can't.
    """
    for name, current in current_versions.items():
        previous = previous_versions.get(name)
        if previous and not readable(previous, current):
            raise StackError(
                f"{name}'s data in {state} was written by {previous}, which {current} can't read",
                hint=f"start it with {previous} or a newer one that reads it, or stop what runs (cdc down) and begin"
                " with an empty state: cdc -p FILE --state OTHER_FOLDER up",
                service=name,
                path=str(state),
            )
