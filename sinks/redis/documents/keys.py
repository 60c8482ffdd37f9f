"""Names of the state's keys. All have the prefix of a shard: the pipeline's prefix and a hash tag,
by which a cluster keeps them in one slot. A script also reaches keys that aren't among its KEYS:
they are in that slot, too.

<prefix>:_cdc:<table>                  hash    the table's position, as in the cache
<prefix>:<table>:<id>                  string  a row, see `cdc.documents.rows`
<prefix>:_x:<table>:<slot> GS <text>   set     ids of the rows with that entry
<prefix>:_x:<table>:l<n> GS <text>     zset    a list: <order> <id> of each row, all with score 0
<prefix>:_x:<table>:c<n> GS <text>     hash    a tally: see `cdc.documents.state.State.tallied`
<prefix>:_pending                      hash    number of a chunk: table, [id, old entries, ...]
<prefix>:_dirty:<view>                 zset    id of a root row: number of what made it dirty
<prefix>:_due:<view>                   zset    id of a root row: when its document is due, in us
<prefix>:_sent:<view>                  hash    id of a root row: digest of the document in the topic
<prefix>:_clocks                       hash    by view, the time of its clock, in us
<prefix>:_seen                         hash    by view, the latest time in the column that is its clock
<prefix>:_closed                       hash    by view, when the last window closed whose final
                                               document was found in its topic, in us
<prefix>:_late                         hash    by view, how many changes came after a window had closed
<prefix>:_late:<view>                  list    the latest of them: a row's id, a pane, a time
<prefix>:_gone:<view>                  hash    id of a deleted root row: the connector's key
<prefix>:_unsent                       set     keys of the dirty sets of which nothing was taken, since their root
                                               had no rows
<prefix>:_number                       string  counts chunks and marks
<prefix>:_documents                    hash    owner, turn, views, views that wait; when it began; sending: twice the
                                               transactions of digests, odd while one is open; and the notes of
                                               `cdc.sinks.redis.documents.state`
<prefix>:_needs                        hash    by table, what its rows are stored for
"""

from typing import Literal

from cdc.documents.rows import GROUP, escape
from cdc.sinks.redis.server import view_key

KeyName = Literal[
    "pending",
    "dirty",
    "due",
    "sent",
    "clocks",
    "seen",
    "closed",
    "late",
    "gone",
    "unsent",
    "number",
    "documents",
    "needs",
]


def shard_prefix(prefix: str) -> str:
    """Begin the names of the keys of a pipeline's only shard: the `<prefix>` above, and of the functions
    below. Pipelines that share a cluster have slots of their own.
    """
    return f"{prefix}:{{{prefix}.0}}"


def state_key(prefix: str, name: KeyName, view: str = "") -> str:
    """Name what there is once, or once for each view."""
    return f"{prefix}:_{name}:{view}" if view else f"{prefix}:_{name}"


def index_prefix(prefix: str, table: str) -> str:
    """Begin the keys of a table's indexes; an entry follows."""
    return view_key(f"{prefix}:_x", table)


def index_key(prefix: str, table: str, slot: int | str, text: str) -> str:
    """Name what there is of a text: in a slot, in a listing (l0), in a tally (c0)."""
    return f"{index_prefix(prefix, table)}{slot}{GROUP}{escape(text)}"
