"""The servers of the embedded stack as a company runs them: each asks who its clients are, and gives a
pipeline's user the rights that the documentation lists, by the pipeline's name. `cdc up --secured`.

Certificates and passwords are made at the first start. They are files in the folder `secrets` of the
stack, which nobody but its owner reads; a password's file is named after the server that asks for it.
"""

import base64
import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import ssl
import sys
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc.compose import artifacts, servers
from cdc.compose.host import change_owner, unprivileged
from cdc.compose.servers import READY_S, Server, ServerDirs
from cdc.compose.versions import POSTGRES_WITH_TLS, ServerVersion
from cdc.errors import StackError

if TYPE_CHECKING:
    from kafka.admin import KafkaAdminClient

HOSTS = ("localhost", "127.0.0.1")
USER = "cdc"
"""The user of pipelines, at Kafka, Elasticsearch and the cache."""
PASSWORDS = ("postgres", "reader", "replication", "kafka", "connect", "elasticsearch", "redis")
"""Files with a password each. `reader` and `replication` are roles of Postgres, `connect` is the worker's
user at Kafka.
"""
OWN_PASSWORDS = ("redis-admin", "keystore")
"""Those of the servers' administration."""
LOGINS = "org.apache.kafka.common.security"
WORKER = "cdc-connect"
"""What the worker's topics and its group begin with."""


