"""Name who runs a command: the user, and the host that the command runs on."""

import getpass
import socket


def current_operator() -> str:
    """Return `user@host`; the user's number where the system has no name for it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user that it has no entry for.
        import os

        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
