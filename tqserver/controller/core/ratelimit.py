"""The samples-per-insert limiter: puts and claims keep pace with each other.

Every put and every claim keeps the inequality of Reverb's limiter ("Reverb: A Framework for Experience Replay",
Cassirer et al., 2021):

    offset - error_buffer <= inserted * samples_per_insert - delivered <= offset + error_buffer
    offset = samples_per_insert * min_samples

A put that would break the upper bound waits, as does a claim that would break the lower one or that finds fewer than
`min_samples` inserted. A sealed partition limits no claim: what is left is handed out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core.permits import Admitted


def check_rate_limit(limit: pb.RateLimit) -> None:
    """Checks a policy's rate limit.

    Raises:
        InvalidArgument: it is off, or would stop everything for ever.
    """
    ratio, buffer = limit.samples_per_insert, limit.error_buffer
    if not (math.isfinite(ratio) and ratio > 0):
        raise InvalidArgument(f"rate_limit: samples_per_insert={ratio}, expected a number above 0")
    if limit.min_samples < 1:
        raise InvalidArgument("rate_limit: min_samples=0, expected 1 or more")
    if not (math.isfinite(buffer) and buffer >= max(1.0, ratio)):
        raise InvalidArgument(
            f"rate_limit: error_buffer={buffer}, expected at least {max(1.0, ratio)}: a smaller one may stop both puts "
            "and claims for ever"
        )


class RateLimiter(NamedTuple):
    """A rate limit and where it stands.

    Attributes:
        ratio: samples delivered for each one inserted.
        min_samples: to be inserted before the first claim.
        error_buffer: by which the balance may be off, to either side.
        inserted, delivered: as in `Admitted`.
    """

    ratio: float
    min_samples: int
    error_buffer: float
    inserted: int
    delivered: int

    @classmethod
    def of(cls, policy: pb.Policy, admitted: Admitted) -> RateLimiter | None:
        """Returns a partition's limiter; None: it has none."""
        if not policy.HasField("rate_limit"):
            return None
        limit = policy.rate_limit
        return cls(
            *(limit.samples_per_insert, limit.min_samples, limit.error_buffer),
            *(admitted.inserted, admitted.delivered),
        )

    def _off(self, inserted: int, delivered: int) -> float:
        """By how much the balance would be off; puts raise it, claims lower it."""
        return (self.inserted + inserted - self.min_samples) * self.ratio - (self.delivered + delivered)

    def lacks_for_put(self, rows: int) -> str:
        """Returns why so many samples cannot be put now; empty: they can.

        Raises:
            InvalidArgument: they never can.
        """
        if self._off(rows, 0) <= self.error_buffer:
            return ""
        if rows * self.ratio > 2 * self.error_buffer:
            raise InvalidArgument(
                f"a put of {rows} samples moves the balance of samples_per_insert by {rows * self.ratio}, more than "
                f"twice error_buffer={self.error_buffer}: put fewer at once, or give the partition a larger one"
            )
        return (
            f"samples_per_insert={self.ratio}: {self.inserted} samples were put and only {self.delivered} delivered; "
            f"{rows} more wait for claims"
        )

    def lacks_for_claim(self, rows: int) -> str:
        """Returns why so many samples cannot be delivered now; empty: they can."""
        if self.inserted < self.min_samples:
            return f"samples_per_insert: {self.inserted} samples were put, min_samples={self.min_samples}"
        if self._off(0, rows) >= -self.error_buffer:
            return ""
        return (
            f"samples_per_insert={self.ratio}: {self.delivered} samples were delivered of {self.inserted} that were "
            f"put; {rows} more wait for puts"
        )

    def check_batch(self, rows: int) -> None:
        """Raises InvalidArgument for a claim of so many samples that no puts and claims could ever make room for."""
        if rows > 2 * self.error_buffer:
            raise InvalidArgument(
                f"a claim of {rows} samples moves the balance of samples_per_insert by more than twice "
                f"error_buffer={self.error_buffer}: claim fewer at once, or give the partition a larger one"
            )
