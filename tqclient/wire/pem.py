"""Certificates and keys, looked at before gRPC reads them: of bad ones it says little, or aborts the process."""

from __future__ import annotations

import os
import ssl
from typing import TypeAlias

from tqclient.errors import InvalidArgument

_Path: TypeAlias = "str | os.PathLike[str]"


def check_certificates(path: _Path, name: str) -> None:
    """Requires at least one certificate in a file.

    Args:
        path: of the file, PEM.
        name: of the option, for the error.

    Raises:
        InvalidArgument: there is none, or the file cannot be read. Of none, gRPC would make the system's roots.
    """
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError:
        raise InvalidArgument(f"{name} {path}: no PEM certificate in it") from None
    except OSError as error:
        raise InvalidArgument(f"{name} {path}: {error.strerror}") from None


def check_pair(cert: _Path, key: _Path, names: tuple[str, str]) -> None:
    """Requires a certificate chain and its private key.

    Args:
        cert: path of the chain, PEM.
        key: path of the key, PEM.
        names: of the two options, for the error.

    Raises:
        InvalidArgument: one is not there, or they do not belong together.
    """
    check_certificates(cert, names[0])
    try:
        _context().load_cert_chain(cert, key, password="")  # without one, it would ask the terminal
    except ssl.SSLError as error:
        wrong = "it is not that of " if error.reason == "KEY_VALUES_MISMATCH" else "no PEM key, unencrypted, for "
        raise InvalidArgument(f"{names[1]} {key}: {wrong}{names[0]} {cert}") from None
    except OSError as error:
        raise InvalidArgument(f"{names[1]} {key}: {error.strerror}") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong they must be is gRPC's affair
    return context
