"""What the drop-in raises besides the client's own errors."""

from __future__ import annotations

from tqclient.errors import ClaimTimeout, SampleNotFound


class StorageKeyNotFoundError(SampleNotFound, ValueError):
    """A key, sample, field or partition that was asked for does not exist. Nothing was read.

    It is a KeyError and a ValueError, since callers of the original catch the one or the other.
    """


class TooFewSamplesError(ClaimTimeout, RuntimeError):
    """Too few samples were ready in time. Nothing was taken, and the call may be made again.

    It is a TimeoutError and a RuntimeError: the original's client raises the latter.
    """
