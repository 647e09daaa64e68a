"""What a claim asks for, looked at against the state; and what granting rows does to a consumer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tqclient import limits as wire_limits
from tqclient.errors import ClaimTimeout, InvalidArgument, ProducersGone, Sealed, TQError
from tqclient.wire.packing import I64, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import limits, validate
from tqserver.controller.core.consumer import LEASED, SURPLUS, Consumer
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.ratelimit import RateLimiter
from tqserver.controller.core.samplers import Sampler, SampleRequest
from tqserver.controller.core.samplers.budget import Budget
from tqserver.controller.core.samplers.custom import Journaled
from tqserver.controller.core.samples import Slots
from tqserver.controller.core.state import State
from tqserver.controller.core.view import View


class Wanted(NamedTuple):
    """A ClaimRequest and what it is about."""

    request: pb.ClaimRequest
    partition: Partition
    consumer: Consumer
    view: View
    sampler: Sampler
    sample: SampleRequest
    budget: Budget | None
    limiter: RateLimiter | None
    fields: tuple[str, ...]
    chosen: Slots | None = None

    @classmethod
    def of(cls, state: State, request: pb.ClaimRequest) -> Wanted:
        """Looks a request up.

        Raises:
            TQError: whatever the claim is refused with, other than ClaimTimeout and Sealed.
        """
        sampler, params = validate.claim(request, chosen=state.chosen) or (Journaled(), {})
        session = state.session_of(request.mutation)
        partition = state.partition(request.partition_id)
        partition.check_consumer(request.consumer)
        if len(session.claims) >= limits.CLAIMS_PER_SESSION_MAX:
            raise InvalidArgument(
                f"session {session.session} holds {limits.CLAIMS_PER_SESSION_MAX} claims, the most it can: settle some"
            )
        consumer = partition.tracked(request.consumer)
        fields = tuple(request.fields)
        view = partition.view(consumer, fields, request.where, unaborted=sampler.whole_groups(params))
        sample = SampleRequest(
            batch_size=request.batch_size or wire_limits.ROWS_PER_CLAIM_MAX,
            final=partition.sealed and consumer.pending(view) == 0,
            params=params,
            samples=partition.samples,
            consumer=consumer,
        )
        limiter = None if partition.sealed else RateLimiter.of(partition.policy, partition.admitted)
        if limiter is not None and not request.max_tokens and (sampler.countable or params.get("size")):
            limiter.check_batch(request.batch_size)
        budget = Budget(request.max_tokens, request.token_field) if request.max_tokens else None
        chosen = partition.samples.find(unpack_array(state.chosen, I64, what="chosen_ids")) if state.chosen else None
        return cls(request, partition, consumer, view, sampler, sample, budget, limiter, fields, chosen)

    def choose(self) -> Slots | None:
        """Returns the rows that it would get now, in delivery order; None: it must wait."""
        slots = self._choose()
        return None if slots is None or self.rate_lacks(slots) else slots

    def _choose(self) -> Slots | None:
        if self.chosen is not None:  # what is not ready any more voids the choice: the claim waits for another one
            ready = self.chosen >= 0
            ready[ready] = self.view.ready[self.chosen[ready]]
            return self.chosen if ready.all() else None
        if self.budget is None:
            return self.sampler.sample(self.view, self.sample)
        return self.budget.choose(self.sampler, self.view, self.sample)

    def rate_lacks(self, slots: Slots) -> str:
        """Returns why the rate limit holds these rows back; empty: it does not."""
        if self.limiter is None:
            return ""
        return self.limiter.lacks_for_claim(int(np.count_nonzero(self.consumer.attempts[slots] == 0)))

    def has(self) -> bool:
        """Whether `choose` would return rows."""
        if self.budget is None and self.limiter is None:
            return self.sampler.has(self.view, self.sample)
        return self.choose() is not None

    @property
    def drained(self) -> bool:
        """Whether one that must wait now would wait for ever. Groups that stay incomplete are never handed out.

        What is ready for another DP rank may yet be this one's.
        """
        done = self.sample.final and not self.consumer.counts[LEASED]
        return done and not self.sampler.has(self.view, self.sample)

    @property
    def orphaned(self) -> bool:
        """Whether nobody is left to make what it waits for: samples, or in a sealed partition their fields."""
        return self.partition.producers_died and not self.sample.final

    def unmet(self) -> TQError:
        """Returns why it is not granted."""
        request, partition = self.request, self.partition
        if self.drained:
            return Sealed(f"{partition} is sealed, and consumer {request.consumer!r} has had all of it")
        if self.orphaned:
            remedy = "Write the fields, or clear those samples" if partition.sealed else "seal() delivers the rest"
            return ProducersGone(
                f"{partition}: every producer is gone, and the last of them died; {self.view.count} samples are ready "
                f"for consumer {request.consumer!r}, {request.batch_size or f'{request.max_tokens} tokens'} wanted, "
                f"{self.consumer.pending(self.view)} lack a field. {remedy}; or start a producer"
            )
        return ClaimTimeout(
            f"{partition}: {self.view.count} samples are ready for consumer {request.consumer!r}, "
            f"{request.batch_size or f'{request.max_tokens} tokens'} are wanted, "
            f"and {self.consumer.pending(self.view)} wait for a field{self.rate_note()}"
        )

    def rate_note(self) -> str:
        """Returns how the rate limit holds the claim back, to end a message with; empty: it does not."""
        lacks = "" if self.limiter is None else self.limiter.lacks_for_claim(self.request.batch_size)
        return f"; {lacks}" if lacks else ""

    def take(self, slots: Slots) -> Consumer:
        """Leases what `choose` returned; returns the consumer, which is one of the partition's from here on."""
        consumer = self.partition.admit(self.request.consumer)
        surplus = self.sampler.surplus(slots, self.sample)
        self.partition.count_delivered(consumer, slots)
        consumer.last_fields = self.view.key.fields if self.fields else ()
        consumer.grants += 1
        consumer.move(surplus, SURPLUS)
        consumer.move(slots, LEASED)
        if self.sampler.whole_groups(self.sample.params):
            samples = self.partition.samples
            first = not consumer.granted_groups
            groups = dict.fromkeys(samples.group[slots].tolist())
            consumer.granted_groups.update(dict.fromkeys(samples.groups.values[group] for group in groups))
            while len(consumer.granted_groups) > limits.GRANTED_GROUPS_MAX:
                del consumer.granted_groups[next(iter(consumer.granted_groups))]
            if first:
                self.partition.drop_broken_groups(consumer, samples.slots())
        return consumer
