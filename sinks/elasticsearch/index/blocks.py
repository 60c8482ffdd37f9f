"""Blocks on indices, and closed ones: in settings and in refusals, and how each is lifted."""

import re
from collections.abc import Mapping
from urllib.parse import quote

WRITE = "index.blocks.write"
DISK_FULL = "index.blocks.read_only_allow_delete"
SETTINGS = {
    "5": "index.blocks.read_only",
    "7": "index.blocks.read",
    "8": WRITE,
    "9": "index.blocks.metadata",
    "12": DISK_FULL,
}
"""By the number that the server's reasons have."""
CLOSED = "index.verified_before_close"
"""The setting that the server gives an index for as long as it is closed."""
REASON = re.compile(r"index \[([^\]]+)\] blocked by: \[\w+/(\d+)/")
DISK_FULL_HINT = "no change is lost; the server lifts this block when its disk has room"


def blocks_of(settings: Mapping[str, object]) -> list[str]:
    """List the blocks that an index' flat settings have."""
    return [block for block in SETTINGS.values() if str(settings.get(block)) == "true"]


def parse_reason(reason: str) -> tuple[str, str] | None:
    """Parse index and setting that a refusal's reason names first; None where it names none."""
    match = REASON.search(reason)
    if match is None or match[2] not in SETTINGS:
        return None
    return match[1], SETTINGS[match[2]]


def block_message(index: str, block: str) -> str:
    return f"The index {index} is blocked: {block} is set."


def lift_hint(index: str, block: str) -> str:
    """Say how a block is lifted that isn't a promotion's."""
    if block == DISK_FULL:
        return DISK_FULL_HINT
    body = f"""-X PUT -H content-type:application/json -d '{{"{block}":null}}' """
    return f"no change is lost; once its reason is gone: {curl(f'/{index}/_settings', body)}"


def open_hint(index: str) -> str:
    return f"no change is lost; once its reason is gone: {curl(f'/{index}/_open', '-X POST ')}"


def curl(path: str, options: str = "") -> str:
    """Make the command that sends a request to the sink's server.

    The shell expands nothing of the path: a table's name may have any character.
    """
    return f'curl -s {options}"$CDC_ELASTICSEARCH{quote(path, safe="/@?=&*,")}"'
