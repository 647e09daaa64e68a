"""Every bound of the controller's core that clients need not know. The error that enforces one quotes it."""

from __future__ import annotations

from typing import Final

PARTITIONS_MAX: Final = 65_536
SESSIONS_MAX: Final = 65_536
"""Live sessions."""
CLAIMS_PER_SESSION_MAX: Final = 4_096
PERMITS_PER_SESSION_MAX: Final = 65_536
"""Permits that a session holds at one time."""
PINS_PER_SESSION_MAX: Final = 65_536
"""Read pins that a session holds at one time."""
VIEWS_PER_CONSUMER_MAX: Final = 1_024
"""Choices of samples (fields and tags) of one consumer whose readiness is tracked, and that its claims may wait with;
..."""
VIEWS_BYTES_MAX: Final = 1 << 30
"""... and bytes that this takes: a byte for each sample, and with tags another one; ..."""
IDLE_VIEWS_MAX: Final = 16
"""... and of those that nobody asks for any more, so many, the latest."""
SHARDS_MAX: Final = 4_096
"""Shards of a partition; samples whose tag `shard` is not below it belong to none."""
CHANGES_MAX: Final = 16_384
"""Commands of one partition whose changes are remembered for those who watch it; ..."""
CHANGES_BYTES_MAX: Final = 8 << 20
"""... and the bytes of these changes as messages, but for those of the latest command."""
RETIRED_CHANGES_BYTES_MAX: Final = 32 << 20
"""Of the changes of all retired partitions that are remembered, but for the one that changed last."""
CHANGES_READ_MAX: Final = 64
"""Commands whose changes a watcher is sent in one go."""
CHANGE_ROWS_MAX: Final = 4_096
"""Samples in one message to a watcher; ..."""
CHANGE_BYTES_MAX: Final = 4 << 20
"""... and bytes of their keys and tags, unless a single sample has more."""
SHARES_PER_DP_RANK_MAX: Final = 1_024
"""Steps that a DP rank has in hand or keeps for its slower members; beyond it, none makes another one."""
IDLE_CHANGES: Final = 4_096
"""Nobody asks any more for what was not asked for during so many changes, each of which it had to follow."""
INDEXES_PER_VIEW_MAX: Final = 16
"""Group sizes by which one view's groups are counted; and tags by which its samples are ranked."""
IDLE_INDEXES_MAX: Final = 4
"""Of those that nobody asks for any more, the latest."""
GRANTED_GROUPS_MAX: Final = 1 << 20
"""Groups that a consumer remembers as granted; a member that joins one after it was forgotten counts as new."""
NUMBERED_TAGS_MAX: Final = 64
"""Tags of one partition whose numbers are kept by sample, and as many whose values are; ..."""
IDLE_NUMBERED_TAGS_MAX: Final = 8
"""... and of those that nobody asks for any more, so many, the latest."""
TAG_VALUES_MAX: Final = 1 << 18
"""Values of one tag that are told apart by a number; where there are more, a filter unpacks the tags of each sample."""
LISTED_MAX: Final = 8
"""Ids that the text of an error lists."""
REPLIES_PER_CLIENT_MAX: Final = 65_536
"""Recorded replies that a client has not settled."""
REPLY_BYTES_PER_CLIENT_MAX: Final = 64 << 20
"""Beyond it, the oldest replies are forgotten: their requests are refused when repeated, never applied twice."""
IDLE_CLIENTS_MAX: Final = 4_096
"""Clients without a live session whose replies are kept."""
FORMS_BYTES_MAX: Final = 1 << 20
"""Of all fields of a put: every reply that names the fields has them."""
DELETED_KEYS_MAX: Final = 65_536
"""Metadata keys that one request deletes."""
DROPPED_PINS_MAX: Final = 1 << 20
"""Read pins that one request drops."""
HELD_PAIRS_MAX: Final = 1 << 20
"""Blocks of read pins that one request takes again: about as many as one look-up can name."""
RETIRED_WINDOWS_MAX: Final = 4_096
"""Windows without live extents that are remembered, so that none of their bytes can be committed again: about 1 MB. A
large put has a window of its own, so all of them are soon in use; at 30 large puts a second they go back 2 minutes."""
BLOCKS_TOLD_AT_ONCE: Final = 4_096
"""Of a NodeSync: two milliseconds, and others go on."""
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

FORETOLD_BYTES_MIN: Final = 64 << 10
"""Of a block that a claim is told of ahead of its reply: reading less takes less than the telling."""
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
