"""Health of the index's cluster: facts of its interface, and what they mean for views."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdc.model.finding import Finding, find
from cdc.model.table import Table
from cdc.sink.promotion import require_free_space
from cdc.sinks.elasticsearch.client import SHARDS, Server, blocks_of, curl, group_names
from cdc.sinks.elasticsearch.index.indices import Indices
from cdc.sinks.elasticsearch.index.layout import Layout

SUPPORTED = {"Elasticsearch": ("8", "9"), "OpenSearch": ("2", "3")}
"""Major versions by product."""
FULL_SHARES = 0.9
WATERMARK = "cluster.routing.allocation.disk.watermark"


@dataclass(frozen=True)
class IndexFacts:
    product: str
    versions: tuple[str, ...]
    """Of its nodes."""
    status: str
    shards: int
    shard_limit: int
    disk_used: Mapping[str, float]
    """By node: the share of its disk that is used."""
    watermark: float
    """The share from which a node gets no more shards."""
    blocked: tuple[str, ...]
    """Indices of the pipeline that have a block."""
    shadowed: tuple[str, ...]
    """Names of views that an index has which isn't the pipeline's."""


def read_cluster(server: Server, aliases: Sequence[str]) -> IndexFacts:
    """Read the facts. aliases: of the pipeline's views. Raises SinkUnavailable, SinkRejected."""
    client = server.client
    status, settings, shards, shard_limit = _read_state(server)
    nodes = client.nodes.stats(metric="fs")["nodes"]
    versions = client.nodes.info(filter_path="nodes.*.version")["nodes"]
    blocked = []
    shadowed = []
    for group in group_names(aliases):
        answer = client.indices.get_settings(
            index=group,
            # The uuid, so that an index without blocks is listed, too.
            name=["index.blocks.*", "index.uuid"],
            flat_settings=True,
            ignore_unavailable=True,
        )
        for index, body in answer.body.items():
            blocked += [index] if blocks_of(body["settings"]) else []
            shadowed += [index] if index in aliases else []
    return IndexFacts(
        server.product,
        tuple(sorted({node["version"] for node in versions.values()})),
        status,
        shards,
        shard_limit,
        {node["name"]: _used(node["fs"]["total"]) for node in nodes.values()},
        _share(str(settings.get(f"{WATERMARK}.low", "85%"))),
        tuple(blocked),
        tuple(shadowed),
    )


def _read_state(server: Server) -> tuple[str, Mapping[str, Any], int, int]:
    """Read the cluster's status and settings, how many shards it holds, and how many it takes."""
    health = server.client.cluster.health()
    listed = server.client.cluster.get_settings(include_defaults=True, flat_settings=True)
    settings = {**listed["defaults"], **listed["persistent"], **listed["transient"]}
    used = sum(int(health[f"{state}_shards"]) for state in ("active", "initializing", "unassigned"))
    limit = int(settings.get(SHARDS, 1000)) * int(health["number_of_data_nodes"])
    return health["status"], settings, used, limit


def _used(total: Mapping[str, Any]) -> float:
    size = int(total.get("total_in_bytes", 0))
    return 1 - int(total.get("available_in_bytes", size)) / size if size else 0.0


def _share(text: str) -> float:
    """Read a watermark; one that is given in bytes isn't compared."""
    return float(text.rstrip("%")) / 100 if text.endswith("%") else 1.0


def check_cluster(sink: str, facts: IndexFacts) -> Iterator[Finding]:
    """Judge the cluster. Pure."""

    def finding(code: str, subject: str, message: str, fix: str) -> Finding:
        return find(code, subject, f"{sink}: {message}", fix, sink=sink)

    majors = SUPPORTED[facts.product]
    unsupported = [version for version in facts.versions if version.split(".")[0] not in majors]
    if unsupported:
        message = (
            f"a node has version {unsupported[0]} of {facts.product};"
            f" {' and '.join(majors)} are supported."
        )
        yield finding(
            "sink-unfit/elasticsearch",
            "version",
            message,
            curl("/_nodes?filter_path=nodes.*.version"),
        )
    if facts.status == "red":
        message = "the cluster is red: some shards are nowhere."
        yield finding("index-red", "cluster", message, curl("/_cluster/health?level=indices"))
    if facts.shards > FULL_SHARES * facts.shard_limit:
        message = f"{facts.shards} of {facts.shard_limit} shards are in use: a rebuild needs more."
        yield finding("index-shards-full", SHARDS, message, curl("/_cat/shards?v"))
    for node, share in facts.disk_used.items():
        if share >= facts.watermark:
            message = (
                f"the disk of node {node} is {share:.0%} full, above the limit for new shards."
            )
            yield finding("disk-low/index", node, message, curl("/_cat/allocation?v"))
    for index in facts.blocked:
        message = f"index {index} is blocked."
        yield finding("index-blocked", index, message, curl(f"/{index}/_settings/index.blocks.*"))
    for name in facts.shadowed:
        message = f"an index is called {name}, which has to be the name of the view's alias."
        yield finding("index-shadows-alias", name, message, curl(f"/{name}"))


def require_capacity(server: Server, indices: Indices, tables: Sequence[Table], sink: str) -> None:
    """Raise SinkRejected when disk or shards don't suffice for as much as the live indices take: the
    cluster would refuse half-way.
    """
    places = indices.find(tables)
    needed = indices.bytes([place.index for place in places.values()])
    nodes = server.client.nodes.stats(metric="fs")["nodes"].values()
    free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
    require_free_space(needed, free, server.name, sink)
    # A rebuild removes what else lies beside the live views before it makes anything.
    spare = sum(len(names[1:]) for names in indices.generations(tables).values())
    needed_shards = sum(Layout.of(table).shards for table in tables) - spare
    _, _, used, limit = _read_state(server)
    if needed_shards > 0 and used + needed_shards > limit:
        raise server.full(needed_shards)
