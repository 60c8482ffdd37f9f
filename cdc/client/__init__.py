"""For applications that read a view: wait until it holds what they have written themselves."""

from cdc.client.read_your_writes import View, view, wait_for
from cdc.client.tokens import Token, token

__all__ = ["Token", "View", "token", "view", "wait_for"]
