from tqclient.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_ACK: _ClassVar[Verdict]
    VERDICT_RELEASE: _ClassVar[Verdict]
VERDICT_UNSPECIFIED: Verdict
VERDICT_ACK: Verdict
VERDICT_RELEASE: Verdict

class OpenSessionRequest(_message.Message):
    __slots__ = ("mutation", "label", "version", "wire_version")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    label: str
    version: str
    wire_version: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., label: _Optional[str] = ..., version: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session", "lease_ms", "epoch", "nodes", "narrow_lengths")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NARROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    session: int
    lease_ms: int
    epoch: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    narrow_lengths: bool
    def __init__(self, session: _Optional[int] = ..., lease_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., narrow_lengths: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session", "dropped_pins", "held_pins")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PINS_FIELD_NUMBER: _ClassVar[int]
    HELD_PINS_FIELD_NUMBER: _ClassVar[int]
    session: int
    dropped_pins: bytes
    held_pins: bytes
    def __init__(self, session: _Optional[int] = ..., dropped_pins: _Optional[bytes] = ..., held_pins: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("epoch", "lease_ms", "topology_version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_ms: int
    topology_version: int
    def __init__(self, epoch: _Optional[int] = ..., lease_ms: _Optional[int] = ..., topology_version: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("mutation",)
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Policy(_message.Message):
    __slots__ = ("max_staleness", "staleness", "capacity_samples", "capacity_bytes", "replicas", "max_attempts", "lease_ms", "capacity_versions", "samples_per_version", "rate_limit", "keep")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_VERSION_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    staleness: str
    capacity_samples: int
    capacity_bytes: int
    replicas: int
    max_attempts: int
    lease_ms: int
    capacity_versions: int
    samples_per_version: int
    rate_limit: RateLimit
    keep: bool
    def __init__(self, max_staleness: _Optional[int] = ..., staleness: _Optional[str] = ..., capacity_samples: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., replicas: _Optional[int] = ..., max_attempts: _Optional[int] = ..., lease_ms: _Optional[int] = ..., capacity_versions: _Optional[int] = ..., samples_per_version: _Optional[int] = ..., rate_limit: _Optional[_Union[RateLimit, _Mapping]] = ..., keep: _Optional[bool] = ...) -> None: ...

class RateLimit(_message.Message):
    __slots__ = ("samples_per_insert", "min_samples", "error_buffer")
    SAMPLES_PER_INSERT_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ERROR_BUFFER_FIELD_NUMBER: _ClassVar[int]
    samples_per_insert: float
    min_samples: int
    error_buffer: float
    def __init__(self, samples_per_insert: _Optional[float] = ..., min_samples: _Optional[int] = ..., error_buffer: _Optional[float] = ...) -> None: ...

class CreatePartitionRequest(_message.Message):
    __slots__ = ("mutation", "name", "consumers", "policy", "metadata", "exist_ok")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    EXIST_OK_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    name: str
    consumers: _containers.RepeatedScalarFieldContainer[str]
    policy: Policy
    metadata: _containers.ScalarMap[str, bytes]
    exist_ok: bool
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., name: _Optional[str] = ..., consumers: _Optional[_Iterable[str]] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., metadata: _Optional[_Mapping[str, bytes]] = ..., exist_ok: _Optional[bool] = ...) -> None: ...

class DescribePartitionRequest(_message.Message):
    __slots__ = ("partition_id", "name")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    name: str
    def __init__(self, partition_id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class ListPartitionsRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class ListPartitionsReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ...) -> None: ...

class SealPartitionRequest(_message.Message):
    __slots__ = ("mutation", "partition_id")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ...) -> None: ...

class DeletePartitionRequest(_message.Message):
    __slots__ = ("mutation", "partition_id")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ...) -> None: ...

class DeletePartitionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetMetadataRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "set", "delete", "shard")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    set: _containers.ScalarMap[str, bytes]
    delete: _containers.RepeatedScalarFieldContainer[str]
    shard: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., set: _Optional[_Mapping[str, bytes]] = ..., delete: _Optional[_Iterable[str]] = ..., shard: _Optional[int] = ...) -> None: ...

class SetVersionRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "version")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    version: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class PartitionReply(_message.Message):
    __slots__ = ("partition",)
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    partition: Partition
    def __init__(self, partition: _Optional[_Union[Partition, _Mapping]] = ...) -> None: ...

