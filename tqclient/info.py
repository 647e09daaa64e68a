"""What the service says of itself: partitions, consumers, nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tqclient import limits
from tqclient.errors import InvalidArgument
from tqclient.schema import Form
from tqclient.sizes import size_bytes
from tqclient.wire.v1 import controller_pb2 as pb

STATES: Final = ("pending", "ready", "leased", "consumed", "dropped")
"""What a sample can be for a consumer; their counts add up to the partition's samples."""
LEASE_MIN: Final = 0.1
"""Seconds; a shorter lease would be lost to a busy machine's scheduling alone."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a partition.

    Attributes:
        max_staleness: weight versions that a sample may lag behind the partition's; None: any.
        staleness: what becomes of a sample that lags more: `drop`.
        capacity_samples: live samples at most; None: no limit.
        capacity_bytes: of their blocks at most; None: no limit.
        replicas: storage nodes that hold each block.
        max_attempts: deliveries of a sample to one consumer before it is listed as dead.
        lease: seconds that a claim lives without a sign of life from its client.
    """

    max_staleness: int | None = None
    staleness: str = "drop"
    capacity_samples: int | None = None
    capacity_bytes: int | None = None
    replicas: int = 1
    max_attempts: int = 5
    lease: float = 10.0

    @classmethod
    def from_arguments(
        cls,
        *,
        max_staleness: int | None,
        staleness: str,
        capacity_samples: int | None,
        capacity_bytes: int | str | None,
        samples_per_insert: float | None,
        replicas: int,
        max_attempts: int,
        lease: float,
    ) -> Policy:
        """Checks what `create_partition` was given.

        Raises:
            InvalidArgument: out of bounds, or not supported by this version.
        """
        if samples_per_insert is not None:
            raise InvalidArgument(f"samples_per_insert={samples_per_insert!r} is not supported yet; leave it out")
        if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= limits.REPLICAS_MAX:
            raise InvalidArgument(f"replicas={replicas!r}: expected an int from 1 to {limits.REPLICAS_MAX}")
        if staleness != "drop":
            raise InvalidArgument(f"staleness={staleness!r} is not supported yet; only 'drop' is")
        for name, value, least in (
            ("max_staleness", max_staleness, 0),
            ("capacity_samples", capacity_samples, 1),
            ("max_attempts", max_attempts, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidArgument(f"{name}={value!r}: expected an int, {least} or more")
        if isinstance(lease, bool) or not isinstance(lease, int | float) or not LEASE_MIN <= lease <= 24 * 3600:
            raise InvalidArgument(f"lease={lease!r}: expected seconds, from {LEASE_MIN} to a day")
        size = None if capacity_bytes is None else size_bytes(capacity_bytes, what="capacity_bytes")
        return cls(max_staleness, staleness, capacity_samples, size, replicas, max_attempts, float(lease))

    def to_wire(self) -> pb.Policy:
        """Returns the policy as CreatePartition carries it."""
        return pb.Policy(
            max_staleness=self.max_staleness,
            staleness=self.staleness,
            capacity_samples=self.capacity_samples,
            capacity_bytes=self.capacity_bytes,
            replicas=self.replicas,
            max_attempts=self.max_attempts,
            lease_ms=round(self.lease * 1000),
        )

    @classmethod
    def from_wire(cls, policy: pb.Policy) -> Policy:
        """Reads what `to_wire` made."""

        def optional(name: str) -> int | None:
            return getattr(policy, name) if policy.HasField(name) else None

        return cls(
            optional("max_staleness"),
            policy.staleness,
            optional("capacity_samples"),
            optional("capacity_bytes"),
            policy.replicas,
            policy.max_attempts,
            policy.lease_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a partition.

    Attributes:
        form: what its column is.
        written: samples that have it.
    """

    form: Form
    written: int


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition at one moment.

    Attributes:
        partition_id: never reused, not even under the same name.
        name: of the partition.
        policy: its rules.
        sealed: whether no more samples come.
        version: its weight version; None until `set_version`.
        samples: that are live.
        bytes: of their blocks.
        fields: by name, in the order in which they were first put.
        counts: by consumer: `pending`, `ready`, `leased`, `consumed` and `dropped`, which add up to `samples`.
    """

    partition_id: int
    name: str
    policy: Policy
    sealed: bool
    version: int | None
    samples: int
    bytes: int
    fields: Mapping[str, FieldInfo]
    counts: Mapping[str, dict[str, int]]

    @classmethod
    def from_wire(cls, partition: pb.Partition) -> PartitionInfo:
        """Reads the controller's description."""
        return cls(
            partition.partition_id,
            partition.name,
            Policy.from_wire(partition.policy),
            partition.sealed,
            partition.version if partition.version >= 0 else None,
            partition.samples,
            partition.bytes,
            {field.name: FieldInfo(Form.from_bytes(field.form), field.written) for field in partition.fields},
            {each.name: {state: getattr(each, state) for state in STATES} for each in partition.consumers},
        )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A storage node as this client reaches it.

    Attributes:
        name: as it was configured.
        address: `host:port`.
        attached: whether the controller is in touch with it.
        capacity_bytes: of its arena.
        used_bytes: sealed and reserved, as it last reported.
        transport: which path serves it: `shm`, `grpc`, ...; empty when there is none.
        reason: why this path, and why no better one.
    """

    name: str
    address: str
    attached: bool
    capacity_bytes: int
    used_bytes: int
    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The service at one moment.

    Attributes:
        address: of the controller.
        epoch: counts its starts.
        nodes: storage nodes.
        sessions: live clients.
        claims: that are held.
        waiting_claims: that wait for samples.
        journal_sequence: changes that were ever made.
    """

    address: str
    epoch: int
    nodes: tuple[NodeInfo, ...]
    sessions: int
    claims: int
    waiting_claims: int
    journal_sequence: int

    @classmethod
    def from_wire(cls, address: str, reply: pb.DescribeClusterReply, nodes: Iterable[NodeInfo]) -> ClusterInfo:
        """Reads the controller's description."""
        return cls(
            address,
            reply.epoch,
            tuple(nodes),
            reply.sessions,
            reply.claims,
            reply.waiting_claims,
            reply.journal_sequence,
        )


class PartitionRef:
    """A partition as this client addresses it, with the fields that it has seen there.

    Attributes:
        partition_id: of the partition.
        name: for messages.
        replicas: storage nodes that hold each block.
    """

    def __init__(self, partition_id: int, name: str, fields: Mapping[str, Form], replicas: int = 1) -> None:
        self.partition_id = partition_id
        self.name = name
        self.replicas = replicas
        self._fields = dict(fields)

    @classmethod
    def from_wire(cls, partition: pb.Partition) -> PartitionRef:
        """Reads the controller's description."""
        ref = cls(partition.partition_id, partition.name, {}, partition.policy.replicas or 1)
        ref.fields_changed(partition.fields)
        return ref

    def form(self, field: str) -> Form | None:
        """Returns the form of a field; None when it is not known here."""
        return self._fields.get(field)

    def fields_changed(self, fields: Any) -> None:
        """Takes in what the controller said of the partition's fields; forms never change."""
        new = {field.name: Form.from_bytes(field.form) for field in fields if field.name not in self._fields}
        if new:
            self._fields = {**self._fields, **new}
