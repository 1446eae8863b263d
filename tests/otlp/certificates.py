"""Certificates for tests: two authorities that don't know each other, and what they issued, each a PEM
file."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


class Certificates:
    """Files in a directory: ``ca.pem``, ``other-ca.pem``, and for each of `issue` its certificate and key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._authorities = {"ca": trustme.CA(), "other-ca": trustme.CA()}
        for name, authority in self._authorities.items():
            authority.cert_pem.write_to_path(str(directory / f"{name}.pem"))

    def authority(self, name: str = "ca") -> str:
        """Return the path of the certificate of 'ca' or 'other-ca'."""
        return str(self._directory / f"{name}.pem")

    def issue(self, name: str, identity: str = "127.0.0.1", by: str = "ca", days: int = 1) -> tuple[str, str]:
        """Return the paths of a new certificate and its key; it expires in `days`, negative for in the
        past."""
        now = datetime.datetime.now(datetime.timezone.utc)
        begin = now - datetime.timedelta(days=30)
        made = self._authorities[by].issue_cert(
            identity, not_before=begin, not_after=now + datetime.timedelta(days=days)
        )
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(str(certificate))
        made.private_key_pem.write_to_path(str(key))
        return str(certificate), str(key)

    def encrypted(self, name: str) -> str:
        """Return the path of the key of `name`, encrypted by a password."""
        key = serialization.load_pem_private_key((self._directory / f"{name}.key").read_bytes(), None)
        path = self._directory / f"{name}-encrypted.key"
        form = serialization.PrivateFormat.PKCS8
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"password")
            )
        )
        return str(path)
