"""A Postgres of its own for one test module: with passwords, or without logical decoding; and what
a Postgres reports of reads.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from cdc.compose.artifacts import postgres_with_tls
from cdc.compose.authority import Authority
from cdc.compose.host import change_owner, unprivileged
from cdc.compose.wheels import postgres_bin
from tests.support.cache import free_port
from tests.support.wait import wait_until

UNREPORTED = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
AND NOT state_change < clock_timestamp() - interval '11 s' AND NOT state_change > %s + interval '2 s'
"""
"""Sessions that may not have reported what they have read: Postgres reports at the end of a
transaction, at most once a second, or when a session has been idle for ten (PGSTAT_IDLE_INTERVAL).
"""
Prepare = Callable[[Path], str]
PASSWORD = "owner-secret-4711"


@contextmanager
def strict_postgres(
    wal_level: str, programs: Callable[[], Path] = postgres_bin, prepare: Prepare = lambda _: ""
) -> Iterator[str]:
    """The DSN of the superuser of a new server that asks everyone for a password. `prepare` may
    change its folder of data, and returns further options.
    """
    home, user = Path(tempfile.mkdtemp(prefix="cdc-postgres-")), unprivileged()
    data, secret = home / "data", home / "secret"
    secret.write_text(PASSWORD)
    home.chmod(0o755)
    data.mkdir(mode=0o700)
    change_owner(home, user)
    port = free_port()

    def run(program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [programs() / program, *arguments],
            cwd=home,
            check=True,
            stdout=subprocess.DEVNULL,
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            extra_groups=[] if user else None,
        )

    try:
        login = ("-U", "owner", "-A", "scram-sha-256", "--pwfile", secret)
        run("initdb", "-D", data, *login, "-N", "--locale=C", "--encoding=UTF8")
        options = f"-p {port} -k {home} -c listen_addresses=127.0.0.1 -c wal_level={wal_level} -c fsync=off"
        options = f"{options} {prepare(data)}"
        change_owner(data, user)
        run("pg_ctl", "-D", data, "-l", home / "log", "-o", options, "-w", "start")
        yield f"postgresql://owner:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        if (data / "postmaster.pid").exists():
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def tls_postgres(
    folder: Path, *lines: str, names: Sequence[str] = ("localhost",)
) -> Iterator[tuple[str, Authority]]:
    """The DSN of the superuser of a new server with TLS, and the authority of its certificate, which
    is for these names. `lines` stand before the others of its pg_hba.conf, which take a password.
    """
    authority = Authority(folder)
    certificate, key = authority.certify("server", *names)

    def prepare(data: Path) -> str:
        shutil.copy(certificate, data / "server.crt")
        # With its mode: Postgres refuses a key that others may read.
        shutil.copy(key, data / "server.key")
        shutil.copy(authority.ca, data / "ca.pem")
        hba = "".join(f"{line}\n" for line in (*lines, "hostssl all all all scram-sha-256"))
        (data / "pg_hba.conf").write_text(hba)
        return "-c ssl=on -c ssl_ca_file=ca.pem"

    with strict_postgres("logical", postgres_with_tls, prepare) as dsn:
        yield (
            make_conninfo(
                dsn, host="localhost", sslmode="verify-full", sslrootcert=str(authority.ca)
            ),
            authority,
        )


@contextmanager
def sibling(dsn: str) -> Iterator[str]:
    """The DSN of a new, empty database on the same server, for a while."""
    name = f"sibling_{uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            yield make_conninfo(dsn, dbname=name)
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def run_psql(dsn: str, script: str, *options: str) -> str:
    """Run a script as an administrator does; return what psql says of it."""
    command = [str(postgres_bin() / "psql"), "-X", "-v", "ON_ERROR_STOP=1", *options, dsn]
    process = subprocess.run(command, input=script, text=True, check=False, capture_output=True)
    assert process.returncode == 0, process.stderr
    return process.stderr


def await_reads(connection: "psycopg.Connection[Any]") -> None:
    """Wait until all sessions of this database have reported what they have read up to now; outside
    a transaction, which would see the reports as of its first look.
    """
    since = connection.execute("SELECT clock_timestamp()").fetchone()
    wait_until(lambda: connection.execute(UNREPORTED, since).fetchone() == (0,), 60, "reports")
