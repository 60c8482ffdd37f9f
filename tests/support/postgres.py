"""A Postgres of its own for one test module: with passwords, or without logical decoding."""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc.compose.host import change_owner, unprivileged
from cdc.compose.wheels import postgres_bin

PASSWORD = "owner-secret-4711"


@contextmanager
def strict_postgres(wal_level: str) -> Iterator[str]:
    """The DSN of the superuser of a new server that asks everyone for a password."""
    home, user = Path(tempfile.mkdtemp(prefix="cdc-postgres-")), unprivileged()
    data, secret = home / "data", home / "secret"
    secret.write_text(PASSWORD)
    home.chmod(0o755)
    data.mkdir(mode=0o700)
    change_owner(home, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [postgres_bin() / program, *arguments],
            cwd=home,
            check=True,
            stdout=subprocess.DEVNULL,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
        )

    try:
        run(
            "initdb",
            "-D",
            data,
            "-U",
            "owner",
            "-A",
            "scram-sha-256",
            "--pwfile",
            secret,
            "-N",
            "--locale=C",
        )
        options = f"-p {port} -k {home} -c listen_addresses=127.0.0.1 -c wal_level={wal_level} -c fsync=off"
        run("pg_ctl", "-D", data, "-l", home / "log", "-o", options, "-w", "start")
        yield f"postgresql://owner:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        if (data / "postmaster.pid").exists():
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(home, ignore_errors=True)
