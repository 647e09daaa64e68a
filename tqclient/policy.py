"""The rules of a partition, as `create_partition` takes them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from tqclient import limits
from tqclient.arguments import flag, int_of
from tqclient.errors import InvalidArgument
from tqclient.sizes import size_bytes
from tqclient.wire.v1 import controller_pb2 as pb

LEASE_MIN: Final = 0.1
"""Seconds; a shorter lease would be lost to a busy machine's scheduling alone."""
NUMBER_MAX: Final = (1 << 32) - 1
COUNT_MAX: Final = (1 << 63) - 1
"""What the wire has room for: of versions and attempts, and of samples."""


@dataclass(frozen=True, slots=True)
class SamplesPerInsert:
    """Keeps puts and claims in pace with each other: so many samples are delivered for each one that is put.

    The inequality of Reverb's rate limiter, at every moment:

        offset - error_buffer <= inserted * ratio - delivered <= offset + error_buffer,  offset = ratio * min_samples

    A put that would break the upper bound waits, as does a claim that would break the lower one or that finds fewer
    than `min_samples` put. `inserted` counts the samples ever put, `delivered` those ever granted, to all consumers
    together; redeliveries do not count. Sealing the partition lifts the limit: what is left is handed out.

    A put or a claim of `n` samples counts as a whole, so `error_buffer` must be at least half of what the largest of
    them moves: `max(rows of a put * ratio, rows of a claim) / 2`; what can never fit is refused at once.

    Attributes:
        ratio: samples delivered for each one put, above 0.
        min_samples: that are put before the first claim.
        error_buffer: by how much the balance may be off to either side, at least `max(1, ratio)`; None is the larger of
            `2 * max(1, ratio)` and `ratio * min_samples`.
    """

    ratio: float
    min_samples: int = 1
    error_buffer: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.ratio) or not self.ratio > 0:
            raise InvalidArgument(f"samples_per_insert: ratio={self.ratio!r}: expected a number above 0")
        int_of(self.min_samples, what="samples_per_insert: min_samples", least=1, most=COUNT_MAX)
        if self.error_buffer is not None:
            least = max(1.0, self.ratio)
            if not _is_number(self.error_buffer) or self.error_buffer < least:
                raise InvalidArgument(
                    f"samples_per_insert: error_buffer={self.error_buffer!r}: expected at least {least}: a smaller one "
                    "may stop both puts and claims for ever"
                )

    @property
    def buffer(self) -> float:
        """`error_buffer`, or its default."""
        if self.error_buffer is not None:
            return float(self.error_buffer)
        return max(2.0 * max(1.0, self.ratio), float(self.ratio) * self.min_samples)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a partition.

    Attributes:
        max_staleness: weight versions that a sample may lag behind the partition's; None: any.
        staleness: `drop`: a sample that lags more is dropped; `wait`: new ones are held back so that none ever does.
        capacity_samples: live samples at most; None: no limit.
        capacity_bytes: of their blocks at most; None: no limit.
        replicas: storage nodes that hold each block.
        max_attempts: deliveries of a sample to one consumer before it is listed as dead.
        lease: seconds that a claim lives without a sign of life from its client.
        capacity_versions: weight versions of live samples at most; None: no limit.
        samples_per_version: that a trainer consumes before it sets the next version; only with `wait`.
        samples_per_insert: the rate limit; None: none.
        keep: do not retire the partition, whoever is done with it.
    """

    max_staleness: int | None = None
    staleness: str = "drop"
    capacity_samples: int | None = None
    capacity_bytes: int | None = None
    replicas: int = 1
    max_attempts: int = 5
    lease: float = 10.0
    capacity_versions: int | None = None
    samples_per_version: int | None = None
    samples_per_insert: SamplesPerInsert | None = None
    keep: bool = False

    @classmethod
    def from_arguments(
        cls,
        *,
        max_staleness: int | None,
        staleness: str,
        capacity_samples: int | None,
        capacity_bytes: int | str | None,
        samples_per_insert: float | SamplesPerInsert | None,
        replicas: int,
        max_attempts: int,
        lease: float,
        capacity_versions: int | None = None,
        samples_per_version: int | None = None,
        keep: bool = False,
    ) -> Policy:
        """Checks what `create_partition` was given.

        Raises:
            InvalidArgument: out of bounds, or rules that contradict each other.
        """
        for name, value, least, most in (
            ("max_staleness", max_staleness, 0, NUMBER_MAX),
            ("capacity_samples", capacity_samples, 1, COUNT_MAX),
            ("capacity_versions", capacity_versions, 1, COUNT_MAX),
            ("samples_per_version", samples_per_version, 1, COUNT_MAX),
        ):
            if value is not None:
                int_of(value, what=name, least=least, most=most)
        _check_staleness(staleness, max_staleness, samples_per_version)
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not LEASE_MIN <= lease <= 24 * 3600:
            raise InvalidArgument(f"lease={lease!r}: expected seconds, from {LEASE_MIN} to a day")
        if samples_per_insert is not None and not isinstance(samples_per_insert, SamplesPerInsert):
            samples_per_insert = SamplesPerInsert(samples_per_insert)
        return cls(
            max_staleness=max_staleness,
            staleness=staleness,
            capacity_samples=capacity_samples,
            capacity_bytes=None if capacity_bytes is None else size_bytes(capacity_bytes, what="capacity_bytes"),
            replicas=int_of(replicas, what="replicas", least=1, most=limits.REPLICAS_MAX),
            max_attempts=int_of(max_attempts, what="max_attempts", least=1, most=NUMBER_MAX),
            lease=float(lease),
            capacity_versions=capacity_versions,
            samples_per_version=samples_per_version,
            samples_per_insert=samples_per_insert,
            keep=flag(keep, what="keep"),
        )

    def to_wire(self) -> pb.Policy:
        """Returns the policy as CreatePartition carries it."""
        wire = pb.Policy(
            max_staleness=self.max_staleness,
            staleness=self.staleness,
            capacity_samples=self.capacity_samples,
            capacity_bytes=self.capacity_bytes,
            replicas=self.replicas,
            max_attempts=self.max_attempts,
            lease_ms=round(self.lease * 1000),
            capacity_versions=self.capacity_versions,
            samples_per_version=self.samples_per_version,
            keep=self.keep,
        )
        rate = self.samples_per_insert
        if rate is not None:
            wire.rate_limit.samples_per_insert = rate.ratio
            wire.rate_limit.min_samples = rate.min_samples
            wire.rate_limit.error_buffer = rate.buffer
        return wire

    @classmethod
    def from_wire(cls, policy: pb.Policy) -> Policy:
        """Reads what `to_wire` made."""

        def optional(name: str) -> Any:
            return getattr(policy, name) if policy.HasField(name) else None

        rate = policy.rate_limit
        return cls(
            max_staleness=optional("max_staleness"),
            staleness=policy.staleness,
            capacity_samples=optional("capacity_samples"),
            capacity_bytes=optional("capacity_bytes"),
            replicas=policy.replicas,
            max_attempts=policy.max_attempts,
            lease=policy.lease_ms / 1000,
            capacity_versions=optional("capacity_versions"),
            samples_per_version=optional("samples_per_version"),
            samples_per_insert=SamplesPerInsert(rate.samples_per_insert, rate.min_samples, rate.error_buffer)
            if policy.HasField("rate_limit")
            else None,
            keep=policy.keep or not policy.HasField("keep"),
        )


def _check_staleness(staleness: str, max_staleness: int | None, samples_per_version: int | None) -> None:
    if not isinstance(staleness, str) or staleness not in ("drop", "wait"):
        raise InvalidArgument(f"staleness={staleness!r}: expected 'drop' or 'wait'")
    if staleness == "drop" and samples_per_version is not None:
        raise InvalidArgument("samples_per_version: only with staleness='wait', which holds puts back by it")
    if staleness == "wait" and (max_staleness is None or samples_per_version is None):
        raise InvalidArgument(
            "staleness='wait' needs max_staleness and samples_per_version: they say how many samples may be under way"
        )
