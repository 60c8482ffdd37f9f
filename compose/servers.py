"""The five servers of the embedded stack: each one's settings, command line, environment and
readiness.

A server lives in `<state>/<name>/{data,conf,log,tmp}`; its settings are the templates in `conf/`.
Starting and stopping it is stack.py's work.
"""

import base64
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from pwd import struct_passwd
from string import Template
from typing import TYPE_CHECKING, Any

from cdc.compose.host import STATE_HINT, change_owner, require_searchable, unprivileged
from cdc.compose.process import end_leftovers, options
from cdc.compose.versions import ELASTICSEARCH, SERVER_VERSIONS, ServerVersion
from cdc.compose.wheels import cache_version, postgres_bin, redis_server
from cdc.errors import StackError
from cdc.model import jvm_options

if TYPE_CHECKING:
    import redis

TEMPLATES = Path(__file__).parent / "conf"
FOLDERS = ("data", "conf", "log", "tmp")
DEBEZIUM = "io.debezium.connector.postgresql.PostgresConnector"
READY_S = 3.0
"""Seconds in which a server that is ready answers."""
PREPARE_S = 120.0


@dataclass(frozen=True)
class ServerDirs:
    """Folders and resources of a server: its folder, the ports of the stack, the fetched files, the
    Java to use.
    """

    home: Path
    ports: Mapping[str, int]
    files: Path
    java: Path

    @property
    def log(self) -> Path:
        """The log file."""
        return self.home / "log" / f"{self.home.name}.log"

    @property
    def data(self) -> Path:
        """The folder of the data, which outlives restarts."""
        return self.home / "data"

    @property
    def conf(self) -> Path:
        """The folder of the settings, written before every start."""
        return self.home / "conf"


def last_lines(log: Path, count: int = 15) -> str:
    """Return the end of a log, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(f"    {line[:400]}" for line in lines[-count:])


class Server:
    """A server of the stack; a subclass for each kind. `stack.py` starts each server in a thread of
    its own.
    """

    name: str
    extra_ports: tuple[str, ...] = ()
    starts_after: str | None = None
    templates: tuple[str, ...] = ()
    stop_signal = signal.SIGTERM
    stop_deadline_s = 30.0
    refuses_root = False

    @property
    def port_names(self) -> tuple[str, ...]:
        """Return the names of its ports, the one that clients use first."""
        return (self.name, *self.extra_ports)

    def user(self) -> struct_passwd | None:
        """Return the account to run as; None means the caller's own."""
        return unprivileged() if self.refuses_root else None

    def prepare(self, dirs: ServerDirs) -> None:
        """Write folders and settings; at the first start, create the data. Called before every
        start.
        """
        for name in FOLDERS:
            (dirs.home / name).mkdir(parents=True, exist_ok=True)
        for folder in (dirs.home.parent, dirs.home):
            folder.chmod(0o755)
        for template in self.templates:
            text = Template((TEMPLATES / template).read_text()).substitute(self.settings(dirs))
            (dirs.conf / template.removeprefix(f"{self.name}.")).write_text(text)
        self.secure(dirs)
        if self.refuses_root:
            require_searchable(dirs.home, STATE_HINT)
            change_owner(dirs.home, self.user())
        self.create(dirs)

    def secure(self, dirs: ServerDirs) -> None:
        """Add to the settings what makes the server ask who its clients are; see secured.py."""

    def create(self, dirs: ServerDirs) -> None:
        """Create the data, when this is the first start."""

    def grant(self, ports: Mapping[str, int]) -> None:
        """Give users their rights, once the server is ready and at each `cdc up`; see secured.py."""

    def settings(self, dirs: ServerDirs) -> dict[str, object]:
        """Return the variables of the templates."""
        ports = {name.replace("-", "_"): port for name, port in dirs.ports.items()}
        return {**ports, "home": dirs.home, "plugins": dirs.files / "debezium"}

    def command(self, dirs: ServerDirs) -> list[str | Path]:
        """Return the command line."""
        raise NotImplementedError

    def environment(self, dirs: ServerDirs) -> dict[str, str]:
        """Return the whole environment; the caller's could change what a server does (PGDATA,
        CLASSPATH).
        """
        tmp = str(dirs.home / "tmp")
        return {"PATH": os.defpath, "HOME": tmp, "TMPDIR": tmp, "LANG": "C.UTF-8", "TZ": "UTC"}

    def ready(self, ports: Mapping[str, int]) -> bool:
        """Return whether the server answers a real request: False, never an error, while it is away or
        still starts.
        """
        raise NotImplementedError

    def version(self) -> ServerVersion | None:
        """Return the version that is about to write this server's data; None for a server without
        data.
        """
        return SERVER_VERSIONS.get(self.name)

    def run(self, dirs: ServerDirs, *command: str | Path) -> None:
        """Run a preparing command as the server's user."""
        with dirs.log.open("ab") as log:
            ended = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                timeout=PREPARE_S,
                check=False,
                **options(dirs.home, self.environment(dirs), self.user()),
            )
        if ended.returncode != 0:
            raise StackError(
                f"{self.name}: {Path(command[0]).name} ended with status {ended.returncode}\n"
                + last_lines(dirs.log),
                hint=f"the whole log: {dirs.log}",
                service=self.name,
            )


