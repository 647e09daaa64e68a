"""How every channel to a daemon is opened: what gRPC does by default is meant for services across the internet."""

from __future__ import annotations

from typing import Final

from tqclient import limits

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
    ("grpc.enable_retries", 0),  # operations try again by themselves, and know what may be repeated
)
