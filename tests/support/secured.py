"""A Kafka for one test module that asks who its clients are: a listener with TLS and clients'
certificates, one with TLS and SASL, and one for the test itself.
"""

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from cdc.compose import artifacts, host, process
from cdc.compose.authority import Authority
from cdc.compose.secured import LOGINS
from cdc.compose.servers import Kafka, ServerDirs
from tests.support.wait import wait_until

START_S = 120
PASSWORD = 'p@ss "word\\'
SETTINGS = r"""
listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{kafka-controller},\
  TLS://127.0.0.1:{tls},LOGIN://127.0.0.1:{login}
advertised.listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{kafka-controller},\
  TLS://localhost:{tls},LOGIN://localhost:{login}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,TLS:SSL,LOGIN:SASL_SSL
inter.broker.listener.name=PLAINTEXT
ssl.keystore.type=PEM
ssl.keystore.location={folder}/broker.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
listener.name.tls.ssl.client.auth=required
listener.name.tls.ssl.principal.mapping.rules=RULE:.*CN=([^,]*).*/$1/
listener.name.login.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
listener.name.login.plain.sasl.jaas.config={logins}.plain.PlainLoginModule required user_shop={password};
listener.name.login.scram-sha-256.sasl.jaas.config={logins}.scram.ScramLoginModule required;
listener.name.login.scram-sha-512.sasl.jaas.config={logins}.scram.ScramLoginModule required;
listener.name.login.oauthbearer.sasl.jaas.config={logins}.oauthbearer.OAuthBearerLoginModule required;
listener.name.login.oauthbearer.sasl.server.callback.handler.class=\
  {logins}.oauthbearer.OAuthBearerValidatorCallbackHandler
listener.name.login.oauthbearer.sasl.oauthbearer.jwks.endpoint.url=file://{folder}/keys.json
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


class SecuredBroker:
    """`plain` is the test's own listener, where all is allowed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.certify("certified", "client")
        self.authority.certify("broker", "localhost")
        self._server = Kafka()
        names = (*self._server.port_names, "tls", "login")
        self.ports = host.choose_ports(names)
        self._dirs = ServerDirs(folder / Kafka.name, self.ports, artifacts.servers(), host.java())
        self.plain = f"127.0.0.1:{self.ports[Kafka.name]}"
        self.tls = f"localhost:{self.ports['tls']}"
        self.login = f"localhost:{self.ports['login']}"
        self._token_key = rsa.generate_private_key(65537, 2048)

    def token(self, user: str, lives_s: float = 3600) -> str:
        """A signed token that the broker takes."""
        now = time.time()
        claims = {"sub": user, "scope": "kafka", "iat": now, "exp": now + lives_s}
        parts = ({"alg": "RS256", "kid": "test"}, claims)
        text = ".".join(encoded(json.dumps(part).encode()) for part in parts)
        signature = self._token_key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{text}.{encoded(signature)}"

    def _write_token_keys(self) -> None:
        numbers = self._token_key.public_key().public_numbers()
        modulus = encoded(numbers.n.to_bytes(256))
        key = {"kty": "RSA", "kid": "test", "alg": "RS256", "n": modulus, "e": "AQAB"}
        (self.folder / "keys.json").write_text(json.dumps({"keys": [key]}))

    def start(self) -> None:
        self._server.prepare(self._dirs)
        self._write_token_keys()
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls=file://{self.folder}/keys.json"
        properties = self._dirs.conf / "server.properties"
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"').replace("\\", "\\\\")
        added = SETTINGS.format(
            **self.ports, logins=LOGINS, folder=self.folder, password=f'"{quoted}"'
        )
        names = {line.partition("=")[0] for line in added.splitlines()}
        kept = [
            line
            for line in properties.read_text().splitlines()
            if line.partition("=")[0] not in names
        ]
        properties.write_text("\n".join(kept) + added)
        self._running = process.spawn(
            self._server.command(self._dirs),
            home=self._dirs.home,
            log=self._dirs.log,
            env={**self._server.environment(self._dirs), "JAVA_TOOL_OPTIONS": allowed},
            user=None,
        )
        wait_until(lambda: self._server.ready(self.ports), START_S, "the broker")
        self._admin = AdminClient({"bootstrap.servers": self.plain, "log_level": 0})

    def kill(self) -> None:
        process.kill(self._running)

    def set_password(self, user: str, password: str) -> None:
        """For SCRAM."""
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credential = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(user, credential, password.encode())
            self._admin.alter_user_scram_credentials([change])[user].result()

    def allow(self, user: str, kind: str, prefix: str, operation: str = "ALL") -> None:
        """Let a user do this with what has names with this prefix."""
        rule = AclBinding(
            ResourceType[kind],
            prefix,
            ResourcePatternType.LITERAL if kind == "BROKER" else ResourcePatternType.PREFIXED,
            f"User:{user}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        self._admin.create_acls([rule])[rule].result()


@contextmanager
def secured_broker() -> Iterator[SecuredBroker]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-secured-"))
    broker = SecuredBroker(folder)
    try:
        broker.start()
        try:
            yield broker
        finally:
            broker.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
