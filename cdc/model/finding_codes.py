"""The catalogue of findings: for each stable code its severity, its hop, the class of errors that it
belongs to, and what becomes of it if nobody acts.

A code is one action, and docs/operate/runbooks has a page for each; a test holds that. Where findings
of one code differ in any of these, each is a case of it with a row here: `code/case`. Of
`setting-differs` the case is the setting. A code that has been published is never given another
meaning; cases aren't published.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.errors import (
    AnotherServer,
    CdcError,
    ConnectorError,
    DecodeError,
    DivergenceError,
    KafkaUnavailable,
    SettingsError,
    SinkError,
    SinkPaused,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
    SparkError,
)

SOURCE = "Postgres"
CAPTURE = "Postgres -> Kafka"
LOG = "Kafka"
APPLY = "Kafka -> SINK"
MACHINE = "this machine"
"""Hops. In the last one SINK is the name of the finding's sink."""


@dataclass(frozen=True)
class Kind:
    """What all findings of one case have in common. `severity` is a word of `Severity`."""

    severity: str
    hop: str
    failure: type[CdcError]
    why: str
    decision: str
    """One of `DECISIONS`, or nothing."""


def code_of(key: str) -> str:
    """The code of a key of the catalogue, which may have a case."""
    return key.partition("/")[0]


DECISIONS: Mapping[str, str] = {
    "definitions-uncompared": "Mend what the log names, or restart the run.",
    "slot-at-risk": "End what holds the slot back, or raise max_slot_wal_keep_size.",
    "table-left-out": "No action needed, unless its rows are wanted.",
    "heartbeat-late": (
        "It ends by itself once the connector has caught up; a transaction that "
        "holds it back is for its owner to end."
    ),
    "snapshot-running": "It ends by itself.",
    "sink-silent": "Look at the destination and its network, or restart the run.",
    "sink-stuck": "Look at the destination, or restart the run.",
    "sink-behind": "If the lag doesn't shrink, the run needs more cores (`run --master`).",
    "clock-stands": "If it doesn't go on within a minute, restart the run.",
    "records-quarantined": "Mend what the list names, then redrive them, or discard them.",
    "tombstones-at-risk": "If the lag doesn't shrink, the run needs more cores (`run --master`).",
    "state-too-large/estimate": "Raise maxmemory while the run goes on.",
    "source-unfit/standby": "Name the primary in source.dsn and source.reader, or promote this server.",
    "slot-foreign": "Give the pipeline another name: it names slot, publication and topics.",
    "slot-foreign/in-use": "Stop the other reader, or give this pipeline another name.",
    "role-unfit/shared": "Name another role in source.replication_user: `migrate` creates it.",
    "log-held/slot": "Ask its owner: once nobody needs it, pg_drop_replication_slot drops it.",
    "setting-differs/failover": (
        "Decide whether to make the slot again with failover, or to run "
        "`register` and `verify` after each failover."
    ),
    "log-held/transaction": "Ask its owner to end it, or end it by pg_terminate_backend.",
    "log-held/prepared": "Ask its owner whether it is to be committed or rolled back.",
    "setting-differs/sslmode": (
        "Turn TLS on in the server, and write sslmode=verify-full into source.dsn and source.reader."
    ),
    "disk-low/source": "Make room, or drop a slot whose reader is gone for good.",
    "plugin-unfit": "Unpack Debezium's connector for Postgres there, and restart the worker.",
    "connector-refused": (
        "Mend what the worker names: in the pipeline file, in Postgres, "
        "or in the worker's own settings."
    ),
    "plugin-unfit/loses-rows": "Put a newer version into plugin.path, and restart the worker.",
    "topic-copies/leaderless": "Bring the brokers back that hold their copies.",
    "topic-copies/out-of-sync": "Bring the broker back that holds the other copy.",
    "topic-copies/fewer": "Reassign its partitions, or correct kafka.replication_factor in the file.",
    "topic-copies/single": "Decide how many brokers may be lost, and reassign its partitions.",
    "setting-differs/min.insync.replicas=all": "Lower min.insync.replicas, or add a copy.",
    "setting-differs/min.insync.replicas=1": (
        "Raise min.insync.replicas to 2, unless writes may be lost with one broker."
    ),
    "setting-differs/unclean.leader.election.enable": (
        "Turn unclean.leader.election.enable off, unless lost records are the lesser evil."
    ),
    "sink-unfit/redis": "Upgrade the server, or name another one in the pipeline file.",
    "sink-unfit/cluster": "Write `cluster: true` in the sink, or name a server that isn't a cluster's.",
    "sink-unfit/replica": "Name the primary in the pipeline file.",
    "sink-unfit/elasticsearch": "Upgrade the cluster, or name another one in the pipeline file.",
    "index-red": "Bring the nodes back that hold these shards, or restore them from a snapshot.",
    "index-blocked": "Whoever has set the block lifts it; the cluster lifts its own when its disk has room.",
    "index-shadows-alias": "Delete that index, if nobody needs it, or give the sink another prefix.",
    "sink-unfit/folder": "Give this user the right to write there, or name another path in the pipeline file.",
    "cache-save-failing": "Make room on the server's disk, or turn its saving off.",
    "memory-low/cache": "Raise maxmemory, or keep other data elsewhere.",
    "index-shards-full": "Raise cluster.max_shards_per_node, add a node, or delete indices that nobody needs.",
    "disk-low/index": "Make room on that node, or add one.",
    "disk-low/warehouse": "Make room there, or name another path in the pipeline file.",
    "memory-low/machine": "Stop what needs the memory, or run on a larger machine.",
    "disk-low/state": "Make room there, or choose another folder with --state.",
    "clock-off": "Let a time server set both clocks.",
}
"""By key: what a person has to decide, or that it ends by itself, where the command to run next only
shows something.
"""


