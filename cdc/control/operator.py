"""Name who runs a command: the user, and the host that the command runs on."""

import getpass
import os
import socket

OPERATOR_VARIABLE = "CDC_OPERATOR"
"""Names the person for whom a service runs the command, in a variable of the environment: `cdc serve`
sets it for the actions of its page, whose user is the service's own."""


def current_operator() -> str:
    """Return `user@host`, after the person for whom the user runs the command, where there is one."""
    process = f"{_user()}@{socket.gethostname()}"
    person = os.environ.get(OPERATOR_VARIABLE)
    return f"{person} by {process}" if person else process


def _user() -> str:
    """Return the user's name; the number where the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user that it has no entry for.
        return str(os.getuid())