class RegisterProducerRequest(_message.Message):
    __slots__ = ("mutation", "partition_id")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ...) -> None: ...

class RegisterProducerReply(_message.Message):
    __slots__ = ("registered",)
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    registered: int
    def __init__(self, registered: _Optional[int] = ...) -> None: ...

class UnregisterProducerRequest(_message.Message):
    __slots__ = ("mutation", "partition_id")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ...) -> None: ...

class UnregisterProducerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquirePermitRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "samples", "wait_ms")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    samples: int
    wait_ms: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., samples: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class AcquirePermitReply(_message.Message):
    __slots__ = ("permit", "version")
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    permit: int
    version: int
    def __init__(self, permit: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ReturnPermitRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "permit")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    permit: int
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., permit: _Optional[int] = ...) -> None: ...

class ReturnPermitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "partition_id", "from_sequence")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session: int
    partition_id: int
    from_sequence: int
    def __init__(self, session: _Optional[int] = ..., partition_id: _Optional[int] = ..., from_sequence: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("sequence", "last", "listing", "written", "removed", "tagged", "settled", "partition")
    class Listing(_message.Message):
        __slots__ = ("ids", "keys", "tags", "complete")
        IDS_FIELD_NUMBER: _ClassVar[int]
        KEYS_FIELD_NUMBER: _ClassVar[int]
        TAGS_FIELD_NUMBER: _ClassVar[int]
        COMPLETE_FIELD_NUMBER: _ClassVar[int]
        ids: bytes
        keys: _common_pb2.Packed
        tags: _common_pb2.Packed
        complete: bool
        def __init__(self, ids: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., tags: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., complete: _Optional[bool] = ...) -> None: ...
    class Written(_message.Message):
        __slots__ = ("ids", "keys", "tags", "fields", "added")
        IDS_FIELD_NUMBER: _ClassVar[int]
        KEYS_FIELD_NUMBER: _ClassVar[int]
        TAGS_FIELD_NUMBER: _ClassVar[int]
        FIELDS_FIELD_NUMBER: _ClassVar[int]
        ADDED_FIELD_NUMBER: _ClassVar[int]
        ids: bytes
        keys: _common_pb2.Packed
        tags: _common_pb2.Packed
        fields: _containers.RepeatedScalarFieldContainer[str]
        added: bool
        def __init__(self, ids: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., tags: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., added: _Optional[bool] = ...) -> None: ...
    class Removed(_message.Message):
        __slots__ = ("ids",)
        IDS_FIELD_NUMBER: _ClassVar[int]
        ids: bytes
        def __init__(self, ids: _Optional[bytes] = ...) -> None: ...
    class Tagged(_message.Message):
        __slots__ = ("ids", "tags")
        IDS_FIELD_NUMBER: _ClassVar[int]
        TAGS_FIELD_NUMBER: _ClassVar[int]
        ids: bytes
        tags: _common_pb2.Packed
        def __init__(self, ids: _Optional[bytes] = ..., tags: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ...) -> None: ...
    class Settled(_message.Message):
        __slots__ = ("consumer", "consumed", "dropped")
        CONSUMER_FIELD_NUMBER: _ClassVar[int]
        CONSUMED_FIELD_NUMBER: _ClassVar[int]
        DROPPED_FIELD_NUMBER: _ClassVar[int]
        consumer: str
        consumed: bytes
        dropped: bytes
        def __init__(self, consumer: _Optional[str] = ..., consumed: _Optional[bytes] = ..., dropped: _Optional[bytes] = ...) -> None: ...
    class PartitionChanged(_message.Message):
        __slots__ = ("partition",)
        PARTITION_FIELD_NUMBER: _ClassVar[int]
        partition: Partition
        def __init__(self, partition: _Optional[_Union[Partition, _Mapping]] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LISTING_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TAGGED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    last: bool
    listing: Change.Listing
    written: Change.Written
    removed: Change.Removed
    tagged: Change.Tagged
    settled: Change.Settled
    partition: Change.PartitionChanged
    def __init__(self, sequence: _Optional[int] = ..., last: _Optional[bool] = ..., listing: _Optional[_Union[Change.Listing, _Mapping]] = ..., written: _Optional[_Union[Change.Written, _Mapping]] = ..., removed: _Optional[_Union[Change.Removed, _Mapping]] = ..., tagged: _Optional[_Union[Change.Tagged, _Mapping]] = ..., settled: _Optional[_Union[Change.Settled, _Mapping]] = ..., partition: _Optional[_Union[Change.PartitionChanged, _Mapping]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("partition_id", "name", "policy", "sealed", "version", "samples", "bytes", "fields", "consumers", "metadata", "retired", "shards", "producers", "accepted", "running", "inserted", "delivered")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    class ShardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Shard
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Shard, _Mapping]] = ...) -> None: ...
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    name: str
    policy: Policy
    sealed: bool
    version: int
    samples: int
    bytes: int
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerCounts]
    metadata: _containers.ScalarMap[str, bytes]
    retired: bool
    shards: _containers.MessageMap[int, Shard]
    producers: int
    accepted: int
    running: int
    inserted: int
    delivered: int
    def __init__(self, partition_id: _Optional[int] = ..., name: _Optional[str] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., sealed: _Optional[bool] = ..., version: _Optional[int] = ..., samples: _Optional[int] = ..., bytes: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., consumers: _Optional[_Iterable[_Union[ConsumerCounts, _Mapping]]] = ..., metadata: _Optional[_Mapping[str, bytes]] = ..., retired: _Optional[bool] = ..., shards: _Optional[_Mapping[int, Shard]] = ..., producers: _Optional[int] = ..., accepted: _Optional[int] = ..., running: _Optional[int] = ..., inserted: _Optional[int] = ..., delivered: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("metadata", "samples")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    metadata: _containers.ScalarMap[str, bytes]
    samples: int
    def __init__(self, metadata: _Optional[_Mapping[str, bytes]] = ..., samples: _Optional[int] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("name", "form", "written", "length_min", "length_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MIN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    form: bytes
    written: int
    length_min: int
    length_max: int
    def __init__(self, name: _Optional[str] = ..., form: _Optional[bytes] = ..., written: _Optional[int] = ..., length_min: _Optional[int] = ..., length_max: _Optional[int] = ...) -> None: ...

class ConsumerCounts(_message.Message):
    __slots__ = ("name", "pending", "ready", "leased", "consumed", "dropped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pending: int
    ready: int
    leased: int
    consumed: int
    dropped: int
    def __init__(self, name: _Optional[str] = ..., pending: _Optional[int] = ..., ready: _Optional[int] = ..., leased: _Optional[int] = ..., consumed: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "rows", "ids", "keys", "groups", "version_min", "version_max", "tags", "fields", "blocks", "upsert", "skip", "wait_ms", "lengths", "permit", "runs", "abandoned")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UPSERT_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PERMIT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    rows: int
    ids: bytes
    keys: _common_pb2.Packed
    groups: _common_pb2.Packed
    version_min: bytes
    version_max: bytes
    tags: _common_pb2.Packed
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockWrite]
    upsert: bool
    skip: bytes
    wait_ms: int
    lengths: _containers.RepeatedCompositeFieldContainer[FieldLengths]
    permit: int
    runs: bool
    abandoned: bool
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., rows: _Optional[int] = ..., ids: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., groups: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., version_min: _Optional[bytes] = ..., version_max: _Optional[bytes] = ..., tags: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockWrite, _Mapping]]] = ..., upsert: _Optional[bool] = ..., skip: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., lengths: _Optional[_Iterable[_Union[FieldLengths, _Mapping]]] = ..., permit: _Optional[int] = ..., runs: _Optional[bool] = ..., abandoned: _Optional[bool] = ...) -> None: ...

