"""Who runs a command: the user, and the host."""

import getpass
import os
import socket

OPERATOR_VARIABLE = "CDC_OPERATOR"
"""Environment variable with the person for whom a service runs the command. `cdc serve` sets it for
the actions of its page, because the process has the service's own user.
"""


def current_operator() -> str:
    """Return `user@host`, or `person by user@host` if a service runs the command for a person."""
    process = f"{_user()}@{socket.gethostname()}"
    person = os.environ.get(OPERATOR_VARIABLE)
    return f"{person} by {process}" if person else process


def _user() -> str:
    """Return the user's name, or the number if the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user without an entry.
        return str(os.getuid())
