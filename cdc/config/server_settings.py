"""Settings of Kafka and of Kafka Connect: their addresses, and how clients log in."""

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Section, Web
from cdc.errors import SecretUnreadable
from cdc.model import secrets
from cdc.model.login import Address, Login


def _file(path: str, info: ValidationInfo) -> str:
    """The path of a file; a relative one is the pipeline file's."""
    folder = (info.context or {}).get("folder")
    full = Path(folder, Path(path).expanduser()) if folder else Path(path)
    if not full.is_file():
        raise InvalidSetting(
            "is not an existing file",
            "write the path of a PEM file; Spark's workers need it under the same path",
        )
    return str(full)


File = Annotated[str, AfterValidator(_file)]


class TlsSettings(Section):
    """How a client trusts a server, and shows who it is."""

    ca: File | None = None
    """The certificates of the authorities to trust, a file in PEM: the system's own when None."""
    certificate: File | None = None
    """The client's certificate with its chain, a file in PEM."""
    key: File | None = None
    """The key of the client's certificate, a file in PEM (PKCS#8)."""
    key_password: SecretStr | None = None
    """The password of that key."""

    @model_validator(mode="after")
    def _check_files(self) -> "TlsSettings":
        if (self.certificate is None) != (self.key is None):
            raise InvalidSetting("certificate and key go together", "name both files, or neither")
        # Not `ssl_context`, which reads the system's authorities where no file is named: a run reads
        # its pipeline file every few seconds.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError):
            raise InvalidSetting(
                "holds no certificates in PEM, or can't be read", "openssl x509 -in FILE", ("ca",)
            ) from None
        try:
            if self.certificate:
                password = secrets.read(secret(self.key_password) or "")
                context.load_cert_chain(self.certificate, self.key, password)
        except (OSError, ssl.SSLError, SecretUnreadable):
            raise InvalidSetting(
                "can't be read, doesn't match key, or key_password is wrong",
                "check both files and key_password: openssl x509 -in FILE; openssl pkey -in FILE",
                ("certificate",),
            ) from None
        return self

    @property
    def tls_login(self) -> Login:
        """How a client trusts the server and shows its certificate, without a user."""
        return Login(
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            key_password=secret(self.key_password),
        )


def secret(value: SecretStr | None) -> str | None:
    """What a setting holds that is hidden."""
    return value.get_secret_value() if value else None


class KafkaSettings(TlsSettings):
    """Kafka's brokers."""

    brokers: Annotated[
        str, BeforeValidator(lambda value: ",".join(value) if isinstance(value, list) else value)
    ] = Field(examples=["[kafka-1:9093, kafka-2:9093]"])
    """Some of the brokers, host:port, as a list or with commas between them."""
    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """The security protocol of their listener, in Kafka's words."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] | None = None
    """How clients log in: needed with SASL."""
    user: str | None = None
    """The user for PLAIN and SCRAM."""
    password: SecretStr | None = Field(default=None, examples=["${file:/run/secrets/kafka}"])
    """The password of the user."""
    token_url: Web | None = Field(default=None, examples=["https://login.example.com/oauth2/token"])
    """Where OAUTHBEARER gets tokens, by client credentials."""
    client_id: str | None = None
    """The client's id for OAUTHBEARER."""
    client_secret: SecretStr | None = None
    """The client's secret for OAUTHBEARER."""
    scope: str | None = None
    """The scope of the tokens, where their server needs one."""
    replication_factor: int | None = Field(default=None, ge=1, examples=[3])
    """How many copies the topics get that `register` makes: as many as the brokers' default when None."""
    min_insync_replicas: int | None = Field(default=None, ge=1, examples=[2])
    """How many copies have to have a record before it counts as written: the brokers' default when None."""

    @model_validator(mode="after")
    def _check_copies(self) -> "KafkaSettings":
        copies = self.replication_factor
        least = self.min_insync_replicas
        if copies and least and least >= copies > 1:
            raise InvalidSetting(
                "has to be less than replication_factor: nothing could be written while one copy is away",
                f"min_insync_replicas: {copies - 1}",
                ("min_insync_replicas",),
            )
        return self

    @model_validator(mode="after")
    def _check_login(self) -> "KafkaSettings":
        uses_sasl = self.protocol.startswith("SASL")
        if uses_sasl != (self.mechanism is not None):
            raise InvalidSetting(
                f"protocol {self.protocol} {'needs a mechanism' if uses_sasl else 'has no mechanism'}",
                "for example: {protocol: SASL_SSL, mechanism: SCRAM-SHA-512}",
            )
        if not self.protocol.endswith("SSL") and (self.ca or self.certificate):
            raise InvalidSetting(
                f"ca and certificate have no effect with protocol {self.protocol}",
                "write SSL or SASL_SSL, or take them out",
            )
        by_token = ("token_url", "client_id", "client_secret")
        by_password = ("user", "password")
        needed = by_token if self.mechanism == "OAUTHBEARER" else by_password
        for name in (*by_password, *by_token, "scope"):
            is_needed = self.mechanism is not None and name in needed
            is_given = getattr(self, name) is not None
            if is_needed and not is_given:
                raise InvalidSetting(f"mechanism {self.mechanism} needs {name}", f"add {name}")
            if is_given and not is_needed and not (name == "scope" and needed == by_token):
                condition = (
                    f"with mechanism {self.mechanism}" if uses_sasl else "without a mechanism"
                )
                raise InvalidSetting(
                    f"{name} has no effect {condition}",
                    f"take {name} out",
                )
        return self

    @property
    def address(self) -> Address:
        login = replace(
            self.tls_login,
            protocol=self.protocol,
            mechanism=self.mechanism,
            user=self.user,
            password=secret(self.password),
            token_url=self.token_url,
            client_id=self.client_id,
            client_secret=secret(self.client_secret),
            scope=self.scope,
        )
        return Address(self.brokers, login)


class ConnectSettings(TlsSettings):
    """Kafka Connect's REST interface."""

    url: Web = Field(examples=["https://connect:8083"])
    """The address of a worker."""
    user: str | None = None
    """The user, where the workers ask for one."""
    password: SecretStr | None = None
    """The password of the user."""
    token: SecretStr | None = Field(default=None, examples=["${file:/run/secrets/connect}"])
    """A bearer token, instead of a user."""

    @model_validator(mode="after")
    def _check_login(self) -> "ConnectSettings":
        if (self.user is None) != (self.password is None):
            raise InvalidSetting("user and password go together", "name both, or neither")
        if self.user is not None and self.token is not None:
            raise InvalidSetting("user and token exclude each other", "take one of them out")
        if (self.ca or self.certificate) and not self.url.startswith("https:"):
            raise InvalidSetting(
                "ca and certificate have no effect with http://",
                "write https:// in the url, or take them out",
                ("url",),
            )
        return self

    @property
    def address(self) -> Address:
        login = replace(
            self.tls_login,
            user=self.user,
            password=secret(self.password),
            token=secret(self.token),
        )
        return Address(self.url, login)


def _section(name: str) -> BeforeValidator:
    """A text is the section's main setting."""
    return BeforeValidator(lambda value: {name: value} if isinstance(value, str) else value)


Kafka = Annotated[KafkaSettings, _section("brokers")]
Connect = Annotated[ConnectSettings, _section("url")]
