"""What a request must be before anything else is asked: packed arrays, names, limits. Looks at no state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, UnsupportedVersion
from tqclient.schema import Form
from tqclient.wire.packing import I64, U8, U32, U64, unpack_array, unpack_blobs, unpack_narrow, unpack_strings
from tqclient.wire.v1 import common_pb2, controller_pb2
from tqserver.controller.core import limits
from tqserver.controller.core.arrays import are_distinct
from tqserver.controller.core.blocks import Extent
from tqserver.controller.core.forms import ragged_paths
from tqserver.controller.core.policies import full_policy
from tqserver.controller.core.samplers import OWN, Sampler, name_of, sampler_of
from tqserver.controller.core.samples import LENGTH_UNKNOWN
from tqserver.controller.core.topology import check_topology

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
CLIENT_ID_BYTES: Final = 16


@lru_cache(maxsize=4096)
def name(what: str, value: str) -> str:
    """Checks a partition, consumer, field or metadata name."""
    if not value:
        raise InvalidArgument(f"{what}: the name is empty")
    if len(value.encode()) > wire_limits.NAME_BYTES_MAX:
        raise InvalidArgument(f"{what} {value[:32]!r}…: more than {wire_limits.NAME_BYTES_MAX} bytes of UTF-8")
    if _CONTROL.search(value):
        raise InvalidArgument(f"{what} {value!r}: has a control character")
    return value


def names(what: str, values: Sequence[str], count_max: int) -> list[str]:
    """Checks names that must differ from each other."""
    if len(values) > count_max:
        raise InvalidArgument(f"{what}: {len(values)} names, at most {count_max}")
    checked = [name(what, value) for value in values]
    if len(set(checked)) != len(checked):
        raise InvalidArgument(f"{what}: {next(v for v in checked if checked.count(v) > 1)!r} is named twice")
    return checked


def mutation(value: common_pb2.Mutation) -> None:
    """Checks who asks."""
    if len(value.client_id) != CLIENT_ID_BYTES:
        raise InvalidArgument(f"mutation.client_id: {len(value.client_id)} bytes, expected {CLIENT_ID_BYTES}")
    if value.request == 0:
        raise InvalidArgument("mutation.request: requests are numbered from 1")
    if value.settled_below > value.request:
        raise InvalidArgument(f"mutation.settled_below: {value.settled_below} is above the request, {value.request}")
    if value.settled_until or value.open:
        _open_requests(value)


def _open_requests(value: common_pb2.Mutation) -> None:
    still = unpack_array(value.open, U64, what="mutation.open")
    if len(still) > limits.REPLIES_PER_CLIENT_MAX:
        raise InvalidArgument(f"mutation.open: {len(still)} requests, at most {limits.REPLIES_PER_CLIENT_MAX}")
    if value.request < value.settled_until and value.request not in still:
        raise InvalidArgument(
            f"mutation.open: the request itself, {value.request}, is below settled_until and not open"
        )


def open_session(request: controller_pb2.OpenSessionRequest) -> None:
    """Checks an OpenSessionRequest."""
    if request.wire_version != wire_limits.WIRE_VERSION:
        raise UnsupportedVersion(
            f"the client speaks wire version {request.wire_version}, this controller {wire_limits.WIRE_VERSION}"
        )
    if request.mutation.session:
        raise InvalidArgument("mutation.session: must be 0 in OpenSession")
    for what, value in (("label", request.label), ("version", request.version)):
        if len(value.encode()) > wire_limits.NAME_BYTES_MAX:
            raise InvalidArgument(f"{what}: more than {wire_limits.NAME_BYTES_MAX} bytes")


def create_partition(request: controller_pb2.CreatePartitionRequest) -> controller_pb2.Policy:
    """Checks a CreatePartitionRequest; returns its policy with the defaults filled in."""
    name("partition", request.name)
    names("consumer", request.consumers, wire_limits.CONSUMERS_MAX)
    metadata(request.metadata)
    return full_policy(request.policy)


def metadata(values: Any) -> None:
    """Checks partition-level values: str → bytes."""
    for key in values:
        name("metadata key", key)
    size = sum(len(key) + len(value) for key, value in values.items())
    if size > wire_limits.METADATA_BYTES_MAX:
        raise InvalidArgument(f"{size} bytes of metadata, at most {wire_limits.METADATA_BYTES_MAX}")


def set_metadata(request: controller_pb2.SetMetadataRequest) -> None:
    """Checks a SetMetadataRequest."""
    metadata(request.set)
    if len(request.delete) > limits.DELETED_KEYS_MAX:
        raise InvalidArgument(f"metadata: {len(request.delete)} keys to delete, at most {limits.DELETED_KEYS_MAX}")
    if request.shard >= limits.SHARDS_MAX:
        raise InvalidArgument(f"shard {request.shard}: shards are numbered below {limits.SHARDS_MAX}")
    both = set(request.set) & set(request.delete)
    if both:
        raise InvalidArgument(f"metadata: {sorted(both)[0]!r} is both set and deleted")


def set_version(request: controller_pb2.SetVersionRequest) -> None:
    """Checks a SetVersionRequest."""
    if request.version < 0:
        raise InvalidArgument(f"weight version {request.version} is negative")


def _row_count(what: str, rows: int, rows_max: int) -> None:
    if not 1 <= rows <= rows_max:
        raise InvalidArgument(f"{what}: {rows}, from 1 to {rows_max}")


def sample_ids(data: bytes, *, rows: int | None = None, what: str = "ids") -> NDArray[np.int64]:
    """Unpacks sample ids: int64 [rows]."""
    ids = unpack_array(data, I64, what=what, rows=rows)
    if len(ids) > wire_limits.ROWS_PER_PUT_MAX:
        raise InvalidArgument(f"{what}: {len(ids)} ids, at most {wire_limits.ROWS_PER_PUT_MAX}")
    return ids


def distinct_ids(data: bytes, *, rows: int | None = None) -> NDArray[np.int64]:
    """Unpacks sample ids that must differ from each other."""
    ids = sample_ids(data, rows=rows)
    if not are_distinct(ids):
        raise InvalidArgument("ids: a sample is named twice")
    return ids


def sample_keys(packed: common_pb2.Packed, *, rows: int | None = None) -> list[str]:
    """Unpacks keys; an empty string is no key."""
    keys = unpack_strings(packed, what="keys", rows=rows)
    if len(keys) > wire_limits.ROWS_PER_PUT_MAX:
        raise InvalidArgument(f"keys: {len(keys)} of them, at most {wire_limits.ROWS_PER_PUT_MAX}")
    ends = np.frombuffer(packed.ends, dtype=U32)
    if len(ends) and int(np.diff(ends, prepend=U32.type(0)).max()) > wire_limits.NAME_BYTES_MAX:
        raise InvalidArgument(f"keys: one has more than {wire_limits.NAME_BYTES_MAX} bytes of UTF-8")
    if _CONTROL.search("".join(keys)):
        raise InvalidArgument("keys: one has a control character")
    return keys


def group_values(packed: common_pb2.Packed, *, rows: int | None = None) -> list[bytes]:
    """Unpacks groups, each a msgpack scalar; an empty string is no group."""
    if len(packed.ends) // U32.itemsize > wire_limits.ROWS_PER_PUT_MAX:
        raise InvalidArgument(f"groups: more than {wire_limits.ROWS_PER_PUT_MAX} of them")
    groups = unpack_blobs(packed, what="groups", rows=rows)
    for group in set(groups):
        if group and not isinstance(_unpack("groups", group), int | float | str | bytes):
            raise InvalidArgument("groups: a group is an int, float, str or bytes")
        if len(group) > wire_limits.NAME_BYTES_MAX:
            raise InvalidArgument(f"groups: one has more than {wire_limits.NAME_BYTES_MAX} bytes")
    return groups


def dropped_pins(data: bytes) -> list[int]:
    """Unpacks read pins to drop."""
    pins = unpack_array(data, U64, what="dropped_pins")
    if len(pins) > limits.DROPPED_PINS_MAX:
        raise InvalidArgument(f"dropped_pins: {len(pins)} of them, at most {limits.DROPPED_PINS_MAX}")
    return list(pins.tolist())


def tag_map(data: bytes) -> dict[Any, Any]:
    """Unpacks the tags of one sample."""
    tags = _unpack("tags", data)
    if not isinstance(tags, dict):
        raise InvalidArgument(f"tags: a map is expected, not {type(tags).__name__}")
    _check_depth(tags, limits.TAGS_DEPTH_MAX)
    return tags


def _check_depth(value: Any, depth: int) -> None:
    # Comparing two values recurses as deep as they are nested.
    if isinstance(value, dict | list):
        if depth == 0:
            raise InvalidArgument(f"tags: nested deeper than {limits.TAGS_DEPTH_MAX}")
        for child in value.values() if isinstance(value, dict) else value:
            _check_depth(child, depth - 1)


def tag_maps(packed: common_pb2.Packed, *, rows: int | None = None) -> list[bytes]:
    """Unpacks the tags of samples, each an encoded msgpack map; an empty string is {}."""
    tags = unpack_blobs(packed, what="tags", rows=rows)
    for value in set(tags):
        if len(value) > wire_limits.TAGS_BYTES_MAX:
            raise InvalidArgument(f"tags: {len(value)} bytes for one sample, at most {wire_limits.TAGS_BYTES_MAX}")
        if value:
            tag_map(value)
    return tags


def _unpack(what: str, data: bytes) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidArgument(f"{what}: not msgpack ({error})") from None


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block of a commit."""

    rows: int
    extents: tuple[Extent, ...]
    directory: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """A CommitRequest, unpacked.

    Attributes:
        rows: how many.
        ids: int64 [rows], or None for new samples.
        keys: [rows], or None.
        groups: [rows], or None.
        versions: int64 [2, rows] (min, max), or None.
        tags: [rows], or None.
        fields: name → (form, its bytes).
        blocks: in row order.
        lengths: path of a ragged field → uint32 [rows].
        skip: bool [rows], or None.
        upsert: as in the request.
    """

    rows: int
    ids: NDArray[np.int64] | None
    keys: list[str] | None
    groups: list[bytes] | None
    versions: NDArray[np.int64] | None
    tags: list[bytes] | None
    fields: dict[str, tuple[Form, bytes]]
    blocks: list[BlockWrite]
    skip: NDArray[np.bool_] | None
    upsert: bool
    lengths: dict[str, NDArray[np.uint32]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the extents, replicas included."""
        return sum(extent.length for block in self.blocks for extent in block.extents)


def commit(request: controller_pb2.CommitRequest) -> Commit:
    """Unpacks and checks a CommitRequest."""
    rows = request.rows
    _row_count("rows of a put", rows, wire_limits.ROWS_PER_PUT_MAX)
    wait(request.wait_ms)
    fields = _fields(request.fields)
    parsed = Commit(
        rows=rows,
        ids=distinct_ids(request.ids, rows=rows) if request.ids else None,
        keys=sample_keys(request.keys, rows=rows) if request.HasField("keys") else None,
        groups=group_values(request.groups, rows=rows) if request.HasField("groups") else None,
        versions=_versions(request),
        tags=tag_maps(request.tags, rows=rows) if request.HasField("tags") else None,
        fields=fields,
        blocks=_blocks(request.blocks, rows),
        skip=_skip(request),
        upsert=request.upsert,
        lengths=_lengths(request, fields),
    )
    if parsed.ids is not None and (parsed.keys is not None or parsed.groups is not None):
        raise InvalidArgument("keys and groups come with new samples, not with ids")
    if parsed.keys is not None:
        _check_distinct(parsed.keys)
    return parsed


def _check_distinct(keys: Sequence[str]) -> None:
    named = [key for key in keys if key]
    if len(set(named)) == len(named):
        return
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        if key and first.setdefault(key, row) != row:
            raise InvalidArgument(f"keys: {key!r} is the key of rows {first[key]} and {row}", rows=[first[key], row])


def _versions(request: controller_pb2.CommitRequest) -> NDArray[np.int64] | None:
    if not request.version_min and not request.version_max:
        return None
    low = unpack_array(request.version_min, I64, what="version_min", rows=request.rows)
    high = unpack_array(request.version_max, I64, what="version_max", rows=request.rows)
    if bool(np.any(low > high)) or bool(np.any(low < -1)) or bool(np.any((low == -1) != (high == -1))):
        raise InvalidArgument("version_min, version_max: expected 0 <= min <= max, or -1 for both")
    return np.stack([low, high])


def _lengths(
    request: controller_pb2.CommitRequest, fields: dict[str, tuple[Form, bytes]]
) -> dict[str, NDArray[np.uint32]]:
    known = {path for field, (form, _) in fields.items() for path in ragged_paths(field, form)}
    parsed: dict[str, NDArray[np.uint32]] = {}
    for each in request.lengths:
        what = f"lengths of {each.field[: wire_limits.NAME_BYTES_MAX]!r}"
        if each.field not in known:
            raise InvalidArgument(f"{what}: that is no ragged field of this put")
        if each.field in parsed:
            raise InvalidArgument(f"{what}: the field is named twice")
        parsed[each.field] = unpack_narrow(each.lengths, each.width, what=what, rows=request.rows)
        if bool(np.any(parsed[each.field] == LENGTH_UNKNOWN)):
            raise InvalidArgument(f"{what}: at most {LENGTH_UNKNOWN - 1}")
    return parsed


def _fields(fields: Sequence[controller_pb2.Field]) -> dict[str, tuple[Form, bytes]]:
    if len(fields) > wire_limits.FIELDS_MAX:
        raise InvalidArgument(f"fields: {len(fields)} of them, at most {wire_limits.FIELDS_MAX}")
    size = sum(len(field.form) for field in fields)
    if size > limits.FORMS_BYTES_MAX:
        raise InvalidArgument(f"fields: forms of {size} bytes in all, at most {limits.FORMS_BYTES_MAX}")
    parsed = {name("field", field.name): (Form.from_bytes(field.form), field.form) for field in fields}
    if not parsed or len(parsed) != len(fields):
        raise InvalidArgument("fields: at least one, and each once")
    return parsed


def _blocks(blocks: Sequence[controller_pb2.BlockWrite], rows: int) -> list[BlockWrite]:
    if not 1 <= len(blocks) <= wire_limits.BLOCKS_PER_PUT_MAX:
        raise InvalidArgument(f"blocks: {len(blocks)} of them, from 1 to {wire_limits.BLOCKS_PER_PUT_MAX}")
    if any(block.rows == 0 for block in blocks) or sum(block.rows for block in blocks) != rows:
        raise InvalidArgument(f"blocks: their rows must be above 0 and add up to {rows}")
    parsed = []
    for block in blocks:
        if len(block.directory) > limits.DIRECTORY_BYTES_MAX:
            raise InvalidArgument(f"a directory of {len(block.directory)} bytes, at most {limits.DIRECTORY_BYTES_MAX}")
        parsed.append(BlockWrite(block.rows, tuple(_extent(extent) for extent in block.extents), block.directory))
        extents = parsed[-1].extents
        if len({extent.length for extent in extents}) != 1:
            raise InvalidArgument("extents: a block has at least one, and its replicas are equally long")
        if not len(extents) == len({extent.node for extent in extents}) == len({extent.arena for extent in extents}):
            raise InvalidArgument("extents: the replicas of a block lie on different nodes")
    return parsed


def _extent(extent: common_pb2.Extent) -> Extent:
    if not 1 <= extent.length <= wire_limits.BLOCK_BYTES_MAX:
        raise InvalidArgument(f"an extent of {extent.length} bytes, from 1 to {wire_limits.BLOCK_BYTES_MAX}")
    if extent.offset % wire_limits.EXTENT_ALIGN or extent.offset + extent.length > limits.EXTENT_END_MAX:
        raise InvalidArgument(
            f"an extent at {extent.offset}: expected a multiple of {wire_limits.EXTENT_ALIGN}, "
            f"and an end of at most {limits.EXTENT_END_MAX}"
        )
    return Extent(extent.node, extent.arena, extent.offset, extent.length, extent.generation)


def _skip(request: controller_pb2.CommitRequest) -> NDArray[np.bool_] | None:
    if not request.skip:
        return None
    skip = unpack_array(request.skip, U8, what="skip", rows=request.rows)
    if bool(np.any(skip > 1)):
        raise InvalidArgument("skip: 0 or 1")
    if bool(np.any(skip)) and not request.HasField("keys"):
        raise InvalidArgument("skip: only a row with a key can be skipped")
    return skip.astype(np.bool_)


def wait(wait_ms: int) -> None:
    """Checks how long a call may wait on the server."""
    if wait_ms > wire_limits.WAIT_MAX_MS:
        raise InvalidArgument(f"wait_ms: {wait_ms}, at most {wire_limits.WAIT_MAX_MS}")


def claim(
    request: controller_pb2.ClaimRequest, *, chosen: bytes | None = None
) -> tuple[Sampler, dict[str, Any]] | None:
    """Checks a ClaimRequest; returns its sampler and the parameters.

    Args:
        request: to check.
        chosen: while it is applied, what a user's sampler chose for it, if anything; that sampler may be gone: None.
    """
    if len(request.fields) > wire_limits.FIELDS_MAX:
        raise InvalidArgument(f"field: {len(request.fields)} names, at most {wire_limits.FIELDS_MAX}")
    _selection(request.consumer, tuple(request.fields), request.where)
    if request.batch_size or not request.max_tokens:
        _row_count("batch_size", request.batch_size, wire_limits.ROWS_PER_CLAIM_MAX)
    if bool(request.max_tokens) != bool(request.token_field):
        raise InvalidArgument("max_tokens and token_field: both, or neither")
    wait(request.wait_ms)
    if request.HasField("topology"):
        check_topology(request.topology)
    if chosen or (chosen is not None and name_of(request) not in OWN):
        return None
    return sampler_of(request)


@lru_cache(maxsize=256)
def _selection(consumer: str, fields: tuple[str, ...], where: bytes) -> None:
    """Checks what claims have in common that come again and again."""
    name("consumer", consumer)
    names("field", fields, wire_limits.FIELDS_MAX)
    if len(where) > wire_limits.TAGS_BYTES_MAX:
        raise InvalidArgument(f"where: {len(where)} bytes, at most {wire_limits.TAGS_BYTES_MAX}")
    if where:
        tag_map(where)


def register_rank(request: controller_pb2.RegisterRankRequest) -> None:
    """Checks a RegisterRankRequest."""
    name("consumer", request.consumer)
    check_topology(request.topology)


def acquire_permit(request: controller_pb2.AcquirePermitRequest) -> None:
    """Checks an AcquirePermitRequest."""
    _row_count("samples of a permit", request.samples, wire_limits.PERMIT_SAMPLES_MAX)
    wait(request.wait_ms)


def clear(request: controller_pb2.ClearRequest) -> None:
    """Checks a ClearRequest."""
    chosen = [
        selector
        for selector, present in (
            ("ids", bool(request.ids)),
            ("keys", request.HasField("keys")),
            ("groups", request.HasField("groups")),
            ("tags", bool(request.tags)),
            ("prefix", request.HasField("prefix")),
        )
        if present
    ]
    if len(chosen) > 1:
        raise InvalidArgument(f"samples to clear are selected in one way, not by {' and '.join(chosen)}")
    if chosen == ["prefix"] and not request.prefix:
        raise InvalidArgument("an empty prefix would select every key")
    if len(request.tags) > wire_limits.TAGS_BYTES_MAX:
        raise InvalidArgument(f"tags: {len(request.tags)} bytes, at most {wire_limits.TAGS_BYTES_MAX}")
    if chosen == ["tags"] and not tag_map(request.tags):
        raise InvalidArgument("an empty map of tags would select every sample")
    sample_ids(request.ids)
    sample_keys(request.keys)
    group_values(request.groups)


def set_tags(request: controller_pb2.SetTagsRequest) -> tuple[NDArray[np.int64], list[bytes]]:
    """Unpacks and checks a SetTagsRequest."""
    ids = distinct_ids(request.ids)
    return ids, tag_maps(request.tags, rows=len(ids))


def settle(request: controller_pb2.SettleRequest) -> None:
    """Checks a SettleRequest."""
    if request.verdict not in (controller_pb2.VERDICT_ACK, controller_pb2.VERDICT_RELEASE):
        raise InvalidArgument(f"verdict {request.verdict}: expected ACK or RELEASE")


def requeue(request: controller_pb2.RequeueRequest) -> NDArray[np.int64]:
    """Unpacks and checks a RequeueRequest."""
    name("consumer", request.consumer)
    return distinct_ids(request.ids)


def reset_consumer(request: controller_pb2.ResetConsumerRequest) -> None:
    """Checks a ResetConsumerRequest."""
    name("consumer", request.consumer)


def attach_node(hello: controller_pb2.NodeHello) -> None:
    """Checks a NodeHello."""
    name("node", hello.node.name)
    name("node address", hello.node.address)


CHECKS: Final[dict[str, Any]] = {
    "open_session": open_session,
    "create_partition": create_partition,
    "set_metadata": set_metadata,
    "set_version": set_version,
    "commit": commit,
    "clear": clear,
    "set_tags": set_tags,
    "claim": claim,
    "settle": settle,
    "reset_consumer": reset_consumer,
    "requeue": requeue,
    "register_rank": register_rank,
    "acquire_permit": acquire_permit,
    "attach_node": attach_node,
}
"""Command kind → what checks its request; the others have nothing to check."""
