"""Names of the state's keys. All have the prefix of a shard: that of the pipeline, and a hash tag, by
which a cluster keeps them in one slot. What a script reaches besides its KEYS is there, too.

<prefix>:_cdc:<table>                  hash    the table's position, as in the cache
<prefix>:<table>:<id>                  string  a row, see `cdc.views.rows`
<prefix>:_x:<table>:<slot> GS <text>   set     ids of the rows with that entry
<prefix>:_x:<table>:l<n> GS <text>     zset    a list: <order> <id> of each row, all with score 0
<prefix>:_x:<table>:c<n> GS <text>     hash    a tally: see `cdc.views.state.State.tallied`
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
<prefix>:_unsent                       set     keys of the dirty sets that still have all root rows
<prefix>:_number                       string  counts chunks and marks
<prefix>:_documents                    hash    owner, turn, views, views that wait; when it began; sending: twice the
                                               transactions of digests, odd while one is open; and
                                               by <view> <topic>: the position that is sent
<prefix>:_needs                        hash    by table, what its rows are stored for
"""

from cdc.sinks.redis.server import view_key
from cdc.views.rows import GROUP, escape


def shard_prefix(prefix: str) -> str:
    """Begin the names of the keys of a pipeline's only shard: the `<prefix>` above, and of the functions
    below. Pipelines that share a cluster have slots of their own.
    """
    return f"{prefix}:{{{prefix}.0}}"


def row_prefix(prefix: str, table: str) -> str:
    """Begin the keys of a table's rows."""
    return view_key(prefix, table)


def index_prefix(prefix: str, table: str) -> str:
    """Begin the keys of a table's indexes; an entry follows."""
    return view_key(f"{prefix}:_x", table)


def index_key(prefix: str, table: str, slot: int | str, text: str) -> str:
    """Name what there is of a text: in a slot, in a listing (l0), in a tally (c0)."""
    return f"{index_prefix(prefix, table)}{slot}{GROUP}{escape(text)}"


def pending_key(prefix: str) -> str:
    """Name the hash of pending chunks."""
    return f"{prefix}:_pending"


def number_key(prefix: str) -> str:
    """Name the counter of chunks."""
    return f"{prefix}:_number"


def dirty_key(prefix: str, view: str) -> str:
    """Name the set of a view's dirty ids."""
    return f"{prefix}:_dirty:{view}"


def due_key(prefix: str, view: str) -> str:
    """Name the set of when a view's documents are due."""
    return f"{prefix}:_due:{view}"


def sent_key(prefix: str, view: str) -> str:
    """Name the hash of what a view's topic has."""
    return f"{prefix}:_sent:{view}"


def clocks_key(prefix: str) -> str:
    """Name the hash of the views' clocks."""
    return f"{prefix}:_clocks"


def seen_key(prefix: str) -> str:
    """Name the hash of the latest times that views have seen."""
    return f"{prefix}:_seen"


def closed_key(prefix: str) -> str:
    """Name the hash of when windows closed that views' topics have."""
    return f"{prefix}:_closed"


def late_key(prefix: str, view: str = "") -> str:
    """Name the hash of how many changes came late, or the list of a view's."""
    return f"{prefix}:_late:{view}" if view else f"{prefix}:_late"


def gone_key(prefix: str, view: str) -> str:
    """Name the hash of a view's deleted rows."""
    return f"{prefix}:_gone:{view}"


def unsent_key(prefix: str) -> str:
    """Name the set of the dirty sets of which nothing was taken, since their root had no rows."""
    return f"{prefix}:_unsent"


def needs_key(prefix: str) -> str:
    """Name the hash of what views need of each table."""
    return f"{prefix}:_needs"


def documents_key(prefix: str) -> str:
    """Name the hash of the owner and of what has been sent."""
    return f"{prefix}:_documents"
