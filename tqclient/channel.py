"""Channels to the daemons: keepalive, message sizes, TLS and the token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tqclient import limits
from tqclient.errors import InvalidArgument
from tqclient.lane import AnyLane, Methods
from tqclient.operations.effects import CLOSED, CONTROLLER
from tqclient.renewal import RenewedAioChannel, RenewedChannel
from tqclient.wire.dialing import dial, dial_aio
from tqclient.wire.pem import check_certificates, check_pair
from tqclient.wire.v1 import controller_pb2, storage_pb2
from tqclient.wire.v1.controller_pb2_grpc import ControllerStub
from tqclient.wire.v1.storage_pb2_grpc import StorageStub

OPTIONS: Final = (
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.keepalive_permit_without_calls", 1),
)

FORMER_SECONDS: Final = 30.0
"""Between two looks for channels to where no daemon is any more; one is given up by the second that finds it so."""


@dataclass(frozen=True, slots=True)
class TLS:
    """Files for an encrypted connection, PEM each; read again when they change.

    Attributes:
        ca: roots that sign the daemons' certificates; None takes the system's.
        cert: this client's chain, where the daemons ask for one; with `key`.
        key: this client's private key.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, file in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if file is not None and not isinstance(file, str | os.PathLike):
                raise InvalidArgument(f"TLS: {name}={file!r:.80}: expected the path of a file")
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("TLS(cert=..., key=...) go together; one of them is missing")

    @classmethod
    def from_environment(cls) -> TLS | None:
        """Returns what TQ_TLS_CA, TQ_TLS_CERT and TQ_TLS_KEY name; None when none is set."""
        files = [os.environ.get(f"TQ_TLS_{name}") or None for name in ("CA", "CERT", "KEY")]
        return cls(*files) if any(files) else None

    def files(self) -> list[str | os.PathLike[str]]:
        """Returns those that there are; `credentials` reads them."""
        return [file for file in (self.ca, self.cert, self.key) if file]

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files.

        Raises:
            InvalidArgument: one cannot be read, or holds something else.
        """
        try:
            if self.ca:
                check_certificates(self.ca, "TLS: ca")
            if self.cert and self.key:
                check_pair(self.cert, self.key, ("TLS: cert", "TLS: key"))
            ca, cert, key = (Path(file).read_bytes() if file else None for file in (self.ca, self.cert, self.key))
        except InvalidArgument:
            raise
        except (OSError, ValueError, TypeError) as error:  # the last two of what is no path
            raise InvalidArgument(f"TLS: {error}") from None
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the daemons.

    Attributes:
        address: `host:port` of the controller.
        token: bearer token; None sends none.
        tls: None speaks plain text.
    """

    address: str
    token: str | None = None
    tls: TLS | None = None

    def __repr__(self) -> str:
        return f"Access(address={self.address!r}, token={'set' if self.token else None}, tls={self.tls!r})"

    def channel(self, address: str) -> Any:
        """Opens a blocking channel."""
        return self._followed(RenewedChannel, lambda: self._open(address))

    def aio_channel(self, address: str) -> Any:
        """Opens an asyncio channel; within its event loop."""
        return self._followed(RenewedAioChannel, lambda: self._open_aio(address))

    def _followed(self, renewed: type[RenewedChannel], open_channel: Callable[[], Any]) -> Any:
        """Opens a channel, which is opened anew when the files of TLS change."""
        files = self.tls.files() if self.tls is not None else []
        return renewed(files, open_channel) if files else open_channel()

    def _open(self, address: str) -> grpc.Channel:
        channel = dial(address, self.tls.credentials() if self.tls else None, OPTIONS)
        return grpc.intercept_channel(channel, _BearerToken(self.token)) if self.token else channel

    def _open_aio(self, address: str) -> Any:
        interceptors = _aio_interceptors(self.token) if self.token else None
        return dial_aio(address, self.tls.credentials() if self.tls else None, OPTIONS, interceptors)


