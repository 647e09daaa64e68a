"""The pure core: commands go in, replies and effects come out. No I/O, no clock, no other thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, TQError
from tqclient.wire.packing import I64, U32, pack_array
from tqclient.wire.v1 import common_pb2, controller_pb2, journal_pb2
from tqserver.controller.core import (
    admission,
    claims,
    commit,
    firstlook,
    invariants,
    lifecycle,
    limits,
    membership,
    producers,
    ranks,
    reads,
    retire,
    rowcommands,
    snapshot,
    validate,
)
from tqserver.controller.core.admission import Demand
from tqserver.controller.core.blocks import BlockRecord
from tqserver.controller.core.changes import Listing
from tqserver.controller.core.claims import Readiness
from tqserver.controller.core.consumer import DEAD, STALE, SURPLUS
from tqserver.controller.core.dedup import REPLY_TYPES
from tqserver.controller.core.effects import Changed, Effect, ReadinessChanged
from tqserver.controller.core.rows import blocks_of, write_rows
from tqserver.controller.core.sessions import Leases, Session
from tqserver.controller.core.state import Effects, State

Handler = Callable[[State, Any, float, Effects], "Message | None"]

HANDLERS: Final[dict[str, Handler]] = {
    "open_session": membership.open_session,
    "close_session": membership.close_session,
    "create_partition": lifecycle.create_partition,
    "seal_partition": lifecycle.seal_partition,
    "delete_partition": lifecycle.delete_partition,
    "set_metadata": lifecycle.set_metadata,
    "set_version": lifecycle.set_version,
    "commit": commit.commit,
    "clear": rowcommands.clear,
    "set_tags": rowcommands.set_tags,
    "claim": claims.claim,
    "settle": claims.settle,
    "reset_consumer": claims.reset_consumer,
    "requeue": claims.requeue,
    "register_rank": ranks.register_rank,
    "acquire_permit": admission.acquire_permit,
    "return_permit": admission.return_permit,
    "register_producer": producers.register_producer,
    "unregister_producer": producers.unregister_producer,
    "end_session": membership.end_session,
    "expire_claim": claims.expire_claim,
    "dissolve_replica": ranks.dissolve_replica,
    "complete_ranks": ranks.complete_ranks,
    "attach_node": membership.attach_node,
    "start": membership.start,
}
"""Command kind → what applies it. A handler raises before it changes anything, or not at all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command.

    Attributes:
        reply: to a client's command that was applied; its `Rows.blocks` are the shell's to fill in.
        error: why the command changed nothing.
        effects: what the shell has to do now, in order.
        repeated: the request had been applied before; the reply is the recorded one.
    """

    reply: Message | None
    error: TQError | None
    effects: tuple[Effect, ...]
    repeated: bool = False


class Core:
    """The controller's state, and the only thing that changes it.

    Durable state is a function of the commands applied, in their order. `now` (seconds of a monotonic clock) only moves
    deadlines; leases, read pins and the grace after a start are volatile and are in no snapshot.

    Args:
        session_lease: seconds that a session lives without a heartbeat.
    """

    def __init__(self, *, session_lease: float = 10.0) -> None:
        self._state = State(Leases(session_lease))

    @property
    def sequence(self) -> int:
        """Journal sequence of the last command applied."""
        return self._state.sequence

    @property
    def epoch(self) -> int:
        """Starts of the controller."""
        return self._state.epoch

    @property
    def topology_version(self) -> int:
        """Changes of the set of storage nodes."""
        return self._state.topology_version

    @property
    def arenas(self) -> Mapping[int, str]:
        """Every arena that ever attached → the name of its node."""
        return self._state.arenas

    # Commands.

    def check(self, command: journal_pb2.Command) -> None:
        """Refuses, before it is journaled, a command that no state could make valid.

        Raises:
            InvalidArgument: packed arrays, names, limits.
            UnsupportedVersion: of the wire.
        """
        kind, body = _body(command)
        if kind in REPLY_TYPES:
            validate.mutation(body.mutation)
        check = validate.CHECKS.get(kind)
        unpacked = None if check is None else check(body)
        if isinstance(unpacked, validate.Commit):
            self._state.checked.add(body, unpacked)

    def recorded(self, mutation: common_pb2.Mutation, kind: str) -> Message | None:
        """Returns the reply that this request, a command of this kind, was given, if it was applied.

        Raises:
            InvalidArgument: it was applied or settled, and its reply is no longer known; or it was another kind.
        """
        return self._state.replies.recorded(mutation, kind)

    def apply(self, command: journal_pb2.Command, now: float, sequence: int) -> Outcome:
        """Applies one command.

        Args:
            command: as it was journaled.
            now: monotonic seconds.
            sequence: of its journal record.

        Returns:
            The outcome. An error means that nothing has changed; anything but a TQError that is raised is a bug, after
            which this object must not be used.
        """
        kind, body = _body(command)
        state = self._state
        state.sequence = sequence
        effects: Effects = []
        try:
            if kind not in REPLY_TYPES:
                HANDLERS[kind](state, body, now, effects)
                self._conclude(now, effects)
                return Outcome(None, None, tuple(effects))
            validate.mutation(body.mutation)
            recorded = state.replies.recorded(body.mutation, kind)
            if recorded is not None:
                return Outcome(recorded, None, (), repeated=True)
            state.replies.admit(body.mutation)
            state.chosen = command.chosen_ids
            reply = HANDLERS[kind](state, body, now, effects)
        except TQError as error:
            return Outcome(None, error, ())
        finally:
            state.chosen = None
        if reply is None:
            raise AssertionError(f"{kind} has no reply")
        if self._conclude(now, effects, getattr(body, "partition_id", 0)) and isinstance(
            reply, controller_pb2.PartitionReply
        ):
            reply.partition.CopyFrom(state.partition(body.partition_id).describe())
        state.replies.record(body.mutation, kind, reply)
        return Outcome(reply, None, tuple(effects))

    def _conclude(self, now: float, effects: Effects, named: int = 0) -> bool:
        """Retires partitions that a command completed, and closes its changes; says whether one retired."""
        changed = dict.fromkeys(each.partition_id for each in effects if isinstance(each, ReadinessChanged))
        done = [each for pid in changed if (each := self._state.partitions.get(pid)) and retire.is_done(each)]
        for partition in done:
            retire.retire(self._state, partition, now, effects)
        touched = dict.fromkeys((*changed, named)) if named else changed
        for partition_id in touched:
            found = self._state.partitions.get(partition_id)
            if found is not None and found.changes.end_command(self._state.sequence):
                effects.append(Changed(partition_id))
                if found.retired:
                    self._state.retired.keep(partition_id, found.changes)
        return bool(done)

    # Leases.

    def due(self, now: float) -> list[journal_pb2.Command]:
        """Returns the ends of the leases that ran out, to be journaled and applied. From here on they can't be renewed.

        What is not applied within `limits.DUE_AGAIN_S` is returned again.
        """
        orphans = [key for key, deadline in self._state.orphans.items() if deadline <= now]
        for key in orphans:
            self._state.orphans[key] = now + limits.DUE_AGAIN_S
        commands = [
            journal_pb2.Command(end_session=journal_pb2.EndSession(session=found.session))
            if isinstance(found, Session)
            else journal_pb2.Command(expire_claim=journal_pb2.ExpireClaim(claim_id=found.claim_id))
            for found in self._state.leases.pop_due(now)
        ]
        return [*commands, *map(ranks.given_up, orphans)]

    def next_deadline(self) -> float | None:
        """Returns when `due` or `collect` has something to do next, in monotonic seconds."""
        orphans = min(self._state.orphans.values(), default=None)
        times = (self._state.leases.next_deadline(), self._state.blocks.collect_deadline(), orphans)
        return min((time for time in times if time is not None), default=None)

    def heartbeat(self, session: int, dropped_pins: Iterable[int], now: float) -> tuple[int, tuple[Effect, ...]]:
        """Renews a session and its claims, and drops read pins.

        Returns:
            The shortest lease among them, in milliseconds, and what was freed.

        Raises:
            LeaseExpired: the session has ended.
        """
        lease_ms = self._state.leases.renew(session, now)
        return lease_ms, self.drop_pins(session, dropped_pins, now)

    def hold_pins(self, session: int, held: bytes) -> None:
        """Takes read pins again that were given before a start; see `reads.hold`."""
        reads.hold(self._state, session, held)

    def renew_claim(self, session: int, claim_id: int, now: float) -> int:
        """Renews one claim; returns its lease in milliseconds.

        Raises:
            LeaseExpired: it has ended, or is another session's.
        """
        return self._state.leases.renew_claim(claim_id, session, now)

    # Waiting.

    def readiness(self, request: controller_pb2.ClaimRequest) -> Readiness:
        """Says what a claim would meet now; the cost does not depend on the partition's size (but at the first look).

        Raises:
            TQError: whatever the claim would be refused with, other than ClaimTimeout and Sealed.
        """
        return claims.readiness(self._state, request)

    def first_look(self, request: controller_pb2.ClaimRequest | controller_pb2.ClearRequest) -> Iterator[None]:
        """Takes, in steps, the look at all samples that a request, which `check` let pass, is the first to need."""
        return firstlook.steps(self._state, request)

    def ready_count(self, request: controller_pb2.ClaimRequest) -> int:
        """Returns how many samples are ready for this claim; raises as `readiness`."""
        return claims.ready_count(self._state, request)

    def choose(self, command: journal_pb2.Command) -> None:
        """Writes into a claim, before it is journaled, what a user's sampler chooses for it.

        Raises:
            TQError: the sampler raised, or chose what it may not; or whatever the claim is refused with.
        """
        if command.HasField("claim"):
            command.chosen_ids = claims.choice(self._state, command.claim)

    def foretell(self, request: controller_pb2.ClaimRequest) -> controller_pb2.BlockWrite | None:
        """Returns the block that a claim would be granted now, all of it, in its order; None: it would get others.

        Smaller blocks than `limits.FORETOLD_BYTES_MIN` are not looked for. Raises as `readiness`.
        """
        return claims.foretell(self._state, request)

    def countable(self, request: controller_pb2.ClaimRequest) -> bool:
        """Says whether any `batch_size` ready samples meet a claim, which `check` let pass."""
        return claims.countable(self._state, request)

    def is_outsized(self, request: controller_pb2.ClaimRequest) -> bool:
        """Says whether a claim asks for more samples than its partition may hold: only a seal can meet it."""
        return claims.is_outsized(self._state, request)

    def is_made(self, request: controller_pb2.ClaimRequest) -> bool:
        """Says whether a claim is a rank's, and is given next what another rank's claim made for it."""
        return ranks.is_made(self._state, request)

    def rows_wanted(self, request: controller_pb2.ClaimRequest) -> int:
        """Returns how many samples must be ready for a claim, at least, if nothing else changes; 0: unknown."""
        return ranks.rows_wanted(self._state, request)

    def demand(self, request: controller_pb2.CommitRequest | controller_pb2.AcquirePermitRequest) -> Demand:
        """Says which limits a put or a permit draws on, and which of them hold it back now.

        Raises:
            PartitionNotFound: it is gone.
            InvalidArgument: there never will be room for it; or it does not parse.
        """
        return admission.demand_of(self._state, request)

    def room_queue(self, request: controller_pb2.CommitRequest | controller_pb2.AcquirePermitRequest) -> object:
        """Returns what puts and permits have in common that draw on the same limits."""
        return admission.queue_of(self._state, request)

    def place(self, partition_id: int) -> str:
        """Returns what a partition is called in a message."""
        return str(self._state.partitions.get(partition_id, f"partition {partition_id}"))

    def rate_note(self, request: controller_pb2.ClaimRequest) -> str:
        """Says what else than too few samples holds a claim back, to end a message with; raises as `readiness`."""
        return claims.rate_note(self._state, request)

    # Reads.

    def describe_partition(self, partition_id: int, name: str = "") -> controller_pb2.Partition:
        """Returns a partition by id, or by name when the id is 0; raises PartitionNotFound."""
        return self._state.partition(partition_id, name).describe()

    def list_partitions(self, prefix: str = "") -> Iterator[controller_pb2.Partition]:
        """Yields the partitions whose name begins so, by name, each as it is then; what is gone by then is left out."""
        for name in sorted(name for name in self._state.names if name.startswith(prefix)):
            if name in self._state.names:
                yield self._state.partition(0, name).describe()

    def list_dead(self, partition_id: int, consumer: str) -> controller_pb2.ListDeadReply:
        """Returns the samples that were given up: dead, surplus or stale; raises PartitionNotFound."""
        partition = self._state.partition(partition_id)
        partition.check_consumer(consumer)
        found = partition.consumers.get(consumer)
        if found is None:
            return controller_pb2.ListDeadReply()
        dead, surplus, stale = (
            np.flatnonzero(found.state[: partition.samples.size] == state) for state in (DEAD, SURPLUS, STALE)
        )
        ids = partition.samples.ids
        return controller_pb2.ListDeadReply(
            ids=pack_array(ids[dead], I64),
            attempts=pack_array(found.attempts[dead], U32),
            surplus=pack_array(ids[surplus], I64),
            stale=pack_array(ids[stale], I64),
        )

    def changes(self, partition_id: int, sequence: int) -> list[controller_pb2.Change] | Listing:
        """Returns what changed in a partition after a sequence; a listing when that is not remembered, or never was.

        Raises:
            PartitionNotFound: it is gone.
        """
        partition = self._state.partition(partition_id)
        newer = partition.changes.after(sequence) if sequence <= self._state.sequence else None
        return Listing(partition.samples, self._state.sequence) if newer is None else newer

    def changed_after(self, partition_id: int, sequence: int) -> bool:
        """Says whether a partition changed after a sequence; raises PartitionNotFound."""
        return self._state.partition(partition_id).changes.latest > sequence

    def describe(self) -> controller_pb2.DescribeClusterReply:
        """Returns counts and nodes; what is volatile (waiting claims, links, usage) is the shell's to fill in."""
        state = self._state
        return controller_pb2.DescribeClusterReply(
            epoch=state.epoch,
            topology_version=state.topology_version,
            nodes=state.nodes.values(),
            sessions=len(state.leases.sessions),
            claims=len(state.leases.claims),
            journal_sequence=state.sequence,
        )

    def locate(self, request: controller_pb2.LocateRequest, now: float) -> controller_pb2.LocateReply:
        """Says where samples lie, and pins their blocks.

        `request.dropped_pins` is left alone: the shell passes it to `drop_pins` first, with the pin of a repeat.
        `rows.blocks` is left empty.

        Raises:
            PartitionNotFound: it is gone.
            SampleNotFound: naming every missing id, key or unwritten field; nothing is pinned then.
            LeaseExpired: the session has ended.
            InvalidArgument: the request is malformed, or the session holds too many pins.
        """
        state = self._state
        session = state.leases.session(request.session)
        if request.pin >= limits.PIN_CHOSEN_MAX or request.pin in session.pins:
            raise InvalidArgument(f"pin {request.pin}: choose one that is not held, below {limits.PIN_CHOSEN_MAX}")
        if len(session.pins) >= limits.PINS_PER_SESSION_MAX:
            raise InvalidArgument(f"session {session.session} holds {limits.PINS_PER_SESSION_MAX} read pins, the most")
        partition = state.partition(request.partition_id)
        fields = tuple(validate.names("field", request.fields, wire_limits.FIELDS_MAX))
        fields = fields or tuple(partition.samples.columns)
        slots = reads.located(partition, request)
        reads.check_written(partition, slots, fields)
        block_ids = blocks_of(partition.samples, slots, fields)
        state.blocks.pin(block_ids)
        state.last_pin += 1
        # A drawn pin of before a restart names nothing now.
        pin = request.pin or state.epoch * limits.PIN_CHOSEN_MAX + state.last_pin
        session.pins[pin] = block_ids
        reply = controller_pb2.LocateReply(pin=pin)
        write_rows(reply.rows, partition.samples, slots, fields, runs=request.runs)
        partition.write_fields(reply.fields, fields)
        return reply

    def drop_pins(self, session: int, pins: Iterable[int], now: float) -> tuple[Effect, ...]:
        """Drops read pins; those that are unknown (of before a restart) are passed over. Returns what was freed.

        Raises:
            LeaseExpired: the session has ended.
        """
        held = self._state.leases.session(session).pins
        effects: Effects = []
        for pin in pins:
            effects += self._state.blocks.unpin(held.pop(pin, ()), now)
        return tuple(effects)

    def collect(self, now: float) -> tuple[Effect, ...]:
        """Frees what only the grace period after a start kept."""
        return tuple(self._state.blocks.collect(now))

    def is_live(self, session: int) -> bool:
        """Says whether a session has not ended."""
        return session in self._state.leases.sessions

    def block(self, block_id: int) -> BlockRecord | None:
        """Returns a block (extents, directory, rows) whose bytes are still there."""
        return self._state.blocks.get(block_id)

    def node(self, name: str) -> controller_pb2.Node | None:
        """Returns a storage node that has attached."""
        return self._state.nodes.get(name)

    def is_used(self, arena: int) -> bool:
        """Says whether blocks lie in an arena."""
        return self._state.blocks.lies_in(arena)

    def node_sync(self, node: str, arena: int) -> tuple[Iterator[NDArray[np.uint64]], NDArray[np.uint64]]:
        """Returns all that a node has to know.

        Returns:
            extents: arrays of uint64 [n, 4]: offset, length, generation, partition_id; what is neither here nor
                reserved is free. Each is made when it is asked for, and says what was so at this call.
            sessions: uint64 [m]: live ones.
        """
        sessions = np.fromiter(self._state.leases.sessions, dtype=np.uint64)
        return self._state.blocks.extents_of(node, arena), sessions

    def committed(self, arena: int) -> NDArray[np.uint64]:
        """Returns uint64 [n, 3] (generation, start, end): bytes that were ever committed in windows of an arena."""
        return self._state.blocks.windows.committed(arena)

    def grace_ms(self, now: float) -> int:
        """Returns for how long a node is to keep what it has sealed and `node_sync` does not name, in milliseconds."""
        return int(self._state.blocks.grace_left(now) * 1000)

    # Snapshots.

    def capture(self) -> snapshot.Capture:
        """Returns the durable state as it is now, to be put into bytes later."""
        return snapshot.Capture(self._state)

    def snapshot(self) -> bytes:
        """Returns the durable state; equal states have equal bytes."""
        return b"".join(self.capture().chunks())

    @classmethod
    def restore(cls, data: bytes, now: float, *, session_lease: float = 10.0) -> Core:
        """Returns a core in the state that `snapshot` returned; every lease begins at `now`.

        Raises:
            UnsupportedVersion: a later version of this software wrote it.
        """
        core = cls.__new__(cls)
        core._state = snapshot.load(data, now, session_lease)
        return core

    def check_invariants(self) -> None:
        """Raises AssertionError when counts do not add up or indexes disagree. Slow: for tests."""
        invariants.check(self._state)


def _body(command: journal_pb2.Command) -> tuple[str, Any]:
    kind = command.WhichOneof("body")
    if kind is None:
        raise InvalidArgument("the command is empty, or of a later version")
    return kind, getattr(command, kind)
