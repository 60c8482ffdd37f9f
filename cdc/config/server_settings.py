"""Settings of servers: how clients log in."""

import ssl
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    SecretStr,
    ValidationInfo,
    model_validator,
)

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Section
from cdc.errors import SecretUnreadable
from cdc.model.login import Login, ssl_context


def _file(path: str, info: ValidationInfo) -> str:
    """The path of a file; a relative one is the pipeline file's."""
    folder = (info.context or {}).get("folder")
    full = Path(folder, Path(path).expanduser()) if folder else Path(path)
    if not full.is_file():
        raise InvalidSetting(
            "names no file that is there", "the path of a file in PEM, the same on Spark's workers"
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
        login = Login(
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            key_password=secret(self.key_password),
        )
        try:
            ssl_context(Login(ca=self.ca))
        except (OSError, ssl.SSLError):
            raise InvalidSetting(
                "holds no certificates in PEM, or can't be read", "openssl x509 -in FILE", ("ca",)
            ) from None
        try:
            ssl_context(login)
        except (OSError, ssl.SSLError, SecretUnreadable):
            raise InvalidSetting(
                "can't be read, or its key is another one's or has another password",
                "check both files and key_password: openssl x509 -in FILE; openssl pkey -in FILE",
                ("certificate",),
            ) from None
        return self


def secret(value: SecretStr | None) -> str | None:
    """What a setting holds that is hidden."""
    return value.get_secret_value() if value else None
