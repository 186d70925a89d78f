"""Certificates and keys: an authority of one's own, the server's certificate, and a key pair for each site."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbayes import files
from fedbayes.errors import UserError

DAYS = 365  # how long a certificate is good for
SECRET = 0o600  # the mode of a file that only its owner may read


def make_certificates(folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1"), days: int = DAYS) -> None:
    """ca.crt, which every site gets, and server.pem and server.key, which the server keeps."""
    x509, hashes, serialization, ec = _cryptography()
    files.make_folder(folder)
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    def builder(subject: str, public: Any) -> Any:
        base = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("fedbayes authority"))
        base = base.public_key(public).serial_number(x509.random_serial_number())
        return base.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=days))

    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = builder("fedbayes authority", ca_key.public_key()).add_extension(constraints, critical=True)
    names = x509.SubjectAlternativeName([_alternative(x509, host) for host in hosts])
    server = builder(hosts[0], key.public_key()).add_extension(names, critical=False)
    pem = serialization.Encoding.PEM
    files.write(folder / "ca.crt", ca.sign(ca_key, hashes.SHA384()).public_bytes(pem))
    files.write(folder / "server.pem", server.sign(ca_key, hashes.SHA384()).public_bytes(pem))
    files.write(folder / "server.key", _private(serialization, key, serialization.PrivateFormat.PKCS8), SECRET)


def make_key(path: Path) -> None:
    """A site's key pair: `path`, which stays at the site, and `path`.pub, which the server registers."""
    _, _, serialization, ec = _cryptography()
    files.make_folder(path.parent)
    key = ec.generate_private_key(ec.SECP384R1())
    files.write(path, _private(serialization, key, serialization.PrivateFormat.OpenSSH), SECRET)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    files.write(path.with_name(path.name + ".pub"), public + b"\n")


def _private(serialization: Any, key: Any, form: Any) -> bytes:
    content: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return content


def _alternative(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError("deployment needs Flower, which is not installed; pip install 'fedbayes[flower]'") from None
    return x509, hashes, serialization, ec
