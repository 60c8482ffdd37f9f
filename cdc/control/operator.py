"""Who runs a command: the user, and the host."""

import getpass
import os
import socket


def current_operator() -> str:
    """Return `user@host`."""
    return f"{_user()}@{socket.gethostname()}"


def _user() -> str:
    """Return the user's name, or the number if the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user without an entry.
        return str(os.getuid())
