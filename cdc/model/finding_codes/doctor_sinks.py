"""Findings of `cdc doctor` about destinations and the machine that `cdc run` is to be at work on: see
`examine` of the sinks and `cdc.doctor.machine`.
"""

from collections.abc import Mapping

from cdc.errors import SettingsError, SinkError, SparkError
from cdc.model.finding_codes.kind import APPLY, MACHINE, Kind

SINKS: Mapping[str, Kind] = {
    "view-unfit": Kind(
        "degraded", APPLY, SinkError, "The table waits in this sink until the view is made again."
    ),
    "state-too-large": Kind(
        "down", APPLY, SinkError, "`run` makes no document of any view; other sinks go on."
    ),
    "cache-evicts": Kind(
        "down", APPLY, SinkError, "Rows vanish from the cache, and `run` refuses."
    ),
    "cache-too-old": Kind(
        "down",
        APPLY,
        SinkError,
        "Scripts of the cache's writer need a newer server.",
        "Upgrade the server, or name another one in the pipeline file.",
    ),
    "cache-clustered": Kind(
        "down",
        APPLY,
        SinkError,
        "Neither a rebuild nor the writer's scripts work on a cluster.",
        "Name a server in the pipeline file that isn't a cluster.",
    ),
    "cache-replica": Kind(
        "down",
        APPLY,
        SinkError,
        "The cache gets no changes until the primary is named.",
        "Name the primary in the pipeline file.",
    ),
    "cache-memory-high": Kind(
        "warning",
        APPLY,
        SinkError,
        "The cache refuses changes when its memory is full; a rebuild needs as much again.",
        "Raise maxmemory, or keep other data elsewhere.",
    ),
    "cache-save-failing": Kind(
        "degraded",
        APPLY,
        SinkError,
        "The cache refuses changes, or loses them when it is restarted.",
        "Make room on the server's disk, or turn its saving off.",
    ),
    "index-version": Kind(
        "down",
        APPLY,
        SinkError,
        "The writer's requests are for this version.",
        "Upgrade the cluster, or name another one in the pipeline file.",
    ),
    "index-red": Kind(
        "down",
        APPLY,
        SinkError,
        "Some views can't be read or written.",
        "Bring the nodes back that hold these shards, or restore them from a snapshot.",
    ),
    "index-shards-full": Kind(
        "warning",
        APPLY,
        SinkError,
        "A rebuild or a new table finds no room.",
        "Raise cluster.max_shards_per_node, add a node, or delete indices that nobody needs.",
    ),
    "index-disk-high": Kind(
        "warning",
        APPLY,
        SinkError,
        "From the flood stage on indices take no writes.",
        "Make room on that node, or add one.",
    ),
    "index-blocked": Kind(
        "down",
        APPLY,
        SinkError,
        "The view gets no changes.",
        "Whoever has set the block lifts it; the cluster lifts its own when its disk has room.",
    ),
    "index-shadows-alias": Kind(
        "down",
        APPLY,
        SinkError,
        "The view can't be shown under its name.",
        "Delete that index, if nobody needs it, or give the sink another prefix.",
    ),
    "warehouse-read-only": Kind(
        "down",
        APPLY,
        SinkError,
        "The warehouse gets no changes.",
        "Give this user the right to write there, or name another path in the pipeline file.",
    ),
    "warehouse-disk-low": Kind(
        "warning",
        APPLY,
        SinkError,
        "The warehouse gets no changes when its disk is full.",
        "Make room there, or name another path in the pipeline file.",
    ),
}
RUNNER: Mapping[str, Kind] = {
    "machine-unreadable": Kind(
        "down", MACHINE, SettingsError, "Nobody can tell whether `run` would start here."
    ),
    "java-missing": Kind(
        "down", MACHINE, SparkError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "java-too-old": Kind(
        "down", MACHINE, SparkError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "spark-missing": Kind(
        "down", MACHINE, SettingsError, "`run`, `rebuild` and `verify` can't start here."
    ),
    "memory-low": Kind(
        "warning",
        MACHINE,
        SparkError,
        "The system may end one of Spark's workers, so that streams restart.",
        "Stop what needs the memory, or run on a larger machine.",
    ),
    "state-disk-low": Kind(
        "warning",
        MACHINE,
        SparkError,
        "Spark has no room to sort in, and queries fail.",
        "Make room there, or choose another folder with --state.",
    ),
    "clock-off": Kind(
        "warning",
        MACHINE,
        SparkError,
        "Lag in seconds is wrong by as much.",
        "Let a time server set both clocks.",
    ),
}
