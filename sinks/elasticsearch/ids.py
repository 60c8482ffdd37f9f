"""The `_id` of a document: its row's id, or a hash where the server doesn't take that."""

import hashlib

LONGEST_ID = 512
HASHED = "sha256:"
OWN_ID = "_cdc_id"
"""The field that holds the id of a document whose `_id` can't: Elasticsearch takes 512 bytes."""


def document_id(row_id: str) -> str:
    """The row's id, or its hash when that is too long, empty, or looks like such a hash."""
    length = len(row_id.encode())
    if 0 < length <= LONGEST_ID and not row_id.startswith(HASHED):
        return row_id
    return HASHED + hashlib.sha256(row_id.encode()).hexdigest()
