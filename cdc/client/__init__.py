"""For applications that read a view: wait until it holds what they have written themselves."""

from cdc.client.read_your_writes import Token, View, token, view, wait_for

__all__ = ["Token", "View", "token", "view", "wait_for"]
