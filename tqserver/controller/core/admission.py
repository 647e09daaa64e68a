"""Admission: which limits a put or a permit draws on, which of them hold it back, and permits themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import BackpressureTimeout, InvalidArgument, Sealed
from tqclient.wire.packing import I64, U8, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import effects, limits, validate
from tqserver.controller.core.arrays import distinct
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.permits import Permit
from tqserver.controller.core.ratelimit import RateLimiter
from tqserver.controller.core.samples import Slots
from tqserver.controller.core.state import Effects, State


class Limit(Enum):
    """What a partition may have only so much of; named as the policy that sets it."""

    SAMPLES = "capacity_samples"
    BYTES = "capacity_bytes"
    VERSIONS = "capacity_versions"
    STALENESS = "max_staleness"
    RATE = "samples_per_insert"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a put or a permit needs of a partition's limits now.

    Attributes:
        draws: the limits that it uses up. A call that waits for one limit is overtaken by those alone that do not draw
            on it: a permit is put, although others wait for the version that its samples will bring about.
        lacks: limit → why there is no room for it under that one.
    """

    draws: frozenset[Limit] = frozenset()
    lacks: dict[Limit, str] = field(default_factory=dict)


NOTHING: Final = Demand()


class Incoming(NamedTuple):
    """A put, as far as limits are concerned.

    Attributes:
        new_rows: samples that it adds.
        size_bytes: of its blocks, replicas included.
        permitted: they are of a permit.
        slots: int64 [rows]: of samples that exist; -1: a new one.
        versions: int64 [rows]: version_max that each has afterwards, -1 where that does not change; None: nowhere.
    """

    new_rows: int
    size_bytes: int
    permitted: bool
    slots: Slots
    versions: NDArray[np.int64] | None


def is_limited(partition: Partition) -> bool:
    """Whether a put may have to wait. A sealed partition takes no new samples; those that it has may get versions."""
    policy = partition.policy
    if partition.sealed:
        return policy.HasField("capacity_versions")
    names = ("capacity_samples", "capacity_bytes", "capacity_versions", "rate_limit")
    return policy.staleness == "wait" or any(map(policy.HasField, names))


def demand_of(state: State, request: pb.CommitRequest | pb.AcquirePermitRequest) -> Demand:
    """Returns what a waiting call needs now. One that will be refused for something else needs nothing.

    Raises:
        PartitionNotFound: it is gone.
        InvalidArgument: there never will be room for it.
    """
    partition = state.partition(request.partition_id)
    if not is_limited(partition) or request.mutation.session not in state.leases.sessions:
        return NOTHING
    if isinstance(request, pb.CommitRequest):
        put = _incoming(partition, request)
        return NOTHING if partition.sealed and put.new_rows else demand(partition, put)
    if partition.sealed or partition.policy.staleness != "wait":
        return NOTHING
    lacks = _staleness(partition, request.samples)
    return Demand(frozenset({Limit.STALENESS}), {Limit.STALENESS: lacks} if lacks else {})


def queue_of(state: State, request: pb.CommitRequest | pb.AcquirePermitRequest) -> tuple[bool, bytes]:
    """Returns what those have in common that draw on the same limits: of two such calls, the later one waits."""
    partition = state.partitions.get(request.partition_id)
    if partition is None or not isinstance(request, pb.CommitRequest):
        return False, b""
    if partition.live_versions is None or not request.version_max:
        return bool(request.permit), b""
    return bool(request.permit), distinct(np.frombuffer(request.version_max, dtype=I64)).tobytes()


def _incoming(partition: Partition, request: pb.CommitRequest) -> Incoming:
    samples, rows = partition.samples, request.rows
    slots = np.full(rows, -1, dtype=np.int64)
    if request.ids:
        slots = samples.find(validate.sample_ids(request.ids, rows=rows))
    elif request.HasField("keys"):
        slots = samples.find_keys(validate.sample_keys(request.keys, rows=rows))
    new_rows = 0 if request.ids else int(np.count_nonzero(slots < 0))
    size_bytes = sum(extent.length for block in request.blocks for extent in block.extents)
    versions = None
    if request.version_max and partition.live_versions is not None:
        given = unpack_array(request.version_max, I64, what="version_max", rows=rows)
        left = unpack_array(request.skip, U8, what="skip", rows=rows) > 0 if request.skip else np.zeros(rows, np.bool_)
        replace = not request.ids or request.upsert
        versions = versions_after(partition, slots, given, ~left | (slots < 0), replace=replace)
    return Incoming(new_rows, size_bytes, bool(request.permit), slots, versions)


def versions_after(
    partition: Partition, slots: Slots, given: NDArray[np.int64], written: NDArray[np.bool_], *, replace: bool
) -> NDArray[np.int64]:
    """Returns what a put makes of version_max: int64 [rows]; -1 where it leaves that as it is."""
    after = np.where(written, given, -1)
    if not replace:  # a column that joins existing samples widens their span
        own = np.where(slots >= 0, partition.samples.version_max[slots], -1)
        after = np.where(after >= 0, np.maximum(after, own), -1)
    return after


