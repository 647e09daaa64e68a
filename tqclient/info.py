"""What the service says of itself: partitions, consumers, nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tqclient.codec import loads
from tqclient.policy import Policy
from tqclient.schema import Form
from tqclient.wire.v1 import controller_pb2 as pb

STATES: Final = ("pending", "ready", "leased", "consumed", "dropped")
"""What a sample can be for a consumer; their counts add up to the partition's samples."""


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a partition.

    Attributes:
        form: what its column is.
        written: samples that have it.
        lengths: least and greatest leading dimension of the rows that were ever put; None where rows have none.
    """

    form: Form
    written: int
    lengths: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """What sort of column it is: `dense`, `ragged`, `struct`, ..."""
        return self.form.kind

    @property
    def dtype(self) -> str:
        """Element type; empty where the kind has none."""
        return self.form.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row, of a ragged field without its leading dimension, which `lengths` gives."""
        return tuple(self.form.shape)

    @classmethod
    def from_wire(cls, field: pb.Field) -> FieldInfo:
        """Reads the controller's description."""
        lengths = (field.length_min, field.length_max) if field.HasField("length_min") else None
        return cls(Form.from_bytes(field.form), field.written, lengths)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A part of a partition.

    Attributes:
        metadata: its own values.
        samples: live ones whose tag `shard` is its number.
    """

    metadata: Mapping[str, Any]
    samples: int


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
        accepted: samples put so far that count against `samples_per_version`: all but those that were cleared before
            anybody consumed them.
        running: samples that permits are out for.
        inserted: samples ever put.
        delivered: samples ever granted to a consumer, redeliveries not counted.
        retired: whether its consumers were done with it: the samples are gone, and the counts are the last ones.
        shards: its parts, by number.
        producers: that are registered and alive.
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
    accepted: int = 0
    running: int = 0
    inserted: int = 0
    delivered: int = 0
    retired: bool = False
    shards: Mapping[int, ShardInfo] = dataclasses.field(default_factory=dict)
    producers: int = 0

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
            {field.name: FieldInfo.from_wire(field) for field in partition.fields},
            {each.name: {state: getattr(each, state) for state in STATES} for each in partition.consumers},
            accepted=partition.accepted,
            running=partition.running,
            inserted=partition.inserted,
            delivered=partition.delivered,
            retired=partition.retired,
            shards={
                number: ShardInfo({name: loads(value) for name, value in shard.metadata.items()}, shard.samples)
                for number, shard in sorted(partition.shards.items())
            },
            producers=partition.producers,
        )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A storage node as this client reaches it.

    Attributes:
        name: as it was configured.
        address: `host:port`.
        attached: whether the controller is in touch with it.
        capacity_bytes: of its arena, or of what is allocated of it by now.
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
        sealed: whether it was, when it was found.
        samples: that were live then.
    """

    def __init__(self, partition_id: int, name: str, fields: Mapping[str, Form], replicas: int = 1) -> None:
        self.partition_id = partition_id
        self.name = name
        self.replicas = replicas
        self.sealed = False
        self.samples = 0
        self._fields = dict(fields)

    @classmethod
    def from_wire(cls, partition: pb.Partition) -> PartitionRef:
        """Reads the controller's description."""
        ref = cls(partition.partition_id, partition.name, {}, partition.policy.replicas or 1)
        ref.sealed, ref.samples = partition.sealed, partition.samples
        ref.fields_changed(partition.fields)
        return ref

    @property
    def fields(self) -> list[str]:
        """The fields that are known here."""
        return list(self._fields)

    def form(self, field: str) -> Form | None:
        """Returns the form of a field; None when it is not known here."""
        return self._fields.get(field)

    def fields_changed(self, fields: Any) -> None:
        """Takes in what the controller said of the partition's fields; forms never change."""
        new = {field.name: Form.from_bytes(field.form) for field in fields if field.name not in self._fields}
        if new:
            self._fields = {**self._fields, **new}
