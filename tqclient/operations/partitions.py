"""Operations on partitions as a whole: make, describe, seal, clear, tag; their metadata and versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arguments import (
    Group,
    Tags,
    flag,
    int_of,
    mapping_of,
    name_of,
    names_of,
    pack_lookup_groups,
    pack_lookup_keys,
    pack_tags,
    row_ids,
    tags_filter,
    text_of,
)
from tqclient.codec import dumps, loads
from tqclient.errors import InvalidArgument
from tqclient.info import PartitionInfo, PartitionRef
from tqclient.operations.effects import CONTROLLER, Operation, Work, call
from tqclient.operations.sessions import close_windows, mutate
from tqclient.policy import Policy
from tqclient.state import ClientState
from tqclient.wire.packing import I64, pack_array, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb


def create_partition(
    state: ClientState,
    name: str,
    consumers: Sequence[str],
    policy: Policy,
    metadata: Mapping[str, Any] | None,
    exist_ok: bool,
    timeout: float | None = None,
) -> Operation[PartitionRef]:
    """Makes a partition, or finds it when it exists and `exist_ok`."""
    deadline = state.deadline(timeout)
    values = {} if metadata is None else mapping_of(metadata, what="metadata")
    request = pb.CreatePartitionRequest(
        name=name_of(name, what="name"),
        consumers=names_of(consumers, what="consumers"),
        policy=policy.to_wire(),
        exist_ok=flag(exist_ok, what="exist_ok"),
        metadata=(yield Work(lambda: _encode_metadata(values))),
    )
    reply = yield from mutate(state, deadline, "CreatePartition", request)
    return PartitionRef.from_wire(reply.partition)


def find_partition(state: ClientState, name: str, timeout: float | None = None) -> Operation[PartitionRef]:
    """Finds a partition by name."""
    request = pb.DescribePartitionRequest(name=name_of(name, what="name"))
    reply = yield from call(CONTROLLER, "DescribePartition", request, state.deadline(timeout), state.rng)
    return PartitionRef.from_wire(reply.partition)


def list_partitions(state: ClientState, prefix: str, timeout: float | None = None) -> Operation[list[PartitionInfo]]:
    """Describes every partition whose name begins with `prefix`."""
    request = pb.ListPartitionsRequest(prefix=text_of(prefix, what="prefix"))
    reply = yield from call(CONTROLLER, "ListPartitions", request, state.deadline(timeout), state.rng)
    return [PartitionInfo.from_wire(partition) for partition in reply.partitions]


def describe_partition(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[pb.Partition]:
    """Describes one partition, and refreshes what is known of its fields."""
    request = pb.DescribePartitionRequest(partition_id=ref.partition_id)
    reply = yield from call(CONTROLLER, "DescribePartition", request, state.deadline(timeout), state.rng)
    ref.fields_changed(reply.partition.fields)
    partition: pb.Partition = reply.partition
    return partition


def partition_info(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[PartitionInfo]:
    """Describes one partition as the user sees it."""
    return PartitionInfo.from_wire((yield from describe_partition(state, ref, timeout)))


def delete_partition(state: ClientState, name: str, timeout: float | None = None) -> Operation[None]:
    """Removes a partition with all its samples."""
    deadline = state.deadline(timeout)
    ref = yield from find_partition(state, name, timeout)
    state.windows.retire(partition_id=ref.partition_id)
    yield from close_windows(state, state.windows.take_closing(), deadline=deadline)
    request = pb.DeletePartitionRequest(partition_id=ref.partition_id)
    yield from mutate(state, deadline, "DeletePartition", request)


def seal(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[None]:
    """Says that no more samples come."""
    deadline = state.deadline(timeout)
    yield from mutate(state, deadline, "SealPartition", pb.SealPartitionRequest(partition_id=ref.partition_id))
    state.windows.retire(partition_id=ref.partition_id)
    yield from close_windows(state, state.windows.take_closing(), deadline=deadline)


def set_version(state: ClientState, ref: PartitionRef, version: int, timeout: float | None = None) -> Operation[None]:
    """Sets the partition's current weight version."""
    checked = int_of(version, what="version", least=0, most=(1 << 63) - 1)
    request = pb.SetVersionRequest(partition_id=ref.partition_id, version=checked)
    yield from mutate(state, state.deadline(timeout), "SetVersion", request)


