"""The rules of a partition: what they may be, and their defaults."""

from __future__ import annotations

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core import limits
from tqserver.controller.core.ratelimit import check_rate_limit


def full_policy(value: controller_pb2.Policy) -> controller_pb2.Policy:
    """Checks a policy; returns it with its defaults filled in."""
    full = controller_pb2.Policy()
    full.CopyFrom(value)
    full.staleness = value.staleness or "drop"
    full.replicas = value.replicas or limits.REPLICAS_DEFAULT
    full.max_attempts = value.max_attempts or limits.MAX_ATTEMPTS_DEFAULT
    full.lease_ms = value.lease_ms or limits.LEASE_DEFAULT_MS
    if full.replicas > wire_limits.REPLICAS_MAX:
        raise InvalidArgument(f"replicas={full.replicas}, at most {wire_limits.REPLICAS_MAX}")
    if full.max_attempts > limits.ATTEMPTS_MAX:
        raise InvalidArgument(f"max_attempts={full.max_attempts}, at most {limits.ATTEMPTS_MAX}")
    if not limits.LEASE_MIN_MS <= full.lease_ms <= limits.LEASE_MAX_MS:
        raise InvalidArgument(f"a lease of {full.lease_ms} ms, from {limits.LEASE_MIN_MS} to {limits.LEASE_MAX_MS}")
    for field in ("capacity_samples", "capacity_bytes", "capacity_versions", "samples_per_version"):
        if value.HasField(field) and getattr(value, field) == 0:
            raise InvalidArgument(f"{field}=0 leaves room for nothing; leave it out for no limit")
    if value.HasField("rate_limit"):
        check_rate_limit(value.rate_limit)
    _check_staleness(full)
    return full


def _check_staleness(policy: controller_pb2.Policy) -> None:
    if policy.staleness not in ("drop", "wait"):
        raise InvalidArgument(f"staleness {policy.staleness!r}: expected 'drop' or 'wait'")
    if policy.staleness == "drop":
        if policy.HasField("samples_per_version"):
            raise InvalidArgument("samples_per_version: only with staleness='wait', which holds puts back by it")
        return
    for field in ("max_staleness", "samples_per_version"):
        if not policy.HasField(field):
            raise InvalidArgument(f"staleness='wait' needs {field}: it says how many samples may be on their way")
