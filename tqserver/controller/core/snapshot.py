"""The durable state as bytes, and back. Arrays travel as they are; what can be derived from them is not kept.

Nothing else of the controller goes on while the state is looked at, so that takes a few milliseconds: what may change
is copied, and what is kept of blocks never does. To put a million of them into bytes takes seconds, and is left to
another thread.
"""

from __future__ import annotations

import gc
import itertools
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient.errors import UnsupportedVersion
from tqclient.schema import Form
from tqclient.wire.v1 import controller_pb2
from tqserver.controller.core.arrays import grown
from tqserver.controller.core.blocks import BlockRecord, BlockTable, Extent, Windows
from tqserver.controller.core.consumer import STATES, Consumer
from tqserver.controller.core.dedup import Replies
from tqserver.controller.core.groups import GroupTable
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.permits import Admitted
from tqserver.controller.core.samples import Column, SampleTable
from tqserver.controller.core.sessions import Claim, Leases, Membership, Session
from tqserver.controller.core.shares import RankGroup, Replica, Share, Sizes
from tqserver.controller.core.state import State
from tqserver.controller.core.versions import LiveVersions

FORMAT: Final = 2
_BLOCK_NUMBERS: Final = {1: 6, FORMAT: 4}
"""By format: of each block. The first had as well how many rows and claims refer to it, which those tell themselves."""
SLICE: Final = 512
"""Blocks, or values of a long list, that are put into bytes at one time: a millisecond."""
PIECE_BYTES: Final = 16 << 10
"""Smaller pieces are put together."""
_COUNTERS: Final = (
    "sequence",
    "epoch",
    "topology_version",
    "next_partition",
    "next_sample",
    "next_block",
    "next_claim",
    "next_session",
    "next_permit",
)
_SAMPLE_ARRAYS: Final = ("ids", "version_min", "version_max", "group", "alive")
# Narrower than in memory where little-endian bytes on disk gain from it.
_SAMPLE_DTYPES: Final = {"ids": "<i8", "version_min": "<i8", "version_max": "<i8", "group": "<i4", "alive": "|b1"}