class Channels:
    """One channel per daemon, opened when first needed; implements `driver.Stubs`. Safe to use from many threads.

    Args:
        address: of the controller.
        open_channel: `Access.channel` or `Access.aio_channel`.
        lane: `Lane`, or `AioLane`: daemons of this host are called by theirs; None: over gRPC as well.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        open_channel: Callable[[str], Any],
        *,
        lane: Callable[[Any], AnyLane] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = address
        self._open = open_channel
        self._lane = lane
        self._clock = clock
        self._lanes: dict[str, AnyLane] = {}
        self._lock = threading.Lock()
        self._channels: dict[str, Any] = {}
        self._stubs: dict[str, Any] = {}
        self._former: set[str] = set()
        self._look_at = clock() + FORMER_SECONDS
        self._closed = False

    def channel(self, address: str) -> Any:
        """Returns the channel to an address.

        Raises:
            InvalidArgument: `take_all` was called: the client is closed.
        """
        with self._lock:
            return self._channel(address)

    def _channel(self, address: str) -> Any:
        if self._closed:
            raise InvalidArgument(CLOSED)
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return self._channels[address]

    def stub(self, target: str) -> Any:
        """Returns the stub of the controller or of a storage node."""
        stub = self._stubs.get(target)
        if stub is None:
            address = self._controller if target == CONTROLLER else target
            with self._lock:  # the channel must not be given up before its stub is there to go with it
                stub = self._stubs[target] = self._made(target, address, self._channel(address))
        return stub

    def _made(self, target: str, address: str, channel: Any) -> Any:
        kind, proto = (ControllerStub, controller_pb2) if target == CONTROLLER else (StorageStub, storage_pb2)
        stub = kind(channel)
        if self._lane is None:
            return stub
        service = proto.DESCRIPTOR.services_by_name["Controller" if target == CONTROLLER else "Storage"]
        if address not in self._lanes:
            self._lanes[address] = self._lane(channel)
        return Methods(stub, service, self._lanes[address])

    def take_former(self, nodes: Iterable[controller_pb2.Node]) -> list[Any]:
        """Gives up the ways to where storage nodes were before; returns the channels and lanes, to be closed.

        What was called there `FORMER_SECONDS` ago has failed by now: nodes move when they are started anew.

        Args:
            nodes: all that there are.
        """
        if self._clock() < self._look_at:
            return []
        with self._lock:
            self._look_at = self._clock() + FORMER_SECONDS
            unknown = self._channels.keys() - {self._controller, *(node.address for node in nodes)}
            given_up, self._former = unknown & self._former, unknown - self._former
            for address in given_up:
                self._stubs.pop(address, None)
            lanes = [self._lanes.pop(address) for address in given_up if address in self._lanes]
            return [*lanes, *(self._channels.pop(address) for address in given_up)]

    def take_all(self) -> list[Any]:
        """Ends it; returns the channels and lanes that were open, to be closed. Calls under way may fail."""
        with self._lock:
            self._closed = True
            channels = [*self._lanes.values(), *self._channels.values()]
            self._channels.clear()
            self._stubs.clear()
        return channels


class _CallDetails(grpc.ClientCallDetails):  # type: ignore[misc,unused-ignore]
    """The details of a call with other metadata."""

    def __init__(self, details: Any, metadata: Any) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)


class _BearerToken(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc,unused-ignore]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc,unused-ignore]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc,unused-ignore]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc,unused-ignore]
):
    """Adds the token to every call of a blocking channel."""

    def __init__(self, token: str) -> None:
        self._entry = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(details, [*(details.metadata or ()), self._entry])


def _aio_interceptors(token: str) -> list[Any]:
    def with_token(details: Any) -> Any:
        metadata = details.metadata or grpc.aio.Metadata()
        metadata.add("authorization", f"Bearer {token}")
        return details._replace(metadata=metadata)

    # Two classes, as the channel takes an interceptor for one kind of call alone; no other kinds are made.
    class Bearer(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc,unused-ignore]
        """Adds the token to every unary call of an asyncio channel."""

        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(with_token(client_call_details), request)

    class StreamBearer(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc,unused-ignore]
        """Adds the token to every call that a stream answers."""

        async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(with_token(client_call_details), request)

    return [Bearer(), StreamBearer()]
