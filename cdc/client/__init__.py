"""For applications that read a view: wait until it holds what they have written themselves, ask
through which moment it is proved, and where a cache has its rows.
"""

from cdc.client.read_your_writes import (
    Token,
    View,
    key_prefix,
    proved_through,
    token,
    view,
    wait_for,
)

__all__ = ["Token", "View", "key_prefix", "proved_through", "token", "view", "wait_for"]