class Postgres(Server):
    """Postgres, from a wheel."""

    name = "postgres"
    templates = ("postgres.postgresql.conf",)
    stop_signal = signal.SIGINT  # "fast": SIGTERM would wait for every client to leave
    refuses_root = True

    def programs(self) -> Path:
        """Return the folder of the programs. Raises StackError: this machine has none."""
        return postgres_bin()

    def login(self, dirs: ServerDirs) -> list[str | Path]:  # noqa: ARG002
        """Return initdb's options for how clients log in."""
        return ["-A", "trust"]

    def create(self, dirs: ServerDirs) -> None:
        end_leftovers(dirs.data, self.programs() / "postgres")
        if dirs.data.joinpath("PG_VERSION").exists():
            return
        fresh = dirs.home / "tmp" / "initdb"
        shutil.rmtree(fresh, ignore_errors=True)
        self.run(
            dirs,
            self.programs() / "initdb",
            *("-D", fresh, "-U", "postgres", "-E", "UTF8", "--no-instructions"),
            *self.login(dirs),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        )
        # An interrupted initdb leaves half a cluster, which a rename never shows.
        dirs.data.rmdir()
        fresh.rename(dirs.data)

    def command(self, dirs: ServerDirs) -> list[str | Path]:
        config = dirs.conf / "postgresql.conf"
        return [self.programs() / "postgres", "-D", dirs.data, "-c", f"config_file={config}"]

    def address(self, ports: Mapping[str, int]) -> str:
        """Return where an administrator logs in, as libpq takes it."""
        return f"host=127.0.0.1 port={ports[self.name]} user=postgres dbname=postgres"

    def ready(self, ports: Mapping[str, int]) -> bool:
        import psycopg

        with (
            suppress(psycopg.Error),
            psycopg.connect(self.address(ports), connect_timeout=int(READY_S)) as connection,
        ):
            return connection.execute("select 1").fetchone() == (1,)
        return False


class JavaServer(Server):
    """A server on the JVM, Kafka or Connect: a class path, a main class and a quiet log."""

    main: str
    heap: tuple[str, ...]
    stop_deadline_s = 60.0

    def jvm(self, dirs: ServerDirs) -> list[str | Path]:
        """Return java with the options of a small server that leaves nothing outside its folder."""
        return [
            dirs.java,
            *jvm_options.caller_options(),
            *jvm_options.default_options(),
            *(
                "-Xms128m",
                *self.heap,
                "-XX:+ExitOnOutOfMemoryError",
                "-XX:-UsePerfData",
                "-Duser.timezone=UTC",
            ),
            *("-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true"),
            f"-Djava.io.tmpdir={dirs.home / 'tmp'}",
            f"-Dlog4j2.configurationFile={dirs.conf / 'log4j2.properties'}",
            *("-cp", f"{dirs.files / self.name}/*"),
        ]

    def command(self, dirs: ServerDirs) -> list[str | Path]:
        return [*self.jvm(dirs), self.main, dirs.conf / "server.properties"]


class Kafka(JavaServer):
    """A Kafka broker that is its own controller."""

    name = "kafka"
    extra_ports: tuple[str, ...] = ("kafka-controller",)
    templates = ("kafka.server.properties", "kafka.log4j2.properties")
    main = "kafka.Kafka"
    heap = ("-Xmx512m",)

    def create(self, dirs: ServerDirs) -> None:
        if dirs.data.joinpath("meta.properties").exists():
            return
        shutil.rmtree(dirs.data)
        dirs.data.mkdir()
        cluster = "c" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
        self.run(
            dirs,
            *(*self.jvm(dirs), "kafka.tools.StorageTool", "format", "--standalone"),
            *("-t", cluster, "-c", dirs.conf / "server.properties"),
        )

    def connect(self, ports: Mapping[str, int]) -> socket.socket:
        """Connect to a port at which no login is needed. Raises OSError."""
        return socket.create_connection(("127.0.0.1", ports[self.name]), READY_S)

    def ready(self, ports: Mapping[str, int]) -> bool:
        """Ask for metadata (version 1, all topics): ready when the broker lists itself.

        Written by hand, because eight bytes of the answer are enough, and a client library takes
        longer to load.
        """
        client = b"cdc"
        request = struct.pack(f">hhih{len(client)}si", 3, 1, 7, len(client), client, 0)
        with (
            suppress(OSError),
            self.connect(ports) as connection,
            connection.makefile("rb") as answer,
        ):
            connection.sendall(struct.pack(">i", len(request)) + request)
            head = answer.read(12)
            if len(head) == 12:
                _, correlation, brokers = struct.unpack(">iii", head)
                return bool(correlation == 7 and brokers > 0)
        return False


