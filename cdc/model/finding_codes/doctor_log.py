"""Findings of `cdc doctor` about the connector, with its worker, and the topics, with their brokers: see
`cdc.doctor.connect` and `cdc.doctor.topics`.
"""

from collections.abc import Mapping

from cdc.errors import ConnectorError
from cdc.model.finding_codes.kind import CAPTURE, LOG, Kind

CONNECTOR: Mapping[str, Kind] = {
    "plugin-missing": Kind(
        "down",
        CAPTURE,
        ConnectorError,
        "The worker can't run the connector, so `register` fails.",
        "Unpack Debezium's connector for Postgres there, and restart the worker.",
    ),
    "plugin-loses-rows": Kind(
        "warning",
        CAPTURE,
        ConnectorError,
        "Rows may be missing in every view after a restart of the worker.",
        "Put a newer version into plugin.path, and restart the worker.",
    ),
    "worker-not-exactly-once": Kind(
        "down", CAPTURE, ConnectorError, "The worker refuses the connector, so `register` fails."
    ),
    "worker-refuses-overrides": Kind(
        "down", CAPTURE, ConnectorError, "The worker refuses the connector, so `register` fails."
    ),
    "connector-refused": Kind(
        "down",
        CAPTURE,
        ConnectorError,
        "`register` fails at this.",
        "Mend what the worker names: in the pipeline file, in Postgres, or in the worker's own settings.",
    ),
    "connector-drops-slot": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Changes that are made while it is stopped are lost to the log.",
    ),
    "connector-skips-errors": Kind(
        "degraded", CAPTURE, ConnectorError, "Changes may be missing in every view without a word."
    ),
    "connector-nulls-values": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may hold null where Postgres has a value."
    ),
    "connector-skips-tombstones": Kind(
        "degraded", CAPTURE, ConnectorError, "Topics keep deleted rows for ever."
    ),
    "connector-makes-publications": Kind(
        "warning", CAPTURE, ConnectorError, "It may publish tables that the file doesn't name."
    ),
    "connector-rounds-numbers": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may hold other numbers than Postgres."
    ),
    "connector-repeats": Kind(
        "degraded", CAPTURE, ConnectorError, "Topics may hold a change twice, out of order."
    ),
    "connector-skips-log": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "After a restored backup changes may be missing without a word.",
    ),
    "connector-snapshot-mode": Kind(
        "degraded", CAPTURE, ConnectorError, "Rows from before the registration may be in no view."
    ),
    "connector-leaves-out-columns": Kind(
        "degraded", CAPTURE, ConnectorError, "Views may lack columns that Postgres has."
    ),
    "connector-skips-operations": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "A truncate event ends the task, or views keep deleted rows.",
    ),
    "connector-without-heartbeat": Kind(
        "degraded",
        CAPTURE,
        ConnectorError,
        "Nobody can tell whether changes come through, and an idle database keeps its log.",
    ),
    "connector-differs": Kind(
        "warning",
        CAPTURE,
        ConnectorError,
        "It doesn't do what the pipeline file says until `register` has run.",
    ),
}
TOPICS: Mapping[str, Kind] = {
    "broker-creates-topics": Kind(
        "warning", LOG, ConnectorError, "A topic that is deleted comes back with other partitions."
    ),
    "broker-never-compacts": Kind(
        "warning", LOG, ConnectorError, "The disks of the brokers become full."
    ),
    "topic-missing": Kind(
        "down", LOG, ConnectorError, "`run` refuses, and the connector may fail."
    ),
    "topic-partitions": Kind(
        "down",
        LOG,
        ConnectorError,
        "A key's changes may lie in two partitions, so that they have no order.",
    ),
    "topic-policy": Kind(
        "down", LOG, ConnectorError, "Kafka deletes rows that nobody has changed for a while."
    ),
    "topic-truncated": Kind(
        "degraded", LOG, ConnectorError, "A rebuild would lack the rows that were there."
    ),
    "topic-retention": Kind(
        "degraded", LOG, ConnectorError, "A view that is away for longer may miss deletes."
    ),
    "topic-compaction-lag": Kind(
        "warning", LOG, ConnectorError, "The warehouse's `changes` may miss superseded changes."
    ),
    "topic-small-records": Kind(
        "warning", LOG, ConnectorError, "A large row ends the connector's task."
    ),
    "topic-single-copy": Kind(
        "warning",
        LOG,
        ConnectorError,
        "With that broker's disk the log is gone.",
        "Decide how many brokers may be lost, and reassign its partitions.",
    ),
    "topic-needs-all-copies": Kind(
        "warning",
        LOG,
        ConnectorError,
        "No change comes through while one broker is restarted.",
        "Lower min.insync.replicas, or add a copy.",
    ),
    "topic-stores-once": Kind(
        "warning",
        LOG,
        ConnectorError,
        "A broker that fails may take changes with it that the slot has confirmed.",
        "Raise min.insync.replicas to 2, unless writes may be lost with one broker.",
    ),
    "topic-under-replicated": Kind(
        "degraded",
        LOG,
        ConnectorError,
        "The next broker that fails may stop the log, or lose some of it.",
        "Bring the broker back that holds the other copy.",
    ),
    "topic-leaderless": Kind(
        "down",
        LOG,
        ConnectorError,
        "Nothing can be written to these partitions, or read from them.",
        "Bring the brokers back that hold their copies.",
    ),
    "topic-unclean-leader": Kind(
        "warning",
        LOG,
        ConnectorError,
        "Changes that the slot has confirmed may be lost.",
        "Turn unclean.leader.election.enable off, unless lost records are the lesser evil.",
    ),
}