class FieldLengths(_message.Message):
    __slots__ = ("field", "lengths", "width")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    field: str
    lengths: bytes
    width: int
    def __init__(self, field: _Optional[str] = ..., lengths: _Optional[bytes] = ..., width: _Optional[int] = ...) -> None: ...

class BlockWrite(_message.Message):
    __slots__ = ("extents", "directory", "rows")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[_common_pb2.Extent]
    directory: bytes
    rows: int
    def __init__(self, extents: _Optional[_Iterable[_Union[_common_pb2.Extent, _Mapping]]] = ..., directory: _Optional[bytes] = ..., rows: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("ids", "fields", "id_runs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    ID_RUNS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    id_runs: bytes
    def __init__(self, ids: _Optional[bytes] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., id_runs: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("session", "partition_id", "ids", "keys", "fields", "dropped_pins", "pin", "runs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PINS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    session: int
    partition_id: int
    ids: bytes
    keys: _common_pb2.Packed
    fields: _containers.RepeatedScalarFieldContainer[str]
    dropped_pins: bytes
    pin: int
    runs: bool
    def __init__(self, session: _Optional[int] = ..., partition_id: _Optional[int] = ..., ids: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., fields: _Optional[_Iterable[str]] = ..., dropped_pins: _Optional[bytes] = ..., pin: _Optional[int] = ..., runs: _Optional[bool] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("pin", "rows", "fields")
    PIN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    pin: int
    rows: _common_pb2.Rows
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    def __init__(self, pin: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Rows, _Mapping]] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ...) -> None: ...

class GetDirectoriesRequest(_message.Message):
    __slots__ = ("session", "block_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    block_ids: bytes
    def __init__(self, session: _Optional[int] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class GetDirectoriesReply(_message.Message):
    __slots__ = ("directories",)
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    directories: _common_pb2.Packed
    def __init__(self, directories: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "ids", "keys", "groups", "tags", "prefix")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    ids: bytes
    keys: _common_pb2.Packed
    groups: _common_pb2.Packed
    tags: bytes
    prefix: str
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., ids: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., groups: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ..., tags: _Optional[bytes] = ..., prefix: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class SetTagsRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "ids", "tags")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    ids: bytes
    tags: _common_pb2.Packed
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., ids: _Optional[bytes] = ..., tags: _Optional[_Union[_common_pb2.Packed, _Mapping]] = ...) -> None: ...

class SetTagsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampler(_message.Message):
    __slots__ = ("name", "params")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: bytes
    def __init__(self, name: _Optional[str] = ..., params: _Optional[bytes] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("dp", "tp", "pp", "cp", "ep", "dp_rank", "member", "members", "leader_acks", "world_rank", "world_size")
    DP_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    CP_FIELD_NUMBER: _ClassVar[int]
    EP_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEADER_ACKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp_rank: int
    member: int
    members: int
    leader_acks: bool
    world_rank: int
    world_size: int
    def __init__(self, dp: _Optional[int] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., cp: _Optional[int] = ..., ep: _Optional[int] = ..., dp_rank: _Optional[int] = ..., member: _Optional[int] = ..., members: _Optional[int] = ..., leader_acks: _Optional[bool] = ..., world_rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class RegisterRankRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "consumer", "topology")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    consumer: str
    topology: Topology
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., consumer: _Optional[str] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ...) -> None: ...

class RegisterRankReply(_message.Message):
    __slots__ = ("registered",)
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    registered: int
    def __init__(self, registered: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "consumer", "fields", "batch_size", "sampler", "wait_ms", "abandoned", "where", "max_tokens", "token_field", "topology", "runs", "preview")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    consumer: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    batch_size: int
    sampler: Sampler
    wait_ms: int
    abandoned: bool
    where: bytes
    max_tokens: int
    token_field: str
    topology: Topology
    runs: bool
    preview: bool
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., consumer: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., batch_size: _Optional[int] = ..., sampler: _Optional[_Union[Sampler, _Mapping]] = ..., wait_ms: _Optional[int] = ..., abandoned: _Optional[bool] = ..., where: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., token_field: _Optional[str] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ..., runs: _Optional[bool] = ..., preview: _Optional[bool] = ...) -> None: ...

class Preview(_message.Message):
    __slots__ = ("block",)
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: BlockWrite
    def __init__(self, block: _Optional[_Union[BlockWrite, _Mapping]] = ...) -> None: ...

class ClaimReply(_message.Message):
    __slots__ = ("claim_id", "lease_ms", "rows", "fields", "step")
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    claim_id: int
    lease_ms: int
    rows: _common_pb2.Rows
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    step: int
    def __init__(self, claim_id: _Optional[int] = ..., lease_ms: _Optional[int] = ..., rows: _Optional[_Union[_common_pb2.Rows, _Mapping]] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., step: _Optional[int] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("mutation", "claim_id", "verdict")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    claim_id: int
    verdict: Verdict
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., claim_id: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, str]] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewClaimRequest(_message.Message):
    __slots__ = ("session", "claim_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    session: int
    claim_id: int
    def __init__(self, session: _Optional[int] = ..., claim_id: _Optional[int] = ...) -> None: ...

class RenewClaimReply(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class ResetConsumerRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "consumer")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    consumer: str
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class ResetConsumerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeadRequest(_message.Message):
    __slots__ = ("partition_id", "consumer")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    consumer: str
    def __init__(self, partition_id: _Optional[int] = ..., consumer: _Optional[str] = ...) -> None: ...

class ListDeadReply(_message.Message):
    __slots__ = ("ids", "attempts", "surplus", "stale")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    attempts: bytes
    surplus: bytes
    stale: bytes
    def __init__(self, ids: _Optional[bytes] = ..., attempts: _Optional[bytes] = ..., surplus: _Optional[bytes] = ..., stale: _Optional[bytes] = ...) -> None: ...

class RequeueRequest(_message.Message):
    __slots__ = ("mutation", "partition_id", "consumer", "ids")
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    mutation: _common_pb2.Mutation
    partition_id: int
    consumer: str
    ids: bytes
    def __init__(self, mutation: _Optional[_Union[_common_pb2.Mutation, _Mapping]] = ..., partition_id: _Optional[int] = ..., consumer: _Optional[str] = ..., ids: _Optional[bytes] = ...) -> None: ...

class RequeueReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeClusterReply(_message.Message):
    __slots__ = ("epoch", "topology_version", "nodes", "sessions", "claims", "waiting_claims", "journal_sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    topology_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    sessions: int
    claims: int
    waiting_claims: int
    journal_sequence: int
    def __init__(self, epoch: _Optional[int] = ..., topology_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., sessions: _Optional[int] = ..., claims: _Optional[int] = ..., waiting_claims: _Optional[int] = ..., journal_sequence: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "address", "arena", "incarnation", "attached", "capacity_bytes", "used_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    arena: int
    incarnation: int
    attached: bool
    capacity_bytes: int
    used_bytes: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., arena: _Optional[int] = ..., incarnation: _Optional[int] = ..., attached: _Optional[bool] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("hello", "usage", "writer_gone")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WRITER_GONE_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    usage: NodeUsage
    writer_gone: WriterGone
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., usage: _Optional[_Union[NodeUsage, _Mapping]] = ..., writer_gone: _Optional[_Union[WriterGone, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("node", "seen_sequence")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SEEN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    seen_sequence: int
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., seen_sequence: _Optional[int] = ...) -> None: ...

class NodeUsage(_message.Message):
    __slots__ = ("used_bytes", "capacity_bytes")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    capacity_bytes: int
    def __init__(self, used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class WriterGone(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class NodeOrder(_message.Message):
    __slots__ = ("sequence", "sync", "sealed", "freed", "sessions")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sync: NodeSync
    sealed: ExtentsSealed
    freed: ExtentsFreed
    sessions: SessionsChanged
    def __init__(self, sequence: _Optional[int] = ..., sync: _Optional[_Union[NodeSync, _Mapping]] = ..., sealed: _Optional[_Union[ExtentsSealed, _Mapping]] = ..., freed: _Optional[_Union[ExtentsFreed, _Mapping]] = ..., sessions: _Optional[_Union[SessionsChanged, _Mapping]] = ...) -> None: ...

class NodeSync(_message.Message):
    __slots__ = ("extents", "sessions", "grace_ms", "committed")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    extents: bytes
    sessions: bytes
    grace_ms: int
    committed: bytes
    def __init__(self, extents: _Optional[bytes] = ..., sessions: _Optional[bytes] = ..., grace_ms: _Optional[int] = ..., committed: _Optional[bytes] = ...) -> None: ...

class ExtentsSealed(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: bytes
    def __init__(self, extents: _Optional[bytes] = ...) -> None: ...

class ExtentsFreed(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: bytes
    def __init__(self, extents: _Optional[bytes] = ...) -> None: ...

class SessionsChanged(_message.Message):
    __slots__ = ("opened", "ended")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    opened: bytes
    ended: bytes
    def __init__(self, opened: _Optional[bytes] = ..., ended: _Optional[bytes] = ...) -> None: ...