class WebServer(Server):
    """A server with an interface by HTTP."""

    def connection(self, ports: Mapping[str, int]) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", ports[self.name], timeout=READY_S)

    def headers(self) -> dict[str, str]:
        """Return the login."""
        return {}

    def get(self, ports: Mapping[str, int], path: str) -> Any:
        """Ask with a plain connection: a client library would read the system's certificates for each
        request, which took more CPU than a server's start.
        """
        connection = self.connection(ports)
        with closing(connection), suppress(OSError, HTTPException, ValueError):
            connection.request("GET", path, headers=self.headers())
            answer = connection.getresponse()
            return json.load(answer) if answer.status == 200 else None
        return None


class Connect(WebServer, JavaServer):
    """A worker of Kafka Connect with Debezium's plugin."""

    name = "connect"
    starts_after = "kafka"
    templates = ("connect.server.properties", "connect.log4j2.properties")
    main = "org.apache.kafka.connect.cli.ConnectDistributed"
    # Records die young only if the young generation has room for them: with less, a third of the
    # time was collection.
    heap = ("-Xmx768m", "-Xmn450m")

    def ready(self, ports: Mapping[str, int]) -> bool:
        """Ask the worker for its plugins, and for its connectors, which it knows once it has joined its
        group.
        """
        plugins = self.get(ports, "/connector-plugins") or []
        if not any(plugin.get("class") == DEBEZIUM for plugin in plugins):
            return False
        return self.get(ports, "/connectors") is not None


class Elasticsearch(WebServer):
    """Elasticsearch with a single node."""

    name = "elasticsearch"
    extra_ports = ("elasticsearch-transport",)
    templates = (
        "elasticsearch.elasticsearch.yml",
        "elasticsearch.jvm.options",
        "elasticsearch.log4j2.properties",
    )
    refuses_root = True
    stop_deadline_s = 60.0

    def command(self, dirs: ServerDirs) -> list[str | Path]:
        folder = dirs.files / "elasticsearch" / f"elasticsearch-{ELASTICSEARCH}"
        return [folder / "bin" / "elasticsearch"]

    def environment(self, dirs: ServerDirs) -> dict[str, str]:
        tmp = dirs.home / "tmp"
        return {
            **super().environment(dirs),
            # The start script's own Java would leave files in the system's folder and in the user's
            # home; and it starts the server and waits, too short a work for the second compiler.
            "CLI_JAVA_OPTS": f"-Djava.io.tmpdir={tmp} -Djna.tmpdir={tmp} -XX:-UsePerfData"
            " -XX:TieredStopAtLevel=1",
            "ES_JAVA_OPTS": shlex.join(jvm_options.caller_options()),
            "ES_JAVA_HOME": str(dirs.java.parent.parent),
            "ES_PATH_CONF": str(dirs.conf),
            "ES_TMPDIR": str(tmp),
        }

    def ready(self, ports: Mapping[str, int]) -> bool:
        """Ask for the cluster's health (this distribution answers GET / with 405)."""
        health = self.get(ports, "/_cluster/health")
        return bool(health) and health.get("status") in {"yellow", "green"}


class Redis(Server):
    """The cache server: Valkey from a wheel, or the machine's own Redis."""

    name = "redis"
    templates = ("redis.redis.conf",)

    def command(self, dirs: ServerDirs) -> list[str | Path]:
        return [redis_server(), dirs.conf / "redis.conf"]

    def login(self) -> tuple[str | None, str | None]:
        """Return an administrator's name and password."""
        return None, None

    def client(self, ports: Mapping[str, int]) -> "redis.Redis":
        """Return an administrator's client."""
        import redis

        user, password = self.login()
        return redis.Redis(
            port=ports[self.name],
            username=user,
            password=password,
            socket_timeout=READY_S,
            socket_connect_timeout=READY_S,
        )

    def ready(self, ports: Mapping[str, int]) -> bool:
        """PING; a server that still loads its file answers with an error."""
        import redis

        with suppress(redis.RedisError), self.client(ports) as client:
            return bool(client.ping())
        return False

    def version(self) -> ServerVersion | None:
        # Asked of the program, because it may be the machine's own.
        return cache_version(redis_server())


# In the order of starting; stopped in reverse.
ALL: tuple[Server, ...] = (Postgres(), Kafka(), Elasticsearch(), Redis(), Connect())
BY_NAME: Mapping[str, Server] = {server.name: server for server in ALL}
