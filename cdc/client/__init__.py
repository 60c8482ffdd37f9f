"""For applications that read a view: wait until it holds what they have written themselves, and
ask through which moment it is proved.
"""

from cdc.client.read_your_writes import Token, View, proved_through, token, view, wait_for

__all__ = ["Token", "View", "proved_through", "token", "view", "wait_for"]
