"""The five servers of the embedded stack: each one's settings, command line, environment and readiness.

A server lives in `<state>/<name>/{data,conf,log,tmp}`; its settings are the templates in `conf/`.
Starting and stopping it is stack.py's work.
"""

import base64
import os
import shlex
import shutil
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from cdc.errors import StackError
from cdc.model import jvm_options
from compose import health, versions
from compose.artifacts import Servers
from compose.machine import STATE_HINT, User, own, require_searchable, unprivileged
from compose.process import end_left, run
from compose.wheels import cache_version
from compose.written import Writer, of_snapshot

TEMPLATES = Path(__file__).parent / "conf"
FOLDERS = ("data", "conf", "log", "tmp")


@dataclass(frozen=True)
class Place:
    """Where a server runs: its folder, every port of the stack, the fetched parts and the Java to use."""

    home: Path
    ports: Mapping[str, int]
    parts: Servers
    java: Path

    @property
    def log(self) -> Path:
        return self.home / "log" / f"{self.home.name}.log"

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def conf(self) -> Path:
        return self.home / "conf"


class Server:
    """A server of the stack; a subclass says what is its own."""

    name: str
    extra_ports: tuple[str, ...] = ()
    after: str | None = None
    templates: tuple[str, ...] = ()
    stop_signal = signal.SIGTERM
    stop_deadline_s = 30.0
    refuses_root = False

    @property
    def port_names(self) -> tuple[str, ...]:
        """Return the names of its ports, the one that clients use first."""
        return (self.name, *self.extra_ports)

    def user(self) -> User | None:
        """Return the account to run as; None means the caller's own."""
        return unprivileged() if self.refuses_root else None

    def prepare(self, place: Place) -> None:
        """Lay folders and settings; first start: create the data."""
        for name in FOLDERS:
            (place.home / name).mkdir(parents=True, exist_ok=True)
        for folder in (place.home.parent, place.home):
            folder.chmod(0o755)
        for template in self.templates:
            text = Template((TEMPLATES / template).read_text()).substitute(self.settings(place))
            (place.conf / template.removeprefix(f"{self.name}.")).write_text(text)
        if self.refuses_root:
            require_searchable(place.home, STATE_HINT)
            own(place.home, self.user())
        self.create(place)

    def create(self, place: Place) -> None:
        """Create the data, when this is the first start."""

    def settings(self, place: Place) -> dict[str, object]:
        """Return what the templates may use."""
        ports = {name.replace("-", "_"): port for name, port in place.ports.items()}
        return {**ports, "home": place.home, "plugins": place.parts.plugins}

    def command(self, place: Place) -> list[str | Path]:
        """Return the command line."""
        raise NotImplementedError

    def environment(self, place: Place) -> dict[str, str]:
        """Return the whole environment; the caller's could change what a server does (PGDATA, CLASSPATH)."""
        tmp = str(place.home / "tmp")
        return {"PATH": os.defpath, "HOME": tmp, "TMPDIR": tmp, "LANG": "C.UTF-8", "TZ": "UTC"}

    def ready(self, ports: Mapping[str, int]) -> bool:
        """Tell whether the server answers a real request."""
        raise NotImplementedError

    def writer(self, place: Place) -> Writer | None:  # noqa: ARG002
        """Return what is going to write this server's data; None for one that keeps none."""
        return None

    def wrote(self, place: Place) -> Writer | None:  # noqa: ARG002
        """Return what the data itself says of who wrote it, for a state from before that was noted."""
        return None

    def run(self, place: Place, *command: str | Path) -> None:
        """Run a preparing command as the server's user."""
        status = run(command, home=place.home, log=place.log, env=self.environment(place), user=self.user())
        if status != 0:
            raise StackError(
                f"{self.name}: {Path(command[0]).name} ended with status {status}\n" + health.last_lines(place.log),
                hint=f"the whole log: {place.log}",
                service=self.name,
            )


