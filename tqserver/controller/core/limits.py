"""Every bound of the controller's core that clients need not know. The error that enforces one quotes it."""

from __future__ import annotations

from typing import Final

PARTITIONS_MAX: Final = 65_536
SESSIONS_MAX: Final = 65_536
"""Live sessions."""
CLAIMS_PER_SESSION_MAX: Final = 4_096
PINS_PER_SESSION_MAX: Final = 65_536
"""Read pins that a session holds at one time."""
VIEWS_PER_CONSUMER_MAX: Final = 16
"""Field sets of one consumer whose readiness is tracked; another one displaces the least recently used."""
PROVISIONAL_CONSUMERS_MAX: Final = 16
"""Consumers of one partition that wait for their first claim and are tracked until then."""
REPLIES_PER_CLIENT_MAX: Final = 65_536
"""Recorded replies that a client has not settled."""
REPLY_BYTES_PER_CLIENT_MAX: Final = 64 << 20
"""Beyond it, the oldest replies are forgotten: their requests are refused when repeated, never applied twice."""
IDLE_CLIENTS_MAX: Final = 4_096
"""Clients without a live session whose replies are kept."""
RETIRED_WINDOWS_MAX: Final = 65_536
"""Windows without live extents that are remembered, so that none of their bytes can be committed again."""
EXTENT_END_MAX: Final = 1 << 62
"""Arena offset behind the last byte of an extent."""
DIRECTORY_BYTES_MAX: Final = 32 << 20
"""Of one block."""

CHECKED_COMMITS_MAX: Final = 64
"""Commits that stay unpacked between their check and their turn."""

ATTEMPTS_MAX: Final = 65_535
"""Largest max_attempts."""
REPLICAS_DEFAULT: Final = 1
MAX_ATTEMPTS_DEFAULT: Final = 5
LEASE_DEFAULT_MS: Final = 10_000
LEASE_MIN_MS: Final = 50
LEASE_MAX_MS: Final = 24 * 3600 * 1000

ROWS_FIRST: Final = 256
"""Rows that a partition's first arrays hold; they grow by doubling."""
COMPACT_ROWS_MIN: Final = 1_024
"""Fewer cleared rows than this are not worth a compaction."""
DUE_AGAIN_S: Final = 1.0
"""An overdue lease whose end was not applied is reported again after this time."""

ENDED_LEASES_MIN: Final = 1_024
"""Fewer leases than this are not worth looking for those among them that have ended."""

TAGS_DEPTH_MAX: Final = 64
"""Maps and lists within the tags of a sample."""

PIN_CHOSEN_MAX: Final = 1 << 40
"""Read pins below it are chosen by clients, the others drawn here."""