def set_tags(
    state: ClientState, ref: PartitionRef, ids: Any, tags: Tags | Sequence[Tags], timeout: float | None = None
) -> Operation[None]:
    """Merges tags into those of samples."""
    array = row_ids(ids)
    request = pb.SetTagsRequest(
        partition_id=ref.partition_id, ids=pack_array(array, I64), tags=pack_tags(tags, len(array), deletes=True)
    )
    yield from mutate(state, state.deadline(timeout), "SetTags", request)


def clear(
    state: ClientState,
    ref: PartitionRef,
    ids: Any,
    keys: Sequence[str] | None,
    groups: Sequence[Group] | None,
    tags: Tags | None,
    prefix: str | None,
    timeout: float | None = None,
) -> Operation[NDArray[np.int64]]:
    """Removes the samples that one selector names."""
    given = [name for name, value in _named(ids, keys, groups, tags, prefix) if value is not None]
    if len(given) != 1:
        raise InvalidArgument(
            f"clear: give exactly one of ids, keys, groups, tags and prefix, not {', '.join(given) or 'none'}"
        )
    request = pb.ClearRequest(partition_id=ref.partition_id)
    if ids is not None:
        request.ids = pack_array(row_ids(ids), I64)
    elif keys is not None:
        request.keys.CopyFrom(pack_lookup_keys(keys))
    elif groups is not None:
        request.groups.CopyFrom(pack_lookup_groups(groups))
    elif tags is not None:
        request.tags = tags_filter(tags)
    elif prefix is not None:
        request.prefix = text_of(prefix, what="prefix")
    if tags is None and prefix is None and not (request.ids or request.keys.ends or request.groups.ends):
        return np.empty(0, np.int64)  # selecting nothing removes nothing
    if tags is not None and not tags:
        raise InvalidArgument("clear: tags={} selects nothing in particular; name a tag")
    if prefix == "":
        raise InvalidArgument("clear: prefix='' would select every key; name a prefix, or keys or ids")
    reply = yield from mutate(state, state.deadline(timeout), "Clear", request)
    return unpack_array(reply.ids, I64, what="ids").astype(np.int64)


def _named(*values: Any) -> Iterable[tuple[str, Any]]:
    return zip(("ids", "keys", "groups", "tags", "prefix"), values, strict=True)


def get_metadata(
    state: ClientState, ref: PartitionRef, shard: int | None = None, timeout: float | None = None
) -> Operation[dict[str, Any]]:
    """Returns the values of the partition, or of one of its shards, decoded."""
    partition = yield from describe_partition(state, ref, timeout)
    if shard is None:
        encoded = dict(partition.metadata)
    else:
        encoded = dict(partition.shards[shard].metadata) if shard in partition.shards else {}
    values: dict[str, Any] = yield Work(lambda: {name: loads(value) for name, value in encoded.items()})
    return values


def change_metadata(
    state: ClientState,
    ref: PartitionRef,
    values: Mapping[str, Any],
    deleted: Iterable[str] = (),
    shard: int | None = None,
    timeout: float | None = None,
) -> Operation[None]:
    """Sets and deletes values of the partition, or of one of its shards, all at once."""
    deadline = state.deadline(timeout)
    chosen = mapping_of(values, what="metadata")
    request = pb.SetMetadataRequest(
        partition_id=ref.partition_id,
        set=(yield Work(lambda: _encode_metadata(chosen))),
        delete=names_of(deleted, what="metadata"),
        shard=shard,
    )
    yield from mutate(state, deadline, "SetMetadata", request)


def shard_of(value: Any) -> int:
    """Checks the number of a shard; the controller says how many there may be."""
    return int_of(value, what="shard", least=0, most=(1 << 32) - 1)


def _encode_metadata(values: Mapping[str, Any]) -> dict[str, bytes]:
    encoded = {
        name_of(name, what="metadata name"): dumps(value, path=f"metadata[{name!r}]") for name, value in values.items()
    }
    size = sum(len(name) + len(value) for name, value in encoded.items())
    if size > limits.METADATA_BYTES_MAX:
        raise InvalidArgument(f"metadata: {size} bytes, at most {limits.METADATA_BYTES_MAX}")
    return encoded
