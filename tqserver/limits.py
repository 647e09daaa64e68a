"""Every bound that only the daemons know; those they share with clients are in `tqclient.limits`."""

from __future__ import annotations

from typing import Final

from tqclient.limits import GIB, KIB, MIB

# The arena.
ARENA_BYTES: Final = 1 * GIB
"""Default size of an arena."""
ARENA_BYTES_MIN: Final = 4 * MIB
SEGMENT_BYTES: Final = 64 * MIB
"""Default, and also the most that a partition takes at once ahead of its need."""
SEGMENTS_PER_SEGMENT: Final = 1024
"""A partition's first segment is this many times smaller; each further one doubles what the partition owns."""
SEGMENT_BYTES_MIN: Final = 4 * KIB
"""The smallest piece of the arena that belongs to one partition."""
WINDOWS_MAX: Final = 32_768
"""Rows of the arena's windows table: runs of bytes that are reserved and not sealed."""
WINDOWS_SPARE: Final = 8_192
"""Rows that Reserve leaves for windows which are cut in two when an extent in their middle is sealed."""
WINDOWS_PER_SESSION_MAX: Final = 8_192
"""Windows that one session may have open, so that others find rows left."""
ARENA_FIRST_BYTES: Final = 256 * MIB
"""Of a new arena, allocated before the node serves: about 25 ms. The rest follows in the background."""
ALLOCATE_STEP_BYTES: Final = 256 * MIB
"""Of that rest, allocated at a time and then handed to the allocator."""
PREFAULT_STEP_BYTES: Final = 16 * MIB
"""Bytes that one call populates; the mapping is locked against changes meanwhile."""
EXTENTS_PER_STEP: Final = 512
"""Extents that are sealed or freed at one time, of an order that may name millions: about 3 ms, and others go on."""

# Streams.
READ_RANGES_MAX: Final = 1 << 20
"""Ranges of one Read."""

# Time, in seconds.
WRITER_POLL: Final = 0.1
"""Between two looks at the locks of mapped writers."""
ARENA_POLL: Final = 1.0
"""Between two looks at whether the arena's file is still where clients are told that it is."""
USAGE_INTERVAL: Final = 0.2
"""Between two usage reports of a node whose usage changed."""
ALLOCATE_RETRY: Final = 5.0
"""Between two tries to allocate the rest of an arena when the file system has no room for it."""
SESSION_WAIT: Final = 1.0
"""How long Reserve waits for word of a session that the controller has only just opened."""
LINK_BACKOFF_MAX: Final = 0.5
"""Longest pause between two tries to reach the controller."""

# The transfer engine beside a storage node.
ENGINE_START: Final = 120.0
"""Longest start of an engine; over RDMA it pins every page of the arena."""
ENGINE_BACKOFF_FIRST: Final = 0.1
ENGINE_BACKOFF_MAX: Final = 10.0
"""Longest pause between two starts of an engine that keeps failing."""
ENGINE_STEADY: Final = 10.0
"""An engine that ran for so long and died is started again at once."""
ENGINE_POLL: Final = 0.1
"""Between two looks at how long windows have been quarantined."""
ENGINE_GONE_WAIT: Final = 5.0
"""How long a node that starts waits for the engine of its former life to be gone."""
ENGINE_GONE_POLL: Final = 0.005
ENGINE_LOG_LINES: Final = 20
"""Of what an engine wrote, kept to explain its end."""
ENGINE_LINE_BYTES_MAX: Final = 64 * KIB
"""Of one line that an engine writes."""
ENGINE_PORTS: Final = (15_000, 17_000)
"""What the library draws an engine's two ports from by default."""
ENGINE_PORTS_MIN: Final = 8
"""Ports to draw from: two engines run side by side while one replaces the other."""
SEGMENTS_REMEMBERED_MAX: Final = 64
"""Engines before the present one whose address a new one may not have: peers would take it for theirs."""
GATHER_CONNECTIONS_MAX: Final = 256
"""Connections that gather at one engine; each has a thread."""
GATHER_ACCEPT_PAUSE: Final = 0.05
"""After an accept that the kernel had no resources for."""
QUARANTINE: Final = 30.0
"""How long bytes that a remote process may still write to stay unused until the engine is replaced."""
