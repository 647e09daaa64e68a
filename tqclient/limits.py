"""Every bound that client and daemons share. The error that enforces one quotes it."""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

WIRE_VERSION: Final = 1
"""Of `proto/tq/v1`; raised when an older peer could not understand the messages."""

# Names and counts.
NAME_BYTES_MAX: Final = 512
"""UTF-8 bytes of a partition, consumer or field name, and of a key."""
FIELDS_MAX: Final = 1024
"""Fields of a partition."""
CONSUMERS_MAX: Final = 256
"""Consumers of a partition."""
RANKS_MAX: Final = 65_536
"""Of a topology, all dimensions multiplied: each rank is a process, and so many have a session at one time."""
REPLICAS_MAX: Final = 3
"""Storage nodes that hold one block."""
ROWS_PER_PUT_MAX: Final = 1 << 20
ROWS_PER_CLAIM_MAX: Final = 1 << 17
TAGS_BYTES_MAX: Final = 64 * KIB
"""Encoded tags of one sample."""
METADATA_BYTES_MAX: Final = 16 * MIB
"""Encoded partition-level values of one partition."""
ROW_LENGTH_MAX: Final = (1 << 32) - 2
"""Leading dimension of a row that a sampler can go by; a longer row has no length."""
PERMIT_SAMPLES_MAX: Final = 1 << 24
"""Samples that one permit is for."""
BLOCKS_PER_PUT_MAX: Final = 4096
BLOCK_BYTES_MAX: Final = 1 << 44
ERROR_IDS_MAX: Final = 256
"""Sample ids or rows that one error lists."""

# Messages.
MESSAGE_BYTES_MAX: Final = 64 * MIB
"""Of one gRPC message, either way."""
CHUNK_BYTES: Final = 1 * MIB
"""Payload bytes per message of a Write or Read stream."""

# gRPC servers shed load above these; see docs/decisions.
PENDING_REQUESTS_MAX: Final = 65_536
KEEPALIVE_MS: Final = 5_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000

# The arena.
EXTENT_ALIGN: Final = 256
"""Bytes; every window and every extent begins on a multiple of it."""
ARENA_LOCK_BASE: Final = 1 << 60
"""A mapped writer of session s holds an OFD write lock on byte ARENA_LOCK_BASE + s of the arena file."""

# Memory of a client process.
POOL_IDLE_BYTES_MAX: Final = 1 * GIB
"""Receive buffers kept warm for the next call; beyond it the ones that lay idle longest go back to the system."""
ARENA_WARM_BYTES_MAX: Final = 4 * GIB
"""Of each mapping of an arena, populated in the background; the rest is populated when it is used."""
POPULATE_BYTES: Final = 2 * MIB
"""Pages are populated, and remembered as populated, in pieces of this size."""

# Time, in seconds.
CALL_TIMEOUT: Final = 30.0
"""Default deadline of a call."""
BACKOFF_FIRST: Final = 0.02
BACKOFF_MAX: Final = 1.0
WAIT_MAX_MS: Final = 24 * 3600 * 1000
"""Longest wait on the server for room or samples."""