class Capture:
    """The durable state as it was at one moment, whatever becomes of it from then on."""

    def __init__(self, state: State) -> None:
        leases = state.leases
        claims = [
            [
                *(c.claim_id, c.session, c.partition_id, c.consumer, _bytes(c.ids, "<i8"), list(c.blocks)),
                *(c.lease_ms, c.membership),
            ]
            for c in leases.claims.values()
        ]
        # All of it is made here, copied, or never changes: `chunks` comes later.
        self._tree: dict[str, Any] = {
            "format": FORMAT,
            "counters": [getattr(state, name) for name in _COUNTERS],
            "partitions": [_dump_partition(partition) for partition in state.partitions.values()],
            "blocks": _Blocks(state.blocks),
            "sessions": [[s.session, s.client_id, s.label, s.version] for s in leases.sessions.values()],
            "claims": claims,
            "replies": state.replies.to_tree(),
            "nodes": [node.SerializeToString(deterministic=True) for node in state.nodes.values()],
            "arenas": list(state.arenas.items()),
        }

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes, in pieces that take a millisecond or two each: equal states have equal bytes."""
        gathered: list[bytes] = []
        size = 0
        for piece in _pieces(msgpack.Packer(), self._tree):
            gathered.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES or len(gathered) >= SLICE:
                yield b"".join(gathered)
                gathered, size = [], 0
        yield b"".join(gathered)


def _pieces(packer: Any, value: Any) -> Iterator[bytes]:
    if isinstance(value, _Blocks):
        yield from value.pieces(packer)
    elif isinstance(value, dict):
        yield packer.pack_map_header(len(value))
        for key, inner in value.items():
            yield packer.pack(key)
            yield from _pieces(packer, inner)
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        yield packer.pack_array_header(len(value))
        for inner in value:
            yield from _pieces(packer, inner)
    elif isinstance(value, list):
        yield from _long(packer, value)
    else:
        yield packer.pack(value)


def _long(packer: Any, values: Sequence[Any]) -> Iterator[bytes]:
    """A list of small values, such as a million keys."""
    yield packer.pack_array_header(len(values))
    for low in range(0, len(values), SLICE):
        yield b"".join(map(packer.pack, values[low : low + SLICE]))


def load(data: bytes, now: float, session_lease: float) -> State:
    """Rebuilds what `dump` returned; every lease begins at `now`.

    Raises:
        UnsupportedVersion: a later version of this software wrote it.
    """
    with without_gc():
        tree = msgpack.unpackb(data, strict_map_key=False)
        if tree["format"] not in _BLOCK_NUMBERS:
            raise UnsupportedVersion(f"the snapshot has format {tree['format']}, this controller reads up to {FORMAT}")
        leases = Leases(session_lease)
        state = State(leases)
        # A snapshot of an earlier release has fewer.
        for name, value in zip(_COUNTERS, tree["counters"], strict=False):
            setattr(state, name, value)
        for row in tree["partitions"]:
            partition = _load_partition(row)
            partition.changes.floor = state.sequence
            state.partitions[partition.partition_id] = partition
            state.names[partition.name] = partition.partition_id
        for row in tree["sessions"]:
            leases.sessions[row[0]] = Session(*row)
        for claim_id, session, partition_id, consumer, ids, blocks, lease_ms, *later in tree["claims"]:
            array = np.frombuffer(ids, dtype="<i8").astype(np.int64)
            leases.claims[claim_id] = Claim(claim_id, session, partition_id, consumer, array, blocks, lease_ms)
            if later and later[0] is not None:
                leases.claims[claim_id].membership = Membership(*later[0])
            leases.sessions[session].claims[claim_id] = None
        _load_blocks(state, tree["blocks"], _BLOCK_NUMBERS[tree["format"]])
        _load_places(state)
        leases.restart(now)
        state.replies = Replies.from_tree(tree["replies"])
        nodes = [controller_pb2.Node.FromString(node) for node in tree["nodes"]]
        state.nodes = {node.name: node for node in nodes}
        state.arenas = dict(tree["arenas"])
        return state


@contextmanager
def without_gc() -> Iterator[None]:
    """For what makes a million containers, none of them garbage: to collect in between doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _bytes(array: NDArray[Any], dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _dump_partition(partition: Partition) -> dict[str, Any]:
    samples = partition.samples
    size = samples.size
    return {
        "id": partition.partition_id,
        "name": partition.name,
        "policy": partition.policy.SerializeToString(deterministic=True),
        "accepts_any": partition.accepts_any,
        "sealed": partition.sealed,
        "version": partition.version,
        "metadata": list(partition.metadata.items()),
        "size_bytes": partition.size_bytes,
        "size": size,
        "arrays": [_bytes(getattr(samples, name)[:size], _SAMPLE_DTYPES[name]) for name in _SAMPLE_ARRAYS],
        "keys": list(samples.keys) if any(samples.keys) else None,
        "tags": list(samples.tags) if any(samples.tags) else None,
        "groups": [list(samples.groups.values), list(samples.groups.sizes)],
        "columns": [
            [name, c.form_bytes, _bytes(c.block[:size], "<u8"), _bytes(c.row[:size], "<u4")]
            for name, c in samples.columns.items()
        ],
        "consumers": [
            [
                *(c.name, c.state[:size].tobytes(), _bytes(c.attempts[:size], "<u2"), c.last_fields),
                *(c.grants, list(c.granted_groups), _dump_ranks(c.ranks)),
            ]
            for c in partition.consumers.values()
        ],
        "admitted": partition.admitted.to_tree(),
        "length_ranges": [[name, *found] for name, found in samples.length_ranges.items()],
        "shards": [[shard, list(values.items())] for shard, values in partition.shards.items()],
        "producers": [list(partition.producers), partition.producers_died],
        "final": None if partition.final is None else partition.final.SerializeToString(deterministic=True),
        "lengths": [[name, _bytes(array[:size], "<u4")] for name, array in samples.lengths.items()],
    }


def _dump_ranks(ranks: RankGroup | None) -> list[Any] | None:
    if ranks is None:
        return None
    replicas = [
        [
            *(dp_rank, r.next_step, r.gone, sorted(r.positions.items()), sorted(r.seen)),
            [_dump_share(share) for share in r.shares.values()],
        ]
        for dp_rank, r in sorted(ranks.replicas.items())
    ]
    holders = [[*place, *held] for place, held in sorted(ranks.holders.items())]
    return [list(ranks.sizes), holders, replicas, ranks.complete]


def _dump_share(s: Share) -> list[Any]:
    attempts = 0  # what was before a consumer's attempts told it
    fixed = [s.step, _bytes(s.ids, "<i8"), s.spec, list(s.fields), attempts, s.rows, list(s.blocks)]
    return [*fixed, sorted(s.claims.items()), sorted(s.done), s.consumed]


def _load_ranks(tree: list[Any] | None) -> RankGroup | None:
    if tree is None:
        return None
    sizes, holders, replicas, *later = tree
    ranks = RankGroup(Sizes(*sizes), complete=any(later))  # an earlier snapshot does not say it
    ranks.holders = {(dp_rank, member): (session, rank) for dp_rank, member, session, rank in holders}
    for dp_rank, next_step, gone, positions, seen, shares in replicas:
        replica = ranks.replicas[dp_rank] = Replica(next_step, positions=dict(positions), seen=set(seen), gone=gone)
        for step, ids, spec, fields, _, rows, blocks, claims, done, consumed in shares:
            array = np.frombuffer(ids, dtype="<i8").astype(np.int64)
            replica.shares[step] = Share(
                step, array, spec, tuple(fields), rows, blocks, dict(claims), set(done), consumed
            )
    return ranks


def _load_places(state: State) -> None:
    for partition in state.partitions.values():
        for session in partition.producers:
            state.leases.sessions[session].producing[partition.partition_id] = None
        for permit in partition.admitted.permits.values():
            state.leases.sessions[permit.session].permits[permit.permit] = partition.partition_id
        for consumer in partition.consumers.values():
            for session, _ in consumer.ranks.holders.values() if consumer.ranks is not None else ():
                state.leases.sessions[session].consumers[partition.partition_id, consumer.name] = None


def _array(data: bytes, dtype: str, capacity: int) -> NDArray[Any]:
    source = np.frombuffer(data, dtype=dtype)
    native = source.dtype.newbyteorder("=")
    return grown(source.astype(native, copy=False), capacity)


def _load_partition(row: dict[str, Any]) -> Partition:
    policy = controller_pb2.Policy.FromString(row["policy"])
    partition = Partition(row["id"], row["name"], policy, row["accepts_any"])
    partition.sealed = row["sealed"]
    partition.version = row["version"]
    partition.metadata = dict(row["metadata"])
    partition.size_bytes = row["size_bytes"]
    samples = partition.samples
    _load_samples(samples, row)
    _load_lifecycle(partition, row)
    _load_admitted(partition, row)
    for name, state, attempts, last_fields, *later in row["consumers"]:
        consumer = Consumer(name, 0, samples)
        if later:  # a snapshot of the first release ends before it
            consumer.grants, granted, ranks = later
            consumer.ranks = _load_ranks(ranks)
            consumer.granted_groups = dict.fromkeys(granted)
        consumer.state = _array(state, "|u1", samples.capacity)
        consumer.attempts = _array(attempts, "<u2", samples.capacity)
        consumer.counts = np.bincount(consumer.state[: samples.size], minlength=STATES).astype(np.int64)
        consumer.last_fields = None if last_fields is None else tuple(last_fields)
        partition.consumers[name] = consumer
        consumer.changes = partition.changes
    if partition.retired:
        partition.give_up_room()
    return partition


def _load_lifecycle(partition: Partition, row: dict[str, Any]) -> None:
    # A snapshot of an earlier release has none of it.
    partition.shards = {shard: dict(values) for shard, values in row.get("shards", ())}
    sessions, partition.producers_died = row.get("producers", ((), False))
    partition.producers = dict.fromkeys(sessions)
    if row.get("final") is not None:
        partition.final = controller_pb2.Partition.FromString(row["final"])


def _load_admitted(partition: Partition, row: dict[str, Any]) -> None:
    if "admitted" in row:
        partition.admitted = Admitted.from_tree(row["admitted"])
    else:  # of an earlier release, which counted none of it
        partition.admitted.inserted = partition.admitted.accepted = partition.samples.live
    if partition.live_versions is not None:
        partition.live_versions = LiveVersions(partition.samples)


def _load_samples(samples: SampleTable, row: dict[str, Any]) -> None:
    size = samples.size = row["size"]
    capacity = max(samples.capacity, size)
    for name, data in zip(_SAMPLE_ARRAYS, row["arrays"], strict=True):
        array = _array(data, _SAMPLE_DTYPES[name], capacity)
        setattr(samples, name, array.astype(np.int64) if name == "group" else array)
    samples.live = int(np.count_nonzero(samples.alive[:size]))
    samples.keys = [""] * size if row["keys"] is None else row["keys"]
    samples.tags = [b""] * size if row["tags"] is None else row["tags"]
    samples.keyed, samples.tagged = row["keys"] is not None, row["tags"] is not None
    samples.groups = GroupTable(*row["groups"])
    for name, form, block, rows in row["columns"]:
        column = Column(Form.from_bytes(form), form, _array(block, "<u8", capacity), _array(rows, "<u4", capacity))
        column.written = int(np.count_nonzero(column.block))
        samples.columns[name] = column
    samples.lengths = {name: _array(data, "<u4", capacity) for name, data in row.get("lengths", ())}
    samples.length_ranges = {name: (low, high) for name, low, high in row.get("length_ranges", ())}
    if samples.tagged:
        samples.shards.set(np.arange(size), samples.tags, capacity)


class _Blocks:
    """Blocks as they are now: of what is kept of a record, nothing ever changes."""

    def __init__(self, table: BlockTable) -> None:
        self._records = list(table.live.values())
        self._windows, self._retired = table.windows.to_tree(), dict(table.windows.retired)

    def pieces(self, packer: Any) -> Iterator[bytes]:
        """Yields them as `_load_blocks` takes them."""
        records, nodes = self._records, dict[str, int]()
        slices = [slice(low, low + SLICE) for low in range(0, len(records), SLICE)]
        yield packer.pack_map_header(6)
        yield packer.pack("numbers")
        yield _bin_header(_BLOCK_NUMBERS[FORMAT] * 8 * len(records))
        for part in slices:
            numbers = [(r.block_id, r.partition_id, r.rows, len(r.extents)) for r in records[part]]
            yield np.array(numbers, dtype="<u8").tobytes()
        yield packer.pack("extents")
        yield _bin_header(5 * 8 * sum(len(record.extents) for record in records))
        for part in slices:
            places = [
                (nodes.setdefault(e.node, len(nodes)), e.arena, e.offset, e.length, e.generation)
                for record in records[part]
                for e in record.extents
            ]
            yield np.array(places, dtype="<u8").tobytes()
        yield packer.pack("nodes")
        yield packer.pack(list(nodes))
        yield packer.pack("directories")
        yield from _long(packer, [record.directory for record in records])
        yield packer.pack("windows")
        yield from _pieces(packer, self._windows)
        yield packer.pack("retired_windows")
        yield from _pieces(packer, self._retired)


def _bin_header(size: int) -> bytes:
    """What msgpack has before so many bytes."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    return struct.pack(">BH", 0xC5, size) if size < 1 << 16 else struct.pack(">BI", 0xC6, size)


def _load_blocks(state: State, tree: dict[str, Any], width: int) -> None:
    places = np.frombuffer(tree["extents"], dtype="<u8").reshape(-1, 5)
    nodes = [tree["nodes"][at] for at in places[:, 0].tolist()]
    extents = list(map(Extent, nodes, *(places[:, column].tolist() for column in range(1, 5))))
    numbers = np.frombuffer(tree["numbers"], dtype="<u8").reshape(-1, width)
    ids, partitions, rows = (numbers[:, column].tolist() for column in range(3))
    ends = np.cumsum(numbers[:, -1]).tolist()
    groups = [tuple(extents[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=False)]
    references, claimed = _references(state, numbers[:, 0]), _claimed(state)
    claims = map(claimed.get, ids, itertools.repeat(0)) if claimed else itertools.repeat(0)
    records = map(BlockRecord, ids, partitions, rows, groups, tree["directories"], references, claims)
    state.blocks.live = dict(zip(ids, records, strict=True))
    state.blocks.windows = Windows.from_tree(tree["windows"], tree.get("retired_windows", {}))


def _references(state: State, ids: NDArray[np.uint64]) -> list[int]:
    """Live (sample, field) pairs that lie in each block.

    Args:
        state: with its partitions.
        ids: of the blocks, uint64, ascending: a later block has a higher one.
    """
    counts = np.zeros(len(ids), np.int64)
    for partition in state.partitions.values():
        for column in partition.samples.columns.values():
            written = column.block[: partition.samples.size]
            counts += np.bincount(np.searchsorted(ids, written[written > 0]), minlength=len(ids))
    found: list[int] = counts.tolist()
    return found


def _claimed(state: State) -> Counter[int]:
    """Claims, and shares of DP ranks, that cover each block that some do."""
    counts = Counter(block_id for claim in state.leases.claims.values() for block_id in claim.blocks)
    for partition in state.partitions.values():
        for consumer in partition.consumers.values():
            for share in consumer.shares():
                counts.update(share.blocks)
    return counts
