"""What is no certificate or key is refused by name: of an empty file, gRPC makes the system's roots, or it aborts."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import tqclient as tq
from tqclient.errors import InvalidArgument
from tqclient.wire.pem import check_certificates, check_pair

NAMES = ("tls_cert", "tls_key")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A certificate, its key, the same one with a passphrase, another key; and files that are none."""
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tq test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    built = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    plain, locked = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "cert").write_bytes(built.sign(key, hashes.SHA256()).public_bytes(pem))
    (tmp_path / "key").write_bytes(key.private_bytes(pem, pkcs8, plain))
    (tmp_path / "locked").write_bytes(key.private_bytes(pem, pkcs8, locked))
    (tmp_path / "other").write_bytes(other.private_bytes(pem, pkcs8, plain))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "garbage").write_bytes(b"garbage\xff\n")
    (tmp_path / "directory").mkdir()
    return tmp_path


def test_a_certificate_and_its_key(folder: Path) -> None:
    check_certificates(folder / "cert", "tls_ca")
    check_pair(folder / "cert", folder / "key", NAMES)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("absent", "No such file"),
        ("directory", "Is a directory"),
        ("empty", "no PEM certificate in it"),
        ("garbage", "no PEM certificate in it"),
        ("key", "no PEM certificate in it"),
    ],
)
def test_what_is_no_certificate(folder: Path, file: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"tls_ca .*{file}: {reason}"):
        check_certificates(folder / file, "tls_ca")
    with pytest.raises(InvalidArgument, match=rf"tls_cert .*{file}: {reason}"):
        check_pair(folder / file, folder / "key", NAMES)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("absent", "No such file"),
        ("directory", "Is a directory"),
        ("empty", "no PEM key, unencrypted, for tls_cert .*cert"),
        ("garbage", "no PEM key, unencrypted, for tls_cert .*cert"),
        ("locked", "no PEM key, unencrypted, for tls_cert .*cert"),
        ("other", "it is not that of tls_cert .*cert"),
    ],
)
def test_what_is_not_its_key(folder: Path, file: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"tls_key .*{file}: {reason}"):
        check_pair(folder / "cert", folder / file, NAMES)


@pytest.mark.parametrize(
    "files", [{"ca": "empty"}, {"ca": "garbage"}, {"ca": "cert", "cert": "cert", "key": "empty"}], ids=str
)
def test_a_client_is_told_before_it_calls(folder: Path, files: dict[str, str]) -> None:
    tls = tq.TLS(**{name: folder / file for name, file in files.items()})
    with pytest.raises(InvalidArgument, match=r"TLS: .*: no PEM"):
        tq.connect("127.0.0.1:1", tls=tls, timeout=0)