def _kinds(
    rows: Mapping[tuple[str, str, type[CdcError]], Mapping[str, str]], prefix: str = ""
) -> Mapping[str, Kind]:
    """Make the kinds of rows, each a key without its prefix and its `why`."""
    return {
        prefix + key: Kind(severity, hop, failure, why, DECISIONS.get(prefix + key, ""))
        for (severity, hop, failure), whys in rows.items()
        for key, why in whys.items()
    }


STATUS = _kinds(
    {
        ("down", SOURCE, SourceUnavailable): {
            "source-unreachable": "Nobody knows whether changes leave Postgres.",
        },
        ("down", SOURCE, AnotherServer): {
            "another-server": "The topics hold another server's changes: the two must not be mixed.",
        },
        ("down", SOURCE, SettingsError): {
            "tables-undecided/pattern": "A check of no table always passes: nothing was looked at.",
        },
        ("down", SOURCE, SourceError): {
            "slot-lost": "Changes that the connector hadn't read are lost to the log.",
        },
        ("degraded", SOURCE, SettingsError): {
            "tables-undecided": "Which tables a pattern means can't be said.",
        },
        ("degraded", SOURCE, SourceError): {
            "server-promoted": "Views may hold changes that the promoted server never had.",
            "table-slipped": "The next `register` would lose the table's changes.",
            "definitions-uncompared": "A change of a table may go unseen until then.",
        },
        ("warning", SOURCE, SourceError): {
            "slot-at-risk": "Beyond max_slot_wal_keep_size Postgres gives the slot up: a new snapshot is needed.",
        },
        ("info", SOURCE, SettingsError): {
            "table-left-out": "There are no views of it.",
        },
        ("down", CAPTURE, ConnectorError): {
            "connect-unreachable": "Nobody knows whether the connector runs.",
            "registration-unreadable": "Nobody knows what the topics hold.",
            "connector-stopped": "No change leaves Postgres, and the slot keeps the log.",
            "connector-failed": "No change leaves Postgres, and the slot keeps the log.",
            "table-unsendable": "No change of any table leaves Postgres until this one is set aside.",
            "heartbeat-missing": "Nobody knows whether changes come through.",
        },
        ("down", CAPTURE, SettingsError): {
            "file-changed": "The connector sends other columns or keys than the file says, so `run` refuses.",
        },
        ("degraded", CAPTURE, ConnectorError): {
            "table-aside": "Its views show none of its changes until it is captured again.",
            "heartbeat-late": "Every view is at least that late.",
        },
        ("degraded", CAPTURE, SettingsError): {
            "file-changed/tables": "Rows of these tables are in no view.",
        },
        ("info", CAPTURE, ConnectorError): {
            "snapshot-running": "Views lack rows until it has ended; changes follow then.",
        },
        ("down", LOG, KafkaUnavailable): {
            "kafka-unreachable": "No change can be sent or applied while Kafka is away.",
        },
        ("down", APPLY, SinkUnavailable): {
            "sink-unreachable": "Its views may be away, and how old they are is unknown.",
        },
        ("down", APPLY, SinkError): {
            "sink-failed": "Its views get no changes.",
            "sink-waiting": "Its views get no changes until the server is back.",
            "sink-silent": "Its views get no changes while it hangs.",
            "sink-not-running": "Its views get no changes.",
        },
        ("degraded", APPLY, SinkError): {
            "sink-stuck": "Its views get no changes until the current batch ends.",
            "sink-behind": "Readers see rows as they were.",
            "table-waiting": "This table's view gets no changes; others go on.",
            "clock-stands": "No deadline of this view passes, and no window closes, until it goes on.",
        },
        ("degraded", APPLY, ConnectorError): {
            "view-stopped": "The log can't continue this view; others go on.",
        },
        ("degraded", APPLY, SettingsError): {
            "documents-waiting": "This view's documents stay as they were; other views go on.",
        },
        ("degraded", APPLY, DecodeError): {
            "records-quarantined": "These rows may be older in the view than in Postgres.",
        },
        ("degraded", APPLY, DivergenceError): {
            "view-differs": "Readers of the view get wrong answers.",
        },
        ("warning", APPLY, SinkError): {
            "tombstones-at-risk": "After that it may miss deletes, and its views have to be built again.",
            "state-too-large/estimate": (
                "The stream of documents ends when the memory is full, "
                "after all the time of reading."
            ),
        },
        ("info", APPLY, SinkPaused): {
            "sink-paused": "Its views stay as they are until it is resumed.",
        },
    }
)
"""What `cdc status` can find, and `cdc doctor` too."""
SETTINGS = _kinds(
    {
        ("down", SOURCE, SourceError): {
            "wal_level": "Without logical decoding no change leaves Postgres, and `register` refuses.",
        },
        ("warning", SOURCE, SourceError): {
            "idle_replication_slot_timeout": "A connector that is away for longer needs a new snapshot.",
            "failover": "After a failover the slot is missing, and changes are lost to the log.",
            "sslmode": "Whoever is on the way reads every row, and the password's exchange.",
        },
        ("info", SOURCE, SourceError): {
            "max_slot_wal_keep_size": "While the connector is away the disk of Postgres may become full.",
        },
        ("down", CAPTURE, ConnectorError): {
            "exactly.once.source.support": "The worker refuses the connector, so `register` fails.",
            "connector.client.config.override.policy": "The worker refuses what the connector sets: `register` fails.",
        },
        ("degraded", CAPTURE, ConnectorError): {
            "slot.drop.on.stop": "Changes that are made while it is stopped are lost to the log.",
            "errors.tolerance": "Changes may be missing in every view without a word.",
            "event.converting.failure.handling.mode": "Views may hold null where Postgres has a value.",
            "tombstones.on.delete": "Topics keep deleted rows for ever.",
            "decimal.handling.mode": "Views may hold other numbers than Postgres.",
            "exactly.once.support": "Topics may hold a change twice, out of order.",
            "offset.mismatch.strategy": "After a restored backup changes may be missing without a word.",
            "snapshot.mode": "Rows from before the registration may be in no view.",
            "include.unknown.datatypes": "Views may lack columns that Postgres has.",
            "column.mask": "The log gets values that the file masks, or other ones.",
            "skipped.operations": "A truncate event ends the task, or views keep deleted rows.",
            "heartbeat.interval.ms": (
                "Nobody knows whether changes come through, and an idle database keeps its log."
            ),
        },
        ("warning", CAPTURE, ConnectorError): {
            "publication.autocreate.mode": "It may publish tables that the file doesn't name.",
        },
        ("degraded", LOG, ConnectorError): {
            "delete.retention.ms": "A view that is away for longer may miss deletes.",
        },
        ("warning", LOG, ConnectorError): {
            "auto.create.topics.enable": "A topic that is deleted comes back with other partitions.",
            "log.cleaner.enable": "The disks of the brokers become full.",
            "min.compaction.lag.ms": "The warehouse's `changes` may miss superseded changes.",
            "max.message.bytes": "A large row ends the connector's task.",
            "min.insync.replicas=all": "No change comes through while one broker is restarted.",
            "min.insync.replicas=1": "A broker that fails may take changes with it that the slot has confirmed.",
            "unclean.leader.election.enable": "Changes that the slot has confirmed may be lost.",
        },
        ("down", APPLY, SinkError): {
            "maxmemory-policy": "Rows vanish from the cache, and `run` refuses.",
        },
        ("warning", APPLY, SinkError): {
            "index": "Searches find by the former fields until the index is rebuilt.",
        },
    },
    "setting-differs/",
)
"""Settings of servers, topics and the connector that aren't what the pipeline needs, by setting."""
DOCTOR: Mapping[str, Kind] = {
    **SETTINGS,
    **_kinds(
        {
            ("down", SOURCE, SettingsError): {
                "source-unfit/version": "The connector needs a server of version 14 or later.",
                "view-refused": "`migrate` and `register` refuse the whole file.",
            },
            ("down", SOURCE, SourceError): {
                "source-unfit/encoding": (
                    "The connector can't read a value that isn't valid "
                    "text, and restarts there forever."
                ),
                "source-unfit/standby": "A standby takes no heartbeat and no request, so `register` fails.",
                "slots-exhausted": "`register` can't make the connector's slot.",
                "slots-exhausted/senders": "The connector's task fails until a sender is free.",
                "slot-foreign": "The name is taken, so `register` refuses.",
                "slot-foreign/in-use": (
                    "Two connectors on one slot take changes from each "
                    "other, so `register` refuses."
                ),
                "control-missing": "`register` refuses: no heartbeat can come through.",
                "role-unfit/missing": "The connector can't log in, so `register` refuses.",
                "role-unfit": "The connector can't log in or read the log, so `register` refuses.",
                "role-unfit/unreadable": "The snapshot fails at these tables, so `register` refuses.",
                "publication-differs/missing": "The connector's task fails, so `register` refuses.",
                "publication-differs": "Changes of these tables never leave Postgres, so `register` refuses.",
                "publication-differs/partial": "Some changes never leave Postgres, so `register` refuses.",
                "publication-foreign": "`migrate` can't keep it as the file says, so `register` refuses.",
                "table-refused": "`register` refuses the whole file.",
                "identity-unfit": "A delete doesn't name its row, so `register` refuses and views of the table wait.",
            },
            ("degraded", SOURCE, SourceError): {
                "reader-unfit": ("`verify` and repairs fail, and a run notices no changed table."),
                "row-security": "A snapshot leaves rows out without a word.",
                "table-unlogged": "Its view holds the snapshot's rows, and never a change.",
                "identity-unfit/partial": (
                    "An update that leaves a large value alone doesn't "
                    "carry it; a rebuild may lack it."
                ),
                "trigger-missing/truncation": "After a TRUNCATE the views keep every row.",
                "trigger-missing/events": "An event whose key is changed counts twice.",
            },
            ("warning", SOURCE, SourceError): {
                "log-held/slot": "The log that it keeps fills the disk of Postgres.",
                "log-held/transaction": "The slot keeps all log since its begin, and a snapshot waits for it.",
                "log-held/prepared": "The slot keeps all log since its begin, through every restart.",
                "disk-low/source": "Postgres stops when its disk is full.",
                "role-unfit/superuser": "Whoever gets the connector's password owns the server.",
                "role-unfit/shared": "`migrate` refuses: whoever gets the connector's password may write there.",
            },
            ("info", SOURCE, SourceError): {
                "publication-differs/extra": "The connector decodes changes that nobody wants, and drops them.",
                "publication-differs/truncates": "Nothing is lost: triggers note each TRUNCATE.",
            },
            ("down", CAPTURE, ConnectorError): {
                "plugin-unfit": "The worker can't run the connector, so `register` fails.",
                "connector-refused": "`register` fails at this.",
            },
            ("warning", CAPTURE, ConnectorError): {
                "plugin-unfit/loses-rows": "Rows may be missing in every view after a restart of the worker.",
                "connector-differs": "It doesn't do what the pipeline file says until `register` has run.",
            },
            ("down", LOG, ConnectorError): {
                "topic-missing": "`run` refuses, and the connector may fail.",
                "topic-unfit/partitions": "A key's changes may lie in two partitions, so that they have no order.",
                "topic-unfit/policy": "Kafka deletes rows that nobody has changed for a while.",
                "topic-copies/leaderless": "Nothing can be written to these partitions, or read from them.",
            },
            ("degraded", LOG, ConnectorError): {
                "topic-unfit/truncated": "A rebuild would lack the rows that were there.",
                "topic-copies/out-of-sync": "The next broker that fails may stop the log, or lose some of it.",
            },
            ("warning", LOG, ConnectorError): {
                "topic-copies/fewer": "Fewer brokers may fail than the file says.",
                "topic-copies/single": "With that broker's disk the log is gone.",
            },
            ("down", APPLY, SinkError): {
                "state-too-large": "`run` makes no document of any view; other sinks go on.",
                "sink-unfit/redis": "Scripts of the cache's writer need a newer server.",
                "sink-unfit/cluster": "A node of a cluster refuses what is written to a single server.",
                "sink-unfit/replica": "The cache gets no changes until the primary is named.",
                "sink-unfit/elasticsearch": "The writer's requests are for this version.",
                "index-red": "Some views can't be read or written.",
                "index-blocked": "The view gets no changes.",
                "index-shadows-alias": "The view can't be shown under its name.",
                "sink-unfit/folder": "The warehouse gets no changes.",
            },
            ("degraded", APPLY, SinkError): {
                "cache-save-failing": "The cache refuses changes, or loses them when it is restarted.",
            },
            ("warning", APPLY, SinkError): {
                "memory-low/cache": "The cache refuses changes when its memory is full; a rebuild needs as much again.",
                "index-shards-full": "A rebuild or a new table finds no room.",
                "disk-low/index": "From the flood stage on indices take no writes.",
                "disk-low/warehouse": "The warehouse gets no changes when its disk is full.",
            },
            ("down", MACHINE, SettingsError): {
                "machine-unfit": "Nobody knows whether `run` would start here.",
                "machine-unfit/spark": "`run`, `rebuild` and `verify` can't start here without Spark.",
            },
            ("down", MACHINE, SparkError): {
                "machine-unfit/java": "`run`, `rebuild` and `verify` can't start here without Java.",
                "machine-unfit/old-java": "`run`, `rebuild` and `verify` can't start here with this Java.",
            },
            ("warning", MACHINE, SparkError): {
                "memory-low/machine": "The system may end one of Spark's workers, so that streams restart.",
                "disk-low/state": "Spark has no room to sort in, and queries fail.",
                "clock-off": "Lag in seconds is wrong by as much.",
            },
        }
    ),
}
"""What only `cdc doctor` can find."""
AUDIT = _kinds(
    {
        ("degraded", LOG, DivergenceError): {
            "records-incomplete/values": (
                "A view that is made from the log would lack these values; live views have them."
            ),
            "records-incomplete/outdated": (
                "A view that is made from the log would show these rows as "
                "before the definition changed."
            ),
            "records-incomplete/unmasked": (
                "A view that is made from the log would show these values unmasked."
            ),
            "topic-unfit/moved": "An older change of these rows may win in a view that is made from the log.",
            "topic-unfit/keyless": "A view that is made from the log would lack these rows.",
            "topic-unfit/foreign": "A view that is made from the log would have rows under keys that are nobody's.",
        },
        ("warning", LOG, DivergenceError): {
            "topic-unfit/unmasked": "Whoever reads the topic finds these values.",
        },
        ("warning", LOG, DecodeError): {
            "records-unreadable": "A rebuild puts these records into quarantine.",
        },
        ("warning", APPLY, DivergenceError): {
            "changes-incomplete": "Queries of the log of changes may miss some of them.",
        },
    }
)
"""What only `cdc topics audit` can find. It finds some of the above, too."""
KINDS: Mapping[str, Kind] = {**STATUS, **DOCTOR, **AUDIT}
CODES = tuple(dict.fromkeys(map(code_of, KINDS)))
"""All codes, in the order of the index of runbooks."""
