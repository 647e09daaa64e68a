"""A service in one object: plays controller, storage node and driver for operations, with faults on demand."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.unit.client.fake_transport import FakeTransport
from tqclient.codec import allocate
from tqclient.errors import (
    BackpressureTimeout,
    ClaimTimeout,
    DuplicateKey,
    LeaseExpired,
    PartitionNotFound,
    SampleNotFound,
    StorageFull,
    TopologyMismatch,
    TQError,
    Unavailable,
)
from tqclient.info import PartitionRef
from tqclient.operations.effects import CONTROLLER, Call, Operation, Sleep, Work
from tqclient.state import ClientState
from tqclient.windows import aligned
from tqclient.wire.packing import I64, U8, U32, U64, pack_array, pack_blobs, unpack_array, unpack_strings
from tqclient.wire.v1 import common_pb2, storage_pb2
from tqclient.wire.v1 import controller_pb2 as pb

T = TypeVar("T")
ARENA_BYTES = 1 << 20
LEASE_MS = 10_000


class Clock:
    """Moves when an operation sleeps, and when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fault:
    """What happens to one call: an error before it is carried out, or after (its reply is lost)."""

    error: BaseException
    reply_lost: bool = False
    before: Callable[[], None] | None = None


@dataclass
class Sample:
    key: str
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)


class FakeNode:
    """A storage node with an arena of `ARENA_BYTES`.

    Attributes:
        node: as the controller describes it.
        path: the transport that leads to it.
        segment: of its engine, when that is mooncake.
        condition: `well`; `away`: calls fail at once; `hung`: calls fail when their time is up.
        full: has room for nothing.
        longest_bytes: of one piece.
        windows: generation → offset, length, until all of it is sealed or it is closed.
        closings: of windows, as they were asked for.
    """

    def __init__(self, service: FakeService, index: int, path: str) -> None:
        self.service = service
        self.node = pb.Node(name=f"n{index}", address=f"node:{index}", arena=7 + index, incarnation=1, attached=True)
        self.node.capacity_bytes = ARENA_BYTES
        self.path = path
        self.segment = "engine-1"
        self.condition = "well"
        self.memory = allocate(ARENA_BYTES)
        self.free_offset = 0
        self.full = False
        self.longest_bytes = ARENA_BYTES
        self.windows: dict[int, tuple[int, int]] = {}
        self.kept = [0]  # ends of what closed windows keep
        self.sealed: Counter[int] = Counter()  # generation → bytes
        self.granted = 0
        self.closings: list[storage_pb2.CloseWindowRequest] = []
        self.transport = FakeTransport(self)
        self.opened = 0

    def open(self, seconds: float) -> FakeTransport:
        """Opens a path, as `open_transport` does: the node describes itself."""
        self.answer(seconds)
        self.opened += 1
        if self.opened > 1:
            self.transport = FakeTransport(self)
        return self.transport

    def answer(self, timeout: float | None) -> None:
        """Answers a call, or fails it as the node's condition demands."""
        if self.condition == "hung":
            assert timeout is not None
            self.service.clock.now += timeout
            raise Unavailable("deadline exceeded")
        if self.condition == "away":
            raise Unavailable("connection refused")

    def lose_arena(self) -> None:
        """Comes back with another arena, which is empty."""
        self.node.arena += 100
        self.node.incarnation += 1
        self.memory = allocate(ARENA_BYTES)
        self.windows.clear()
        self.kept, self.free_offset = [0], 0

    def describe_node(self, request: storage_pb2.DescribeNodeRequest) -> storage_pb2.DescribeNodeReply:
        return storage_pb2.DescribeNodeReply(name=self.node.name)

    def reserve(self, request: storage_pb2.ReserveRequest) -> storage_pb2.Window:
        if request.session not in self.service.sessions:
            raise LeaseExpired("the node does not know the session")
        if request.segment not in ("", self.segment):
            raise Unavailable("the engine was replaced")
        if self.full or request.length > self.longest_bytes or self.free_offset + request.length > ARENA_BYTES:
            raise StorageFull(f"node {self.node.name} has {ARENA_BYTES - self.free_offset} bytes free")
        window = storage_pb2.Window(offset=self.free_offset, length=request.length, incarnation=1)
        self.granted += 1
        window.generation = self.granted
        self.windows[window.generation] = (window.offset, window.length)
        self.free_offset += request.length
        return window

    def seal(self, extent: common_pb2.Extent) -> None:
        """A commit was applied."""
        offset, length = self.windows.get(extent.generation, (0, 0))
        self.sealed[extent.generation] += aligned(extent.length)
        if length and self.sealed[extent.generation] == length:
            del self.windows[extent.generation]
            self.kept.append(offset + length)

    def close_window(self, request: storage_pb2.CloseWindowRequest) -> storage_pb2.CloseWindowReply:
        self.closings.append(request)
        if request.generation not in self.windows:  # of an arena that was lost
            return storage_pb2.CloseWindowReply()
        offset, length = self.windows.pop(request.generation)
        assert offset <= request.end <= offset + length
        self.kept.append(request.end if request.end > offset else 0)
        self.free_offset = max([*self.kept, *(sum(window) for window in self.windows.values())])
        return storage_pb2.CloseWindowReply()


