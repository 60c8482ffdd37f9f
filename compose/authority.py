"""A certificate authority, and the files of servers and clients that it certifies. Certificates are valid
until 2038. The authority's key is kept nowhere.
"""

from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509 import load_pem_x509_certificate


class Authority:
    """ca: the file of its certificate, in PEM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = trustme.CA()
        self.ca = self._store("ca.pem", self._authority.cert_pem.bytes())

    def certify(
        self, name: str, *hosts: str, key_type: trustme.KeyType = trustme.KeyType.ECDSA
    ) -> tuple[Path, Path]:
        """Write a certificate with its chain, and its key; both are in `name.pem`, too. `name` is its
        common name.
        """
        issued = self._authority.issue_cert(*hosts, common_name=name, key_type=key_type)
        # Java reads no other form of a key in PEM.
        key = _key(issued).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
        self._store(f"{name}.pem", key + chain)
        return self._store(f"{name}.crt", chain), self._store(f"{name}.key", key)

    def write_stores(self, password: str, *hosts: str) -> None:
        """Write a certificate with its key as `server.p12`, and the authority's as `trusted.p12`: PKCS#12
        for a server that reads no PEM.
        """
        encryption = serialization.BestAvailableEncryption(password.encode())
        issued = self._authority.issue_cert(*hosts)
        own = load_pem_x509_certificate(issued.cert_chain_pems[0].bytes())
        ca = load_pem_x509_certificate(self._authority.cert_pem.bytes())
        server = pkcs12.serialize_key_and_certificates(
            b"server", _key(issued), own, None, encryption
        )
        trusted = pkcs12.serialize_java_truststore(
            [pkcs12.PKCS12Certificate(ca, b"ca")], encryption
        )
        self._store("server.p12", server)
        self._store("trusted.p12", trusted)

    def _store(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.touch(0o600)
        path.write_bytes(content)
        return path


def _key(issued: trustme.LeafCert) -> Any:
    return serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
