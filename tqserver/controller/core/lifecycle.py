"""Commands on partitions as wholes: create, seal, delete, metadata, weight version."""

from __future__ import annotations

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, PartitionExists
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import effects, limits, ranks, validate
from tqserver.controller.core.partition import Partition, partition_changed
from tqserver.controller.core.retire import check_not_retired
from tqserver.controller.core.state import Effects, State


def create_partition(state: State, request: pb.CreatePartitionRequest, now: float, out: Effects) -> pb.PartitionReply:
    """Applies a CreatePartitionRequest."""
    policy = validate.create_partition(request)
    state.session_of(request.mutation)
    if request.name in state.names:
        return _existing(state.partition(0, request.name), policy, request, out)
    if len(state.partitions) >= limits.PARTITIONS_MAX:
        raise InvalidArgument(f"there are {limits.PARTITIONS_MAX} partitions already, the most there can be")
    partition = Partition(state.next_partition, request.name, policy, accepts_any=not request.consumers)
    state.next_partition += 1
    partition.metadata = {key: request.metadata[key] for key in sorted(request.metadata)}
    for consumer in request.consumers:
        partition.admit(consumer)
    partition.changes.floor = state.sequence
    state.partitions[partition.partition_id] = partition
    state.names[partition.name] = partition.partition_id
    return pb.PartitionReply(partition=partition.describe())


def _existing(
    partition: Partition, policy: pb.Policy, request: pb.CreatePartitionRequest, out: Effects
) -> pb.PartitionReply:
    if not request.exist_ok:
        raise PartitionExists(f"{partition} exists; pass exist_ok=True to use it as it is")
    for field in pb.Policy.DESCRIPTOR.fields:
        known, asked = (
            getattr(value, field.name) if not field.has_presence or value.HasField(field.name) else None
            for value in (partition.policy, policy)
        )
        said = field.name != "keep" or None not in (known, asked)  # who knows no retirement has no say in it
        if said and known != asked:
            raise PartitionExists(f"{partition} exists with {field.name}={known}, not {asked}")
    added = [consumer for consumer in request.consumers if consumer not in partition.consumers]
    if added:
        check_not_retired(partition)
    partition.check_consumer_count(len(added))
    for consumer in added:
        partition.admit(consumer)
    if added:
        out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.PartitionReply(partition=partition.describe())


def seal_partition(state: State, request: pb.SealPartitionRequest, now: float, out: Effects) -> pb.PartitionReply:
    """Applies a SealPartitionRequest."""
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    if not partition.sealed:
        partition.sealed = True
        partition.producers_died = False  # whoever seals knows; from here on, those count that write fields
        partition.changes.add(partition_changed(partition))
        # Puts that wait for room are told at once that there will be none.
        out += (effects.ReadinessChanged(partition.partition_id), effects.RoomChanged(partition.partition_id))
    return pb.PartitionReply(partition=partition.describe())


def delete_partition(
    state: State, request: pb.DeletePartitionRequest, now: float, out: Effects
) -> pb.DeletePartitionReply:
    """Applies a DeletePartitionRequest."""
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    del state.partitions[partition.partition_id], state.names[partition.name]
    state.retired.drop(partition.partition_id)
    for session in partition.producers:
        del state.leases.sessions[session].producing[partition.partition_id]
    for permit in partition.admitted.permits.values():
        del state.leases.sessions[permit.session].permits[permit.permit]
    for consumer in partition.consumers.values():
        ranks.disband(state, partition, consumer, now, out)
    blocks = partition.remove(partition.samples.slots())
    state.emptied(state.blocks.drop_references(blocks), now, out)
    out.append(effects.PartitionGone(partition.partition_id, partition.name))
    return pb.DeletePartitionReply()


def set_metadata(state: State, request: pb.SetMetadataRequest, now: float, out: Effects) -> pb.PartitionReply:
    """Applies a SetMetadataRequest."""
    validate.set_metadata(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    of_shard = request.HasField("shard")
    own = partition.shards.get(request.shard, {}) if of_shard else partition.metadata
    deleted = set(request.delete)
    merged = {key: value for key, value in own.items() if key not in deleted}
    merged.update((key, request.set[key]) for key in sorted(request.set))
    validate.metadata(merged)
    if of_shard:
        _set_shard(partition, request.shard, merged)
    else:
        partition.metadata = merged
    partition.changes.add(partition_changed(partition))
    return pb.PartitionReply(partition=partition.describe())


def _set_shard(partition: Partition, shard: int, values: dict[str, bytes]) -> None:
    shards = {number: own for number, own in partition.shards.items() if number != shard}
    if values:
        shards[shard] = values
    size = sum(len(key) + len(value) for own in shards.values() for key, value in own.items())
    if size > wire_limits.METADATA_BYTES_MAX:
        raise InvalidArgument(
            f"{partition}: {size} bytes of metadata of all shards, at most {wire_limits.METADATA_BYTES_MAX}"
        )
    partition.shards = dict(sorted(shards.items()))


def set_version(state: State, request: pb.SetVersionRequest, now: float, out: Effects) -> pb.PartitionReply:
    """Applies a SetVersionRequest."""
    validate.set_version(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    if request.version < partition.version:
        raise InvalidArgument(f"{partition} is at version {partition.version} already, and {request.version} is older")
    if request.version > partition.version:
        partition.version = request.version
        partition.apply_staleness(partition.samples.slots())
        partition.changes.add(partition_changed(partition))
        out += (effects.ReadinessChanged(partition.partition_id), effects.RoomChanged(partition.partition_id))
    return pb.PartitionReply(partition=partition.describe())
