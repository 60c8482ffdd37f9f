"""What the index needs for a second generation: disk, and shards of its cluster."""

from collections.abc import Sequence

from cdc.model.table import Table
from cdc.sink.promotion import require_free_space
from cdc.sinks.elasticsearch.index.indices import Indices
from cdc.sinks.elasticsearch.index.layout import Layout
from cdc.sinks.elasticsearch.server import Server


def require_capacity(server: Server, indices: Indices, tables: Sequence[Table], sink: str) -> None:
    """Raise SinkRejected when disk or shards don't suffice for as much as the live indices take."""
    places = indices.find(tables)
    needed = indices.bytes([place.index for place in places.values()])
    nodes = server.client.nodes.stats(metric="fs")["nodes"].values()
    free = max(int(node["fs"]["total"]["available_in_bytes"]) for node in nodes)
    require_free_space(needed, free, server.name, sink)
    # A rebuild removes what else lies beside the live views before it makes anything.
    spare = sum(len(names[1:]) for names in indices.generations(tables).values())
    server.require_shards(sum(Layout.of(table).shards for table in tables) - spare)