def make_secrets(folder: Path) -> None:
    """Write certificates and passwords, unless they are there."""
    from cdc.compose.authority import Authority

    if folder.exists():
        return
    fresh = folder.with_name("secrets.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    for name in (*PASSWORDS, *OWN_PASSWORDS):
        write_private(fresh / name, secrets.token_urlsafe(24))
    authority = Authority(fresh)
    authority.certify("server", *HOSTS)
    authority.certify("client", USER)
    authority.write_stores((fresh / "keystore").read_text(), *HOSTS)
    # Half of them is never there under this name.
    fresh.rename(folder)


def require_secrets(folder: Path) -> None:
    """Refuse to start servers whose secrets are gone: they accept no others. Raises StackError."""
    names = (*PASSWORDS, *OWN_PASSWORDS, "ca.pem", "server.pem", "client.pem")
    if missing := [name for name in names if not (folder / name).exists()]:
        lost = f"lacks {', '.join(missing)}" if folder.exists() else "is gone"
        raise StackError(
            f"{folder} {lost}: the servers were made with these secrets, and accept no others",
            hint="put them back from a copy; to start over: cdc -p FILE down --purge, then cdc -p FILE up --secured",
            path=str(folder),
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody but its owner reads."""
    path.touch(0o600)
    path.chmod(0o600)
    path.write_text(text)


def add(settings: Path, values: Mapping[str, object]) -> None:
    """Add lines to a file of settings in which the last value of a name counts. It may have passwords
    then.
    """
    lines = [f"{name} = {value}\n" for name, value in values.items()]
    write_private(settings, settings.read_text() + "".join(lines))


class Secured(Server):
    """A server with the secrets of its stack."""

    def __init__(self, folder: Path, pipeline: str) -> None:
        """pipeline: the name by which `grant` gives rights."""
        self.secrets = folder
        self.pipeline = pipeline

    def password(self, name: str) -> str:
        return (self.secrets / name).read_text()

    def context(self, certificate: str | None = None) -> ssl.SSLContext:
        """Return what a client of the servers trusts, and what it shows of itself."""
        context = ssl.create_default_context(cafile=str(self.secrets / "ca.pem"))
        if certificate:
            context.load_cert_chain(self.secrets / f"{certificate}.pem")
        return context


class Postgres(Secured, servers.Postgres):
    """Postgres with TLS. Everyone needs a password."""

    def programs(self) -> Path:
        machine = f"{sys.platform} on {platform.machine()}"
        if machine != "linux on x86_64":
            raise StackError(
                f"the Postgres with TLS of cdc up --secured is built for Linux on x86-64, and this is {machine}",
                hint="start the servers without TLS and passwords, with another state folder: cdc -p FILE up",
            )
        return artifacts.postgres_with_tls()

    def version(self) -> ServerVersion:
        return ServerVersion("Postgres", POSTGRES_WITH_TLS)

    def login(self, dirs: ServerDirs) -> list[str | Path]:
        file = dirs.home / "tmp" / "password"
        write_private(file, self.password("postgres"))
        change_owner(file, self.user())
        return ["-A", "scram-sha-256", "--pwfile", file]

    def create(self, dirs: ServerDirs) -> None:
        super().create(dirs)
        (dirs.home / "tmp" / "password").unlink(missing_ok=True)

    def secure(self, dirs: ServerDirs) -> None:
        for name in ("server.crt", "server.key"):
            write_private(dirs.conf / name, (self.secrets / name).read_text())
        (dirs.conf / "pg_hba.conf").write_text("hostssl all all all scram-sha-256\n")
        files = {
            "ssl_cert_file": "server.crt",
            "ssl_key_file": "server.key",
            "hba_file": "pg_hba.conf",
        }
        paths = {name: f"'{dirs.conf / file}'" for name, file in files.items()}
        add(dirs.conf / "postgresql.conf", {"ssl": "on", **paths})

    def address(self, ports: Mapping[str, int]) -> str:
        return (
            f"host=localhost port={ports[self.name]} user=postgres dbname=postgres"
            f" password={self.password('postgres')} sslmode=verify-full"
            f" sslrootcert='{self.secrets / 'ca.pem'}'"
        )

    def grant(self, ports: Mapping[str, int]) -> None:
        """Make the role `reader`, for the pipeline file's `source.reader`; `cdc migrate` gives it its
        rights.
        """
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.address(ports), autocommit=True) as connection:
            if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = 'reader'").fetchone():
                create = sql.SQL("CREATE ROLE reader LOGIN REPLICATION PASSWORD {}")
                connection.execute(create.format(self.password("reader")))


class Kafka(Secured, servers.Kafka):
    """Kafka with an authorizer. Pipelines and the worker log in with a password (SCRAM) over TLS; the
    broker itself and its administrator with the certificate of `server`.
    """

    extra_ports = (*servers.Kafka.extra_ports, "kafka-certified")

    def secure(self, dirs: ServerDirs) -> None:
        ports = {"SASL_SSL": "kafka", "SSL": "kafka-certified", "CONTROLLER": "kafka-controller"}
        address = {name: dirs.ports[port] for name, port in ports.items()}
        add(
            dirs.conf / "server.properties",
            {
                "listeners": _listeners("127.0.0.1", address),
                "advertised.listeners": _listeners("localhost", address),
                "listener.security.protocol.map": "SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:SSL",
                "inter.broker.listener.name": "SSL",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": self.secrets / "server.pem",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": self.secrets / "ca.pem",
                "ssl.principal.mapping.rules": "RULE:.*CN=([^,]*).*/$1/",
                "listener.name.ssl.ssl.client.auth": "required",
                "listener.name.controller.ssl.client.auth": "required",
                "listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-512",
                "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{LOGINS}.scram.ScramLoginModule required;",
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:server",
            },
        )

    def connect(self, ports: Mapping[str, int]) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", ports["kafka-certified"]), READY_S)
        return self.context("server").wrap_socket(plain, server_hostname="localhost")

    def grant(self, ports: Mapping[str, int]) -> None:
        """Set the passwords, and give by the names' beginnings what the documentation lists."""
        from kafka.admin import KafkaAdminClient, ScramMechanism, UserScramCredentialUpsertion

        admin = KafkaAdminClient(
            bootstrap_servers=f"localhost:{ports['kafka-certified']}",
            security_protocol="SSL",
            ssl_context=self.context("server"),
        )
        try:
            passwords = {USER: self.password("kafka"), "connect": self.password("connect")}
            scram = ScramMechanism.SCRAM_SHA_512
            logins = [
                UserScramCredentialUpsertion(user, scram, password)
                for user, password in passwords.items()
            ]
            answers = admin.alter_user_scram_credentials(logins)
            _require_done([answer for answer in answers.values() if answer])
            name = self.pipeline
            _allow(admin, USER, "TOPIC", name)
            _allow(admin, USER, "TRANSACTIONAL_ID", name)
            _allow(admin, "connect", "TOPIC", name, WORKER)
            _allow(admin, "connect", "GROUP", WORKER)
            _allow(
                admin,
                "connect",
                "TRANSACTIONAL_ID",
                *(name, f"{WORKER}-{name}", f"connect-cluster-{WORKER}"),
            )
            _allow(admin, "connect", "CLUSTER", "kafka-cluster")
        finally:
            admin.close()


def _listeners(host: str, ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://{host}:{port}" for name, port in ports.items())


def _allow(admin: "KafkaAdminClient", user: str, kind: str, *names: str) -> None:
    """Let a user do everything with what has names that begin so; the cluster it may only describe."""
    from kafka import admin as words

    whole = kind == "CLUSTER"
    pattern = words.ACLResourcePatternType["LITERAL" if whole else "PREFIXED"]
    operation = words.ACLOperation["DESCRIBE" if whole else "ALL"]
    allow = words.ACLPermissionType.ALLOW
    resources = [words.ResourcePattern(words.ResourceType[kind], name, pattern) for name in names]
    rules = [words.ACL(f"User:{user}", "*", operation, allow, resource) for resource in resources]
    _require_done(admin.create_acls(rules)["failed"])


def _require_done(refusals: Sequence[object]) -> None:
    if refusals:
        raise PermissionError("; ".join(map(str, refusals)))


class SecuredWeb(Secured, servers.WebServer):
    """A server with an interface by https."""

    certificate: str | None = None

    def connection(self, ports: Mapping[str, int]) -> HTTPConnection:
        context = self.context(self.certificate)
        return HTTPSConnection("localhost", ports[self.name], timeout=READY_S, context=context)


class Connect(SecuredWeb, servers.Connect):
    """A worker that logs in to Kafka as `connect`, and asks its own clients for a certificate."""

    certificate = "client"

    def secure(self, dirs: ServerDirs) -> None:
        store = self.password("keystore")
        https: dict[str, object] = {
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": self.secrets / "server.p12",
            "ssl.keystore.password": store,
            "ssl.key.password": store,
            "ssl.truststore.type": "PKCS12",
            "ssl.truststore.location": self.secrets / "trusted.p12",
            "ssl.truststore.password": store,
            "ssl.client.auth": "required",
            # The worker fails without it.
            "ssl.cipher.suites": "",
        }
        module = f"{LOGINS}.scram.ScramLoginModule"
        login: dict[str, object] = {
            "bootstrap.servers": f"localhost:{dirs.ports['kafka']}",
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.secrets / "ca.pem",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{module} required username="connect" password="{self.password("connect")}";',
        }
        add(
            dirs.conf / "server.properties",
            {
                "listeners": f"https://127.0.0.1:{dirs.ports[self.name]}",
                "rest.advertised.host.name": "localhost",
                **{f"listeners.https.{name}": value for name, value in https.items()},
                **{
                    f"{client}{name}": value
                    for client in ("", "producer.", "consumer.", "admin.")
                    for name, value in login.items()
                },
            },
        )


class Elasticsearch(SecuredWeb, servers.Elasticsearch):
    """Elasticsearch with TLS, and a user with a password."""

    def headers(self) -> dict[str, str]:
        login = f"{USER}:{self.password('elasticsearch')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(login).decode()}"}

    def secure(self, dirs: ServerDirs) -> None:
        path = dirs.conf / "elasticsearch.yml"
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("xpack.")]
        path.write_text("\n".join([*kept, ELASTICSEARCH_SETTINGS]))
        for name in ("server.crt", "server.key", "ca.pem"):
            write_private(dirs.conf / name, (self.secrets / name).read_text())
        hashed = hash_for_elasticsearch(self.password("elasticsearch"))
        write_private(dirs.conf / "users", f"{USER}:{hashed}\n")
        write_private(dirs.conf / "users_roles", f"{USER}:{USER}\n")
        self._write_rights(dirs.conf / "roles.yml")

    def grant(self, _: Mapping[str, int]) -> None:
        self._write_rights(self.secrets.parent / self.name / "conf" / "roles.yml")

    def _write_rights(self, path: Path) -> None:
        """Add the pipeline to those whose indices the user may use. A server that runs knows within
        seconds.
        """
        written = path.read_text() if path.exists() else ""
        try:
            known = json.loads(written)[USER]["indices"][0]["names"] if written else []
        except (ValueError, LookupError, TypeError) as error:
            raise StackError(
                f"{path} isn't as `cdc up` has written it: {error}",
                hint="put it back from a copy; to start over: cdc -p FILE down --purge, then cdc -p FILE up --secured",
            ) from error
        rights = json.dumps({USER: elasticsearch_rights(sorted({*known, f"{self.pipeline}-*"}))})
        if rights != written:
            fresh = path.with_suffix(".new")
            write_private(fresh, rights)
            change_owner(fresh, unprivileged())
            fresh.rename(path)


ELASTICSEARCH_SETTINGS = """
xpack.security.enabled: true
xpack.security.http.ssl: {enabled: true, key: server.key, certificate: server.crt}
xpack.security.transport.ssl:
  {enabled: true, verification_mode: certificate, key: server.key, certificate: server.crt,
   certificate_authorities: [ca.pem]}
resource.reload.interval.high: 1s
"""


def elasticsearch_rights(names: Iterable[str]) -> dict[str, Any]:
    """Return the rights that the documentation lists, as `roles.yml` has them. names: patterns of the
    pipelines' indices.
    """
    return {
        "cluster": ["monitor"],
        "indices": [
            {"names": list(names), "privileges": ["manage", "read", "write"]},
            {
                "names": ["cdc-position"],
                "privileges": ["create_index", "read", "view_index_metadata", "write"],
            },
        ],
    }


def hash_for_elasticsearch(password: str) -> str:
    """Hash a password as the file `users` takes it. The server's own command for it would show the
    password to everyone who lists processes.
    """
    salt = os.urandom(32)
    cost = 10_000
    key = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, cost, 32)
    texts = (base64.b64encode(part).decode() for part in (salt, key))
    return f"{{PBKDF2}}{cost}${'$'.join(texts)}"