class FakeService:
    """One controller and some nodes; mutations are deduplicated as the real one does it.

    Args:
        paths: the transport to each node.
        replicas: of the partition.
    """

    def __init__(self, *paths: str, replicas: int = 1) -> None:
        self.clock = Clock()
        self.nodes = [FakeNode(self, index, path) for index, path in enumerate(paths or ("shm",))]
        self.first = self.nodes[0]
        self.replicas = replicas
        self.calls: list[tuple[str, Any]] = []
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.sleeps: list[float] = []
        self.sessions: set[int] = set()
        self.samples: dict[int, Sample] = {}
        self.blocks: dict[int, pb.BlockWrite] = {}
        self.forms: dict[str, bytes] = {}
        self.claims: dict[int, list[int]] = {}
        self.leased: set[int] = set()
        self.consumed: list[int] = []
        self.ranks: dict[tuple[int, int], int] = {}
        self.sent_directories: set[int] = set()
        self.directories_per_reply = 1_000
        self.pins: set[int] = set()
        self.epoch = 1
        self.topology_version = 0
        self.narrow_lengths = True
        self._sessions_made = 0
        self._replies: dict[int, Any] = {}
        self.state = ClientState("fake:7700", 30.0, self._open, allocate, clock=self.clock, rng=random.Random(1))

    def _open(self, node: pb.Node, seconds: float) -> FakeTransport:
        return self.at(node.address).open(seconds)

    def at(self, address: str) -> FakeNode:
        """Returns the node behind an address."""
        return next(node for node in self.nodes if node.node.address == address)

    def ref(self) -> PartitionRef:
        """Returns the partition."""
        return PartitionRef(1, "part", {}, self.replicas)

    # Driving.

    def run(self, operation: Operation[T]) -> T:
        """Runs an operation to its end, as a driver does."""
        try:
            effect = next(operation)
            while True:
                try:
                    reply = self.perform(effect)
                except BaseException as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(reply)
        except StopIteration as end:
            result: T = end.value
            return result

    def perform(self, effect: Any) -> Any:
        """Carries one effect out."""
        if isinstance(effect, Sleep):
            self.sleeps.append(effect.seconds)
            self.clock.now += effect.seconds
            return None
        if isinstance(effect, Work):
            return effect.run()
        assert isinstance(effect, Call)
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", effect.method).lower()
        request = type(effect.request)()
        request.CopyFrom(effect.request)
        self.calls.append((effect.method, request))
        if effect.timeout <= 0:
            raise Unavailable(f"{effect.method}: no time left")
        if effect.target != CONTROLLER:
            self.at(effect.target).answer(effect.timeout)
        fault = self.faults[effect.method].pop(0) if self.faults[effect.method] else None
        if fault is not None and fault.before is not None:
            fault.before()
        if fault is not None and not fault.reply_lost:
            raise fault.error
        handler = getattr(self, f"on_{name}") if effect.target == CONTROLLER else getattr(self.at(effect.target), name)
        reply = self._once(request, handler)
        if fault is not None:
            raise fault.error
        return reply

    def _once(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        if "mutation" not in request.DESCRIPTOR.fields_by_name:
            return handler(request)
        mutation = request.mutation
        if mutation.request in self._replies:
            return self._replies[mutation.request]
        if mutation.session and mutation.session not in self.sessions:
            raise LeaseExpired(f"session {mutation.session} has ended")
        reply = self._replies[mutation.request] = handler(request)
        return reply

    def fault(self, method: str, error: BaseException, *, reply_lost: bool = False, before: Any = None) -> None:
        """Lets the next call of a method (or the next `write` or `read`) fail."""
        self.faults[method].append(Fault(error, reply_lost, before))

    def take_fault(self, name: str) -> None:
        if self.faults[name]:
            fault = self.faults[name].pop(0)
            if fault.before is not None:
                fault.before()
            raise fault.error

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.calls)

    def end_sessions(self) -> None:
        """Ends every session, as a missed lease does."""
        self.sessions.clear()
        self.sent_directories.clear()

    # The controller.

    def on_open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionReply:
        self._sessions_made += 1
        self.sessions.add(self._sessions_made)
        return pb.OpenSessionReply(
            session=self._sessions_made,
            lease_ms=LEASE_MS,
            epoch=self.epoch,
            nodes=self._described(),
            narrow_lengths=self.narrow_lengths,
        )

    def _described(self) -> list[pb.Node]:
        return [node.node for node in self.nodes]

    def on_heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        if request.session not in self.sessions:
            raise LeaseExpired("the session has ended")
        self.pins -= set(unpack_array(request.dropped_pins, U64, what="pins").tolist())
        self.pins |= {pin for pin, _ in unpack_array(request.held_pins, U64, what="held", columns=2).tolist()}
        return pb.HeartbeatReply(epoch=self.epoch, lease_ms=LEASE_MS, topology_version=self.topology_version)

    def on_close_session(self, request: pb.CloseSessionRequest) -> pb.CloseSessionReply:
        self.sessions.discard(request.mutation.session)
        return pb.CloseSessionReply()

    def on_describe_cluster(self, request: pb.DescribeClusterRequest) -> pb.DescribeClusterReply:
        return pb.DescribeClusterReply(
            epoch=self.epoch, nodes=self._described(), topology_version=self.topology_version
        )

    def on_create_partition(self, request: pb.CreatePartitionRequest) -> pb.PartitionReply:
        return pb.PartitionReply(partition=self._partition(request.name))

    def on_describe_partition(self, request: pb.DescribePartitionRequest) -> pb.PartitionReply:
        if request.name == "missing":
            raise PartitionNotFound("partition 'missing' does not exist")
        return pb.PartitionReply(partition=self._partition(request.name))

    def _partition(self, name: str) -> pb.Partition:
        policy = pb.Policy(replicas=self.replicas)
        return pb.Partition(partition_id=1, name=name, policy=policy, version=-1, fields=self._fields(self.forms))

    def _fields(self, names: Any) -> list[pb.Field]:
        return [pb.Field(name=name, form=self.forms[name]) for name in names]

    def on_commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        if request.abandoned:
            raise BackpressureTimeout("it was not applied")
        keys = unpack_strings(request.keys, what="keys") if request.HasField("keys") else [""] * request.rows
        skip = unpack_array(request.skip, U8, what="skip").tolist() or [0] * request.rows
        existing = {sample.key: sample_id for sample_id, sample in self.samples.items() if sample.key}
        clashes = [row for row, key in enumerate(keys) if key in existing and not skip[row]]
        if clashes and not request.upsert:
            raise DuplicateKey("exists", rows=clashes, existing_ids=[existing[keys[row]] for row in clashes])
        places = []
        for block in request.blocks:
            assert len({extent.node for extent in block.extents}) == len(block.extents) == self.replicas
            block_id = len(self.blocks) + 100
            self.blocks[block_id] = block
            for extent in block.extents:
                next(node for node in self.nodes if node.node.name == extent.node).seal(extent)
            places += [(block_id, row) for row in range(block.rows)]
        self.forms.update((each.name, each.form) for each in request.fields if each.name not in self.forms)
        ids = unpack_array(request.ids, I64, what="ids").tolist() or [
            existing.get(key) or len(self.samples) + row + 1 for row, key in enumerate(keys)
        ]
        for row, sample_id in enumerate(ids):
            if not skip[row]:
                sample = self.samples.setdefault(sample_id, Sample(keys[row]))
                sample.fields.update((each.name, places[row]) for each in request.fields)
        return pb.CommitReply(ids=pack_array(ids, I64), fields=self._fields(self.forms))

    def on_locate(self, request: pb.LocateRequest) -> pb.LocateReply:
        if request.session not in self.sessions:
            raise LeaseExpired("the session has ended")
        ids = unpack_array(request.ids, I64, what="ids").tolist()
        if request.HasField("keys"):
            by_key = {sample.key: sample_id for sample_id, sample in self.samples.items()}
            ids = [by_key[key] for key in unpack_strings(request.keys, what="keys")]
        missing = [each for each in ids if each not in self.samples]
        if missing:
            raise SampleNotFound(f"samples {missing}", ids=missing)
        names = list(request.fields) or list(self.forms)
        assert request.pin
        self.pins -= set(unpack_array(request.dropped_pins, U64, what="pins").tolist())
        self.pins.add(request.pin)
        return pb.LocateReply(pin=request.pin, rows=self._rows(ids, names), fields=self._fields(names))

    def _rows(self, ids: list[int], names: list[str]) -> common_pb2.Rows:
        rows = common_pb2.Rows(ids=pack_array(ids, I64))
        used = set()
        for name in names:
            places = [self.samples[each].fields[name] for each in ids]
            used |= {block for block, _ in places}
            rows.placements.add(
                fields=[name],
                block=pack_array([block for block, _ in places], U64),
                row=pack_array([row for _, row in places], U32),
            )
        for block_id in sorted(used):
            block = self.blocks[block_id]
            directory = b"" if block_id in self.sent_directories else block.directory
            rows.blocks.add(block_id=block_id, extents=block.extents, directory=directory)
            self.sent_directories.add(block_id)
        return rows

    def on_get_directories(self, request: pb.GetDirectoriesRequest) -> pb.GetDirectoriesReply:
        ids = unpack_array(request.block_ids, U64, what="ids").tolist()[: self.directories_per_reply]
        return pb.GetDirectoriesReply(directories=pack_blobs(self.blocks[each].directory for each in ids))

    def on_claim(self, request: pb.ClaimRequest) -> pb.ClaimReply:
        if request.abandoned:
            raise ClaimTimeout("it was not granted")
        taken = self.leased | set(self.consumed)
        ready = [each for each in self.samples if each not in taken][: request.batch_size]
        if len(ready) < request.batch_size:
            self.clock.now += max(0.001, request.wait_ms / 1000)
            raise ClaimTimeout(f"{len(ready)} of {request.batch_size} samples were ready")
        claim_id = len(self.claims) + 1
        self.claims[claim_id] = ready
        self.leased |= set(ready)
        names = list(request.fields) or list(self.forms)
        rows = self._rows(ready, names)
        rows.attempts = pack_array([1] * len(ready), U32)
        return pb.ClaimReply(claim_id=claim_id, lease_ms=LEASE_MS, rows=rows, fields=self._fields(names))

    def on_register_rank(self, request: pb.RegisterRankRequest) -> pb.RegisterRankReply:
        place, session = (request.topology.dp_rank, request.topology.member), request.mutation.session
        if self.ranks.get(place, session) in self.sessions - {session}:
            raise TopologyMismatch(f"session {self.ranks[place]} holds {place}")
        self.ranks[place] = session
        return pb.RegisterRankReply(registered=len(self.ranks))

    def on_renew_claim(self, request: pb.RenewClaimRequest) -> pb.RenewClaimReply:
        if request.session not in self.sessions or request.claim_id not in self.claims:
            raise LeaseExpired("no such claim")
        return pb.RenewClaimReply(lease_ms=LEASE_MS)

    def on_settle(self, request: pb.SettleRequest) -> pb.SettleReply:
        ids = self.claims.pop(request.claim_id, None)
        if ids is None:
            raise LeaseExpired("no such claim")
        self.leased -= set(ids)
        if request.verdict == pb.VERDICT_ACK:
            self.consumed += ids
        return pb.SettleReply()


def gone(_: str = "") -> TQError:
    """The daemon is away."""
    return Unavailable("connection refused")
