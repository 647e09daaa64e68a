"""Who may call a daemon: bearer tokens and TLS, both read from files and both rotated without a restart.

A token file holds one token a line; every line is accepted, so a rotation adds the new token, moves the clients over
and removes the old one. Certificates are read again when their files change, at the next handshake.

The health service answers without a token: a prober cannot send one, and learns nothing but "serving" or "not serving".
Everything else, reflection included, is refused before its handler, and before its request is read. With a client CA
the handshake itself refuses whoever has no certificate, a prober included.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tqclient.errors import InvalidArgument, Unauthenticated
from tqclient.wire.addresses import host_of, is_loopback
from tqclient.wire.pem import check_certificates, check_pair
from tqserver.boundary import abort_with

HEALTH_PREFIX: Final = "/grpc.health.v1.Health/"
RECHECK_S: Final = 1.0
"""How often a file is looked at for a change, at most."""
TOKEN_BYTES_MAX: Final = 4096

_log = logging.getLogger(__name__)


class WatchedFiles:
    """The contents of some files, read again when one of them changed.

    Args:
        files: option → path, read together.
        clock: monotonic seconds.

    Raises:
        InvalidArgument: one cannot be read; names its option.
    """

    def __init__(self, files: Mapping[str, Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(files.values())
        self._clock = clock
        self._checked = clock()
        for option, path in files.items():
            try:
                path.read_bytes()
            except OSError as error:
                raise InvalidArgument(f"{option} {path}: {error.strerror}") from None
        self._stamps = self._stat()
        self.contents = tuple(path.read_bytes() for path in self._paths)

    def _stat(self) -> list[tuple[int, int, int]]:
        stats = [path.stat() for path in self._paths]
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def changed(self) -> bool:
        """Reads the files again if one changed; what cannot be read leaves the former contents in force."""
        now = self._clock()
        if now - self._checked < RECHECK_S:
            return False
        self._checked = now
        try:
            stamps = self._stat()
            if stamps == self._stamps:
                return False
            self.contents = tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            _log.error("keeping the former contents of %s: %s", ", ".join(map(str, self._paths)), error)
            return False
        self._stamps = stamps
        _log.info("read %s again", ", ".join(map(str, self._paths)))
        return True


def parse_tokens(path: Path, content: bytes) -> list[bytes]:
    """Returns the tokens of a file, one a line.

    Args:
        path: of the file, for the error.
        content: of the file.

    Raises:
        InvalidArgument: no token in it, or one that is too long, or that no call can carry; it is not shown.
    """
    tokens = []
    for number, line in enumerate(content.splitlines(), start=1):
        token = line.strip()
        if len(token) > TOKEN_BYTES_MAX:
            raise InvalidArgument(f"token_file {path}: line {number} is longer than {TOKEN_BYTES_MAX} bytes")
        if not token.isascii() or not token.decode("ascii").isprintable():
            raise InvalidArgument(f"token_file {path}: line {number} is no token: expected printable ASCII")
        if token:
            tokens.append(token)
    if not tokens:
        raise InvalidArgument(f"token_file {path}: no token in it; write one token a line")
    return tokens


class TokenFile:
    """The tokens that a daemon accepts.

    Args:
        path: of the file, one token a line.

    Raises:
        InvalidArgument: see `parse_tokens`.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._files = WatchedFiles({"token_file": path}, clock)
        self._tokens = self._parse()

    def _parse(self) -> list[bytes]:
        return parse_tokens(self._path, self._files.contents[0])

    def accepts(self, offered: bytes) -> bool:
        """Says whether the token is one of the file's; takes the same time wherever the two differ."""
        if self._files.changed():
            try:
                self._tokens = self._parse()
            except InvalidArgument as error:
                _log.error("keeping the former tokens: %s", error)
        matches = [hmac.compare_digest(token, offered) for token in self._tokens]
        return any(matches)


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses calls without a valid `authorization: Bearer TOKEN` before any handler sees them."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)

    @staticmethod
    async def _refuse(_: Any, context: Any) -> None:
        await abort_with(context, Unauthenticated("no valid token: pass token=..., or set TQ_TOKEN"))

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Passes the call on, or answers it with UNAUTHENTICATED."""
        if not handler_call_details.method.startswith(HEALTH_PREFIX):
            offered = next((v for k, v in handler_call_details.invocation_metadata if k == "authorization"), "")
            raw = offered if isinstance(offered, bytes) else offered.encode()
            scheme, _, token = raw.partition(b" ")
            if scheme.lower() != b"bearer" or not self._tokens.accepts(token.strip()):
                return self._refusal  # a streaming handler: it answers without waiting for the request
        return await continuation(handler_call_details)


@dataclass(frozen=True, slots=True)
class Security:
    """What a daemon demands of its callers; empty: nothing.

    Attributes:
        token_file: of accepted tokens.
        tls_cert: PEM chain of the daemon; with `tls_key`.
        tls_key: PEM private key.
        tls_client_ca: PEM roots; callers must then show a certificate that they signed.
    """

    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidArgument("tls_cert and tls_key go together; one of them is missing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgument("tls_client_ca needs tls_cert and tls_key")

    @property
    def allows_lane(self) -> bool:
        """Whether clients of this host may call by the lane: a token is looked at with each call over gRPC, so that
        one can be revoked; a lane's connection has none.
        """
        return self.token_file is None

    def interceptors(self) -> list[TokenGate]:
        """Returns what stands in front of every handler."""
        return [TokenGate(TokenFile(self.token_file))] if self.token_file else []

    def credentials(self) -> grpc.ServerCredentials | None:
        """Returns TLS credentials that follow their files; None without TLS.

        Raises:
            InvalidArgument: a file cannot be read, or holds something else.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        roots = {"tls_client_ca": self.tls_client_ca} if self.tls_client_ca else {}
        files = WatchedFiles({"tls_cert": self.tls_cert, "tls_key": self.tls_key, **roots})
        self._check_certificates()

        def configuration() -> grpc.ServerCertificateConfiguration:
            chain, key, *ca = files.contents
            return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca[0] if ca else None)

        def fetch() -> Any:  # at each handshake; None keeps what is in force
            if not files.changed():
                return None
            try:
                self._check_certificates()
            except InvalidArgument as error:  # one of them was replaced, and the other not yet
                _log.error("keeping the former certificates: %s", error)
                return None
            return configuration()

        return grpc.dynamic_ssl_server_credentials(
            configuration(), fetch, require_client_authentication=self.tls_client_ca is not None
        )

    def _check_certificates(self) -> None:
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key, ("tls_cert", "tls_key"))
        if self.tls_client_ca is not None:
            check_certificates(self.tls_client_ca, "tls_client_ca")

    def warn(self, listen: str) -> None:
        """Logs what an open door means when the address is not a loopback one."""
        if not is_loopback(host_of(listen)) and self.token_file is None and self.tls_client_ca is None:
            _log.warning("%s is reachable from other machines, and no token or client certificate is asked for", listen)
