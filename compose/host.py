"""Requirements of the machine: a Java, disk space, free ports and, for root, an account that can
read the servers' files.
"""

import os
import pwd
import random
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from cdc.compose import versions
from cdc.errors import StackError

GIB = 1 << 30
DISK_MIN_BYTES = 3 * GIB
STATE_HINT = "choose a folder that every user may search: cdc -p FILE --state /var/lib/cdc/NAME up"
# Below the range that the kernel hands to outgoing connections: a client that keeps knocking at a
# stopped server could otherwise be given that very port, connect to itself, and keep the server
# from coming back.
PORTS = range(15_000, 32_000)
JAVA_HINT = (
    "install one (apt install openjdk-17-jre-headless, or brew install openjdk@17) or set JAVA_HOME"
)


def java() -> Path:
    """Find a Java runtime of at least version 17: JAVA_HOME first, then PATH."""
    home = os.environ.get("JAVA_HOME")
    candidate = Path(home) / "bin" / "java" if home else shutil.which("java")
    if not candidate or not Path(candidate).is_file():
        problem = f"JAVA_HOME={home} holds no bin/java" if home else "no java on PATH"
        raise StackError(f"Java {versions.JAVA_MIN} or newer is needed: {problem}", hint=JAVA_HINT)
    path = Path(candidate)
    match = re.search(r'version "(?:1\.)?(\d+)', ask_version([path, "-version"]))
    major = int(match[1]) if match else 0
    if major < versions.JAVA_MIN:
        raise StackError(
            f"{path} is Java {major}, but {versions.JAVA_MIN} or newer is needed", hint=JAVA_HINT
        )
    # Elasticsearch gets Java's home folder, and a link such as /usr/bin/java has none.
    return path.resolve()


def ask_version(command: list[str | Path]) -> str:
    """Return what a program prints of its version; nothing when it can't be run or doesn't end."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout + run.stderr


def require_disk(folder: Path, label: str) -> None:
    """Refuse to fill a filesystem that has less than 3 GiB left."""
    present = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(present).free
    if free < DISK_MIN_BYTES:
        raise StackError(
            f"{label} at {folder} has {free / GIB:.1f} GiB free, {DISK_MIN_BYTES / GIB:.0f} GiB are needed",
            hint="free some space, or choose another place with CDC_CACHE (downloads) and CDC_STATE (data)",
            path=str(folder),
        )


def unprivileged() -> pwd.struct_passwd | None:
    """Return the account for servers that refuse to run as root; None when the caller isn't
    root.
    """
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def change_owner(folder: Path, user: pwd.struct_passwd | None) -> None:
    """Give a folder and its content to a user."""
    if user:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def share(folder: Path) -> None:
    """Let every user read a tree, and execute what its owner may, whatever the umask was."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))


def require_searchable(path: Path, hint: str) -> None:
    """Refuse a path that root's unprivileged servers can't reach, naming the folder that shuts them
    out.
    """
    if os.geteuid() != 0:
        return
    for folder in reversed((path, *path.parents)):
        if folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH:
            raise StackError(
                f"{folder} is closed to other users, and root must run Postgres and Elasticsearch as one",
                hint=hint,
                path=str(path),
            )


def choose_ports(names: Iterable[str], reserved: Iterable[int] = ()) -> dict[str, int]:
    """Give each name a port of its own that is free on 127.0.0.1 now and isn't among `reserved`."""
    candidates = random.sample(PORTS, len(PORTS))
    free = (port for port in candidates if port not in set(reserved) and is_free_port(port))
    return dict(zip(names, free, strict=False))


def is_free_port(port: int) -> bool:
    """Return whether a server could listen on a port of 127.0.0.1."""
    with socket.socket() as probe:
        # As the servers do: connections of the last run that are still closing don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def require_free_port(name: str, port: int) -> None:
    """Refuse to start a server whose port somebody else has taken meanwhile."""
    if is_free_port(port):
        return
    pid = _port_owner(port)
    holder = f"process {pid}" if pid else "another user's process"
    raise StackError(
        f"port {port} of {name} is taken by {holder}",
        hint=f"stop that process ({f'kill {pid}' if pid else f'ss -ltnp sport = :{port}'}), then: cdc up",
        service=name,
        port=port,
    )


def _port_owner(port: int) -> int | None:
    """Return the pid that listens on a port, when the caller may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    listening = (
        c.pid
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
    )
    return next(listening, None)