class Postgres(Server):
    name = "postgres"
    templates = ("postgres.postgresql.conf",)
    stop_signal = signal.SIGINT  # "fast": SIGTERM would wait for every client to leave
    refuses_root = True

    def create(self, place: Place) -> None:
        end_left(place.data, place.parts.postgres_bin / "postgres")
        if place.data.joinpath("PG_VERSION").exists():
            return
        fresh = place.home / "tmp" / "initdb"
        shutil.rmtree(fresh, ignore_errors=True)
        self.run(
            place,
            place.parts.postgres_bin / "initdb",
            *("-D", fresh, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-instructions"),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        )
        # An interrupted initdb leaves half a cluster, which a rename never shows.
        place.data.rmdir()
        fresh.rename(place.data)

    def command(self, place: Place) -> list[str | Path]:
        config = place.conf / "postgresql.conf"
        return [place.parts.postgres_bin / "postgres", "-D", place.data, "-c", f"config_file={config}"]

    def ready(self, ports: Mapping[str, int]) -> bool:
        return health.postgres(ports[self.name])

    def writer(self, place: Place) -> Writer | None:  # noqa: ARG002
        return Writer("Postgres", versions.POSTGRES)

    def wrote(self, place: Place) -> Writer | None:
        version = place.data / "PG_VERSION"
        return Writer("Postgres", version.read_text().strip()) if version.exists() else None


class JavaServer(Server):
    """What Kafka and Connect share: a class path, a main class and a quiet log."""

    main: str
    heap: tuple[str, ...]
    stop_deadline_s = 60.0

    def jars(self, parts: Servers) -> Path:
        """Return the folder of its class path."""
        raise NotImplementedError

    def jvm(self, place: Place) -> list[str | Path]:
        """Return java with the options of a small server that leaves nothing outside its folder."""
        return [
            place.java,
            *jvm_options.caller_options(),
            *jvm_options.default_options(),
            *("-Xms128m", *self.heap, "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData", "-Duser.timezone=UTC"),
            *("-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true"),
            f"-Djava.io.tmpdir={place.home / 'tmp'}",
            f"-Dlog4j2.configurationFile={place.conf / 'log4j2.properties'}",
            *("-cp", f"{self.jars(place.parts)}/*"),
        ]

    def command(self, place: Place) -> list[str | Path]:
        return [*self.jvm(place), self.main, place.conf / "server.properties"]


class Kafka(JavaServer):
    name = "kafka"
    extra_ports = ("kafka-controller",)
    templates = ("kafka.server.properties", "kafka.log4j2.properties")
    main = "kafka.Kafka"
    heap = ("-Xmx512m",)

    def jars(self, parts: Servers) -> Path:
        return parts.kafka_jars

    def create(self, place: Place) -> None:
        if place.data.joinpath("meta.properties").exists():
            return
        shutil.rmtree(place.data)
        place.data.mkdir()
        cluster = "c" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
        self.run(
            place,
            *(*self.jvm(place), "kafka.tools.StorageTool", "format", "--standalone"),
            *("-t", cluster, "-c", place.conf / "server.properties"),
        )

    def ready(self, ports: Mapping[str, int]) -> bool:
        return health.kafka(ports[self.name])

    def writer(self, place: Place) -> Writer | None:  # noqa: ARG002
        return Writer("Kafka", versions.KAFKA)


class Connect(JavaServer):
    name = "connect"
    after = "kafka"
    templates = ("connect.server.properties", "connect.log4j2.properties")
    main = "org.apache.kafka.connect.cli.ConnectDistributed"
    # Records die young, unless too little is set aside for them: it collected for a third of its time.
    heap = ("-Xmx768m", "-Xmn450m")

    def jars(self, parts: Servers) -> Path:
        return parts.connect_jars

    def ready(self, ports: Mapping[str, int]) -> bool:
        return health.connect(ports[self.name])


class Elasticsearch(Server):
    name = "elasticsearch"
    extra_ports = ("elasticsearch-transport",)
    templates = (
        "elasticsearch.elasticsearch.yml",
        "elasticsearch.jvm.options",
        "elasticsearch.log4j2.properties",
    )
    refuses_root = True
    stop_deadline_s = 60.0

    def command(self, place: Place) -> list[str | Path]:
        return [place.parts.elasticsearch / "bin" / "elasticsearch"]

    def environment(self, place: Place) -> dict[str, str]:
        tmp = place.home / "tmp"
        return {
            **super().environment(place),
            # The start script's own Java would leave files in the system's folder and in the user's home.
            "CLI_JAVA_OPTS": f"-Djava.io.tmpdir={tmp} -Djna.tmpdir={tmp} -XX:-UsePerfData",
            "ES_JAVA_OPTS": shlex.join(jvm_options.caller_options()),
            "ES_JAVA_HOME": str(place.java.parent.parent),
            "ES_PATH_CONF": str(place.conf),
            "ES_TMPDIR": str(tmp),
        }

    def ready(self, ports: Mapping[str, int]) -> bool:
        return health.elasticsearch(ports[self.name])

    def writer(self, place: Place) -> Writer | None:  # noqa: ARG002
        return Writer("Elasticsearch", versions.ELASTICSEARCH)


class Redis(Server):
    name = "redis"
    templates = ("redis.redis.conf",)

    def command(self, place: Place) -> list[str | Path]:
        return [place.parts.redis_server, place.conf / "redis.conf"]

    def ready(self, ports: Mapping[str, int]) -> bool:
        return health.redis(ports[self.name])

    def writer(self, place: Place) -> Writer | None:
        # What the program says of itself: it may be the machine's own.
        return cache_version(place.parts.redis_server)

    def wrote(self, place: Place) -> Writer | None:
        for snapshot in place.data.glob("appendonlydir/*.base.rdb"):
            with snapshot.open("rb") as file:
                return of_snapshot(file.read(256))
        return None


# In the order of starting; stopped in reverse.
ALL: tuple[Server, ...] = (Postgres(), Kafka(), Elasticsearch(), Redis(), Connect())
BY_NAME: Mapping[str, Server] = {server.name: server for server in ALL}