class Redis(Secured, servers.Redis):
    """The cache's server with users. The wheel's Valkey has no TLS."""

    def secure(self, dirs: ServerDirs) -> None:
        users = dirs.conf / "users.acl"
        if not users.exists():
            admin = f"user admin on #{_sha256(self.password('redis-admin'))} ~* &* +@all"
            write_private(users, f"user default off\n{admin}\n")
        with (dirs.conf / "redis.conf").open("a") as settings:
            settings.write(f'aclfile "{users}"\n')

    def login(self) -> tuple[str | None, str | None]:
        return "admin", self.password("redis-admin")

    def grant(self, ports: Mapping[str, int]) -> None:
        from cdc.redis.server import COMMANDS, STATE_COMMANDS

        words = [f"+{command}" for command in f"{COMMANDS} {STATE_COMMANDS}".split()]
        password = f"#{_sha256(self.password('redis'))}"
        with self.client(ports) as client:
            client.execute_command(
                "ACL", "SETUSER", USER, "on", password, f"~{self.pipeline}:*", *words
            )
            client.execute_command("ACL", "SAVE")
        # Of a file that the server has written.
        (self.secrets.parent / self.name / "conf" / "users.acl").chmod(0o600)


def _sha256(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def make(folder: Path, pipeline: str) -> tuple[Server, ...]:
    """Return the servers in the order of starting. folder: of the secrets."""
    kinds = (Postgres, Kafka, Elasticsearch, Redis, Connect)
    return tuple(kind(folder, pipeline) for kind in kinds)