def demand(partition: Partition, put: Incoming) -> Demand:
    """Returns what a put needs now.

    Raises:
        InvalidArgument: there never will be room for it.
    """
    policy, samples = partition.policy, partition.samples
    draws: set[Limit] = set()
    lacks: dict[Limit, str] = {}

    def draw(limit: Limit, lack: str) -> None:
        draws.add(limit)
        if lack:
            lacks[limit] = lack

    if put.new_rows:
        partition.check_fits_empty(put.new_rows, put.size_bytes)
        if policy.HasField("capacity_samples"):
            over = samples.live + put.new_rows > policy.capacity_samples
            text = f"capacity_samples={policy.capacity_samples}: {samples.live} are live, {put.new_rows} more come"
            draw(Limit.SAMPLES, text if over else "")
        if policy.HasField("capacity_bytes"):
            over = partition.size_bytes + put.size_bytes > policy.capacity_bytes
            text = f"capacity_bytes={policy.capacity_bytes}: {partition.size_bytes} are live, {put.size_bytes} more"
            draw(Limit.BYTES, text if over else "")
        if policy.staleness == "wait" and not put.permitted:
            draw(Limit.STALENESS, _staleness(partition, put.new_rows))
        limiter = RateLimiter.of(policy, partition.admitted)
        if limiter is not None:
            draw(Limit.RATE, limiter.lacks_for_put(put.new_rows))
    if put.versions is not None and partition.live_versions is not None:
        live = partition.live_versions.counts.keys()
        after = partition.live_versions.after(put.slots, put.versions)
        if after - live:
            draw(Limit.VERSIONS, _versions(partition, put.versions, live, after))
    return Demand(frozenset(draws), lacks)


def _versions(partition: Partition, given: NDArray[np.int64], live: object, after: set[int]) -> str:
    most = partition.policy.capacity_versions
    brought = distinct(given[given >= 0])
    if len(brought) > most:
        raise InvalidArgument(f"{partition}: a put of {len(brought)} weight versions, but capacity_versions is {most}")
    if len(after) <= most:
        return ""
    return f"capacity_versions={most}: samples of versions {sorted(live)} are live"  # type: ignore[call-overload]


def bound(partition: Partition) -> int:
    """Returns how many samples may have been accepted and be running now, under staleness "wait"."""
    policy = partition.policy
    return int((policy.max_staleness + max(partition.version, 0) + 1) * policy.samples_per_version)


def _staleness(partition: Partition, rows: int) -> str:
    admitted, most = partition.admitted, bound(partition)
    if admitted.accepted + admitted.running + rows <= most:
        return ""
    return (
        f"max_staleness={partition.policy.max_staleness}: at version {max(partition.version, 0)}, {most} samples are "
        f"admitted; {admitted.accepted} were accepted, {admitted.running} are running, {rows} more wait for set_version"
    )


def held_back(partition: Partition, lacks: dict[Limit, str]) -> BackpressureTimeout:
    """Returns what to say to a call that there is no room for."""
    return BackpressureTimeout(f"{partition}: {'; '.join(lacks.values())}")


# Permits.


def acquire_permit(state: State, request: pb.AcquirePermitRequest, now: float, out: Effects) -> pb.AcquirePermitReply:
    """Applies an AcquirePermitRequest."""
    validate.acquire_permit(request)
    session = state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    if partition.sealed:
        raise Sealed(f"{partition} is sealed: it takes no more samples")
    if len(session.permits) >= limits.PERMITS_PER_SESSION_MAX:
        raise InvalidArgument(
            f"session {session.session} holds {limits.PERMITS_PER_SESSION_MAX} permits, the most it can: return some"
        )
    lacks = demand_of(state, request).lacks
    if lacks:
        raise held_back(partition, lacks)
    permit = Permit(state.next_permit, session.session, partition.version, request.samples)
    state.next_permit += 1
    partition.admitted.grant(permit)
    session.permits[permit.permit] = partition.partition_id
    return pb.AcquirePermitReply(permit=permit.permit, version=permit.version)


def return_permit(state: State, request: pb.ReturnPermitRequest, now: float, out: Effects) -> pb.ReturnPermitReply:
    """Applies a ReturnPermitRequest; a permit that is gone already is passed over."""
    session = state.session_of(request.mutation)
    if session.permits.get(request.permit) == request.partition_id:
        _end(state, request.permit, session.permits.pop(request.permit), out)
    return pb.ReturnPermitReply()


def end_permits(state: State, session: int, out: Effects) -> None:
    """A session ends: what it was admitted with is not running any more."""
    permits = state.leases.sessions[session].permits
    while permits:
        permit, partition_id = permits.popitem()
        _end(state, permit, partition_id, out)


def _end(state: State, permit: int, partition_id: int, out: Effects) -> None:
    partition = state.partitions.get(partition_id)
    if partition is not None:
        partition.admitted.give_back([permit])
        out.append(effects.RoomChanged(partition_id))


def put(state: State, partition: Partition, new_rows: int, permit: Permit | None) -> None:
    """New samples were put; `permit_of` has passed."""
    partition.admitted.put(new_rows, permit)
    if permit is not None and not permit.left:
        del state.leases.sessions[permit.session].permits[permit.permit]


def permit_of(partition: Partition, permit: int, session: int, new_rows: int) -> Permit | None:
    """Returns the permit that new samples are taken from; None: there are none, or they come without.

    Raises:
        InvalidArgument: the session does not hold it, or it is for fewer.
    """
    if not permit or not new_rows:
        return None
    found = partition.admitted.held(permit, session)
    if found.left < new_rows:
        raise InvalidArgument(
            f"permit {permit} has {found.left} samples left, and the put has {new_rows} new ones; put them without it, "
            "or acquire a permit for more"
        )
    return found
