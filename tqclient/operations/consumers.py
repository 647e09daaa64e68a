"""Consumers as this client addresses them, and the places of their ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tqclient.arguments import Tags, name_of, names_of, tags_filter
from tqclient.errors import InvalidArgument, TopologyMismatch, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.effects import CONTROLLER, Deadline, Operation, call, pause
from tqclient.operations.sessions import in_session
from tqclient.samplers import Fifo, Sampler, SeqlenBalanced
from tqclient.state import ClientState, Session
from tqclient.topology import Topology
from tqclient.wire.v1 import controller_pb2 as pb

REGISTER_LEASES: Final = 1.5
"""For so many leases of a session a rank waits for its place: one until a dead holder's ends, and some slack."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Registration:
    """The session under which a consumer's rank took its place; 0: none yet."""

    session: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerRef:
    """A consumer as this client addresses it.

    Attributes:
        partition: that it reads.
        name: of the consumer.
        fields: that a sample must have; empty: every field of the partition.
        sampler: how samples are picked.
        topology: place of this process among the consumer's ranks; None: it has none.
        where: packed tags that a sample must have; empty: any.
        token_field: whose lengths `max_tokens` counts; empty: none was named.
        registration: of the rank.
    """

    partition: PartitionRef
    name: str
    fields: tuple[str, ...]
    sampler: Sampler
    topology: Topology | None = None
    where: bytes = b""
    token_field: str = ""
    registration: Registration = field(default_factory=Registration, compare=False)

    @classmethod
    def from_arguments(
        cls,
        partition: PartitionRef,
        name: str,
        *,
        fields: Sequence[str] | None,
        sampler: Sampler | None,
        topology: Topology | None,
        where: Tags | None,
        token_field: str | None = None,
    ) -> ConsumerRef:
        """Checks what `Partition.consumer` was given.

        Raises:
            InvalidArgument: out of bounds.
        """
        chosen = () if fields is None else tuple(names_of(fields, what="fields"))
        if fields is not None and not chosen:
            raise InvalidArgument("fields=[] asks for nothing; None means every field of the partition")
        sampler = Fifo() if sampler is None else sampler
        if not isinstance(sampler, Sampler):
            raise InvalidArgument(f"sampler={sampler!r}: expected a sampler such as tq.Fifo()")
        if topology is not None and not isinstance(topology, Topology):
            raise InvalidArgument(f"topology={topology!r}: expected a tq.Topology")
        if len(set(chosen)) != len(chosen):
            raise InvalidArgument(f"fields={list(chosen)!r} names a field twice")
        if token_field is None:
            token_field = sampler.params["field"] if isinstance(sampler, SeqlenBalanced) else ""
        else:
            name_of(token_field, what="token_field")
        return cls(
            partition,
            name_of(name, what="consumer"),
            chosen,
            sampler,
            topology,
            b"" if where is None else tags_filter(where, what="where"),
            token_field,
        )

    @property
    def label(self) -> str:
        """For messages."""
        return f"partition {self.partition.name!r}, consumer {self.name!r}"


def register(state: ClientState, consumer: ConsumerRef, timeout: float | None = None) -> Operation[int]:
    """Takes the rank's place under the live session. See `Consumer.register`.

    Raises:
        InvalidArgument: the consumer has no topology.
        TopologyMismatch: the rank does not fit those that are registered and live.
    """
    if consumer.topology is None:
        raise InvalidArgument(f"{consumer.label}: only a consumer with a topology has a rank to register")
    deadline = state.deadline(timeout)
    return (yield from in_session(state, deadline, lambda session: register_under(state, consumer, session, deadline)))


def register_under(state: ClientState, consumer: ConsumerRef, session: Session, deadline: Deadline) -> Operation[int]:
    """Registers; a place that seems to be held may be that of a dead rank, whose session ends within its lease."""
    assert consumer.topology is not None
    request = pb.RegisterRankRequest(
        partition_id=consumer.partition.partition_id,
        consumer=consumer.name,
        topology=consumer.topology.to_wire(),
    )
    patience = Deadline(min(deadline.remaining(), REGISTER_LEASES * session.lease_ms / 1000), state.clock)
    backoff = state.backoff()
    refused: TopologyMismatch | None = None
    while True:
        number = state.requests.take()
        request.mutation.CopyFrom(state.mutation(number, session))
        try:
            reply = yield from call(CONTROLLER, "RegisterRank", request, deadline, state.rng)
        except TopologyMismatch as error:
            if refused is None:
                _log.warning("%s: %s; trying again until a dead rank's lease has run out", consumer.label, error)
            refused = error
            yield from pause(backoff, patience, error)
        except Unavailable as silent:
            if refused is None:
                raise
            raise refused from silent  # the last try had too little time; why the place was not to be had is known
        else:
            consumer.registration.session = session.session
            registered: int = reply.registered
            return registered
        finally:
            state.requests.settle(number)
