"""How every channel to a daemon is opened: what gRPC does by default is meant for services across the internet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import grpc

from tqclient import limits

Options: TypeAlias = Sequence[tuple[str, Any]]

DIALING: Final = (
    # The daemons are on the job's own network. A proxy that the environment names for the rest of the world does not
    # reach them, or would carry every byte.
    ("grpc.enable_http_proxy", 0),
    # A daemon that was moved has its name lead elsewhere; by default that is looked at twice a minute at most, and
    # every session would have ended by then.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A stopped daemon keeps its sockets open: only an unanswered ping tells.
    ("grpc.keepalive_time_ms", limits.KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Operations try again by themselves, and know what may be repeated. With gRPC's own retries, moreover, a stream
    # that begins as its connection ends never ends itself, whatever its timeout (seen from grpcio 1.74 to 1.85).
    ("grpc.enable_retries", 0),
    # Who closes a channel closes its connection; otherwise channels to one address share theirs.
    ("grpc.use_local_subchannel_pool", 1),
)


def dial(address: str, credentials: grpc.ChannelCredentials | None = None, options: Options = ()) -> grpc.Channel:
    """Opens a blocking channel.

    Args:
        address: `host:port`.
        credentials: None speaks plain text.
        options: beside DIALING.
    """
    if credentials is None:
        return grpc.insecure_channel(address, options=(*DIALING, *options))
    return grpc.secure_channel(address, credentials, options=(*DIALING, *options))


def dial_aio(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Options = (),
    interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
) -> grpc.aio.Channel:
    """Opens an asyncio channel, within its event loop; see `dial`."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=(*DIALING, *options), interceptors=interceptors)
    return grpc.aio.secure_channel(address, credentials, options=(*DIALING, *options), interceptors=interceptors)
