"""What a claim asks for: tags, token budgets, and as which rank."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import tqclient as tq
from tests.unit.client.fakes import LEASE_MS, FakeService
from tests.unit.client.test_get_and_claim import flip_a_payload_byte
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.errors import CorruptBlock, InvalidArgument, LeaseExpired, TopologyMismatch, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.claims import claim, settle
from tqclient.operations.consumers import ConsumerRef, register
from tqclient.operations.put import put
from tqclient.wire.packing import unpack_narrow

RANK = tq.Topology(dp=2, tp=2, ep=4, rank=3, leader_acks=True, world_size=4)


@pytest.fixture
def filled(service: FakeService, ref: PartitionRef) -> FakeService:
    service.run(put(service.state, ref, {"x": torch.arange(8)}, RowArguments(), None))
    del service.calls[:]
    return service


def consumer(ref: PartitionRef, **arguments: Any) -> ConsumerRef:
    defaults = {"fields": None, "sampler": None, "topology": None, "where": None}
    return ConsumerRef.from_arguments(ref, "trainer", **{**defaults, **arguments})


def do_claim(
    service: FakeService, consumer: ConsumerRef, size: int | None = 2, *, max_tokens: Any = None, timeout: float = 60.0
) -> BatchData:
    handle, delivery = service.run(
        claim(service.state, consumer, size, True, timeout, max_tokens=max_tokens),
    )
    return BatchData(service.state, delivery, handle)


def asked(service: FakeService, method: str) -> list[Any]:
    return [request for name, request in service.calls if name == method]


def test_tags_sampler_and_budget_are_asked_for(filled: FakeService, ref: PartitionRef) -> None:
    which = consumer(ref, where={"status": "finished", "turn": np.int64(2)}, sampler=tq.Lifo(), token_field="x")
    do_claim(filled, which, 2, max_tokens=16_384)
    (request,) = asked(filled, "Claim")
    assert msgpack.unpackb(request.where) == {"status": "finished", "turn": 2}
    assert (request.sampler.name, request.batch_size) == ("lifo", 2)
    assert (request.max_tokens, request.token_field) == (16_384, "x")
    assert not request.HasField("topology")


def test_a_balanced_sampler_says_what_tokens_are(filled: FakeService, ref: PartitionRef) -> None:
    do_claim(filled, consumer(ref, sampler=tq.SeqlenBalanced("images.pixels")), 1, max_tokens=7)
    assert asked(filled, "Claim")[0].token_field == "images.pixels"
    do_claim(filled, consumer(ref, sampler=tq.SeqlenBalanced("images.pixels"), token_field="x"), 1, max_tokens=7)
    assert asked(filled, "Claim")[1].token_field == "x"


@pytest.mark.parametrize(
    ("size", "tokens", "message"),
    [
        (None, None, "give batch_size, max_tokens, or both"),
        (None, 5, r"partition 'train', consumer 'trainer': max_tokens needs .* token_field="),
        (2, 0, "max_tokens=0: expected an int from 1 to"),
        (2, 2.5, "max_tokens=2.5: expected an int"),
        (2, 1 << 63, "max_tokens="),
    ],
)
def test_claims_that_say_too_little(
    filled: FakeService, ref: PartitionRef, size: int | None, tokens: Any, message: str
) -> None:
    which = consumer(ref, token_field="x" if tokens != 5 else None)
    with pytest.raises(InvalidArgument, match=message):
        do_claim(filled, which, size, max_tokens=tokens)
    assert filled.calls == []


def test_the_first_claim_of_a_rank_registers_it(filled: FakeService, ref: PartitionRef) -> None:
    which = consumer(ref, topology=RANK)
    batch = do_claim(filled, which)
    do_claim(filled, which)
    assert [name for name, _ in filled.calls] == ["RegisterRank", "Claim", "Claim"]
    (registered,) = asked(filled, "RegisterRank")
    assert registered.topology == asked(filled, "Claim")[1].topology == RANK.to_wire()
    assert (registered.topology.dp_rank, registered.topology.member, registered.topology.world_size) == (1, 1, 4)
    assert (registered.consumer, registered.partition_id) == ("trainer", 1)
    assert batch.step == 0


def test_only_ranks_have_steps(filled: FakeService, ref: PartitionRef) -> None:
    assert do_claim(filled, consumer(ref)).step is None
    with pytest.raises(InvalidArgument, match="only a consumer with a topology"):
        filled.run(register(filled.state, consumer(ref)))


def test_a_rank_registers_again_under_a_new_session(filled: FakeService, ref: PartitionRef) -> None:
    which = consumer(ref, topology=RANK)
    assert filled.run(register(filled.state, which)) == 1
    filled.end_sessions()
    do_claim(filled, which)
    assert [request.mutation.session for request in asked(filled, "RegisterRank")] == [1, 2]
    assert len({request.mutation.request for request in asked(filled, "RegisterRank")}) == 2


def test_a_restarted_rank_waits_until_the_lease_of_the_dead_one_has_run_out(
    filled: FakeService, ref: PartitionRef
) -> None:
    filled.sessions.add(99)
    filled.ranks[1, 1] = 99
    ends = filled.clock.now + LEASE_MS / 1000

    def age() -> None:
        if filled.clock.now >= ends:
            filled.sessions.discard(99)

    for _ in range(100):
        filled.fault("RegisterRank", TopologyMismatch("session 99 holds it"), before=age)
    start = filled.clock.now
    with pytest.raises(TopologyMismatch, match="session 99"):
        filled.run(register(filled.state, consumer(ref, topology=RANK), 60.0))
    assert LEASE_MS / 1000 <= filled.clock.now - start <= 1.5 * LEASE_MS / 1000
    filled.faults["RegisterRank"].clear()
    filled.sessions.discard(99)
    do_claim(filled, consumer(ref, topology=RANK))
    assert filled.ranks[1, 1] == 1


def test_the_deadline_of_a_claim_ends_the_wait_for_its_place(filled: FakeService, ref: PartitionRef) -> None:
    filled.sessions.add(99)
    filled.ranks[1, 1] = 99
    start = filled.clock.now
    with pytest.raises(TopologyMismatch):
        do_claim(filled, consumer(ref, topology=RANK), timeout=2.0)
    assert filled.clock.now - start <= 2.1
    assert asked(filled, "Claim") == []


def test_a_last_try_without_an_answer_does_not_hide_why_the_place_is_not_to_be_had(
    filled: FakeService, ref: PartitionRef
) -> None:
    def late() -> None:
        filled.clock.now += 60.0

    filled.fault("RegisterRank", TopologyMismatch("session 99 holds it"))
    filled.fault("RegisterRank", Unavailable("DEADLINE_EXCEEDED"), before=late)
    with pytest.raises(TopologyMismatch, match="session 99") as caught:
        do_claim(filled, consumer(ref, topology=RANK), timeout=2.0)
    assert isinstance(caught.value.__cause__, Unavailable)
    filled.fault("RegisterRank", Unavailable("DEADLINE_EXCEEDED"), before=late)
    with pytest.raises(Unavailable):
        do_claim(filled, consumer(ref, topology=RANK), timeout=2.0)


def test_a_session_that_ends_while_a_rank_registers_is_opened_again(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("RegisterRank", LeaseExpired("ended"), before=filled.end_sessions)
    do_claim(filled, consumer(ref, topology=RANK))
    assert filled.ranks == {(1, 1): 2}


def test_an_ack_of_a_step_that_was_overtaken_says_so(filled: FakeService, ref: PartitionRef) -> None:
    handle, _ = filled.run(claim(filled.state, consumer(ref, topology=RANK), 2, True, 5.0))
    filled.claims.clear()
    with pytest.raises(LeaseExpired, match="step 0: another member of this DP rank released the batch or died"):
        filled.run(settle(filled.state, handle, "acked"))
    assert handle.verdict is None


# Claims that end while their samples are read.


def test_a_claim_that_ended_while_it_was_read_is_not_taken_for_damage(filled: FakeService, ref: PartitionRef) -> None:
    def ended() -> None:
        filled.claims.clear()
        flip_a_payload_byte(filled)  # as others do who use the bytes again

    filled.fault("read", Unavailable("not at once"), before=ended)
    with pytest.raises(LeaseExpired, match=r"'trainer': claim 1 ended while its samples were read.*delivered again"):
        do_claim(filled, consumer(ref))
    assert filled.count("RenewClaim") == 1
    assert filled.state.session is not None


def test_a_claim_whose_session_ended_while_it_was_read_is_made_anew(filled: FakeService, ref: PartitionRef) -> None:
    def ended() -> None:
        filled.end_sessions()
        filled.claims.clear()
        filled.leased.clear()
        flip_a_payload_byte(filled)

    filled.fault("read", Unavailable("not at once"), before=ended)
    filled.fault("OpenSession", Unavailable("not at once"), before=lambda: flip_a_payload_byte(filled))
    batch = do_claim(filled, consumer(ref))
    assert batch["x"].tolist() == [0, 1]
    assert (filled.count("RenewClaim"), filled.count("Claim"), len(filled.claims)) == (1, 2, 1)


def test_a_claim_that_is_held_and_damaged_is_read_twice(filled: FakeService, ref: PartitionRef) -> None:
    flip_a_payload_byte(filled)
    with pytest.raises(CorruptBlock, match="'x', row 0, sample 1"):
        do_claim(filled, consumer(ref))
    assert filled.count("RenewClaim") == 1
    assert len(filled.first.transport.fetched) == 2


# Lengths: what samplers and budgets go by.


def lengths_of(service: FakeService, ref: PartitionRef, values: Any) -> dict[str, list[int]]:
    del service.calls[:]
    service.run(put(service.state, ref, values, RowArguments(), None))
    (request,) = asked(service, "Commit")
    return {
        each.field: unpack_narrow(each.lengths, each.width, what="lengths", rows=request.rows).tolist()
        for each in request.lengths
    }


def jagged(*sizes: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(size, 3) for size in sizes], layout=torch.jagged)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tokens": [torch.arange(3), torch.arange(0)], "reward": torch.zeros(2)}, {"tokens": [3, 0]}),
        ({"tokens": [np.arange(3), np.arange(5)]}, {"tokens": [3, 5]}),
        ({"tokens": jagged(4, 1)}, {"tokens": [4, 1]}),
        ({"x": torch.zeros(2, 9)}, {}),  # its form tells
        ({"mm": [{"pixels": torch.zeros(2, 4), "n": 1}, {"pixels": torch.zeros(6, 4), "n": 2}]}, {"mm.pixels": [2, 6]}),
        ({"mm": {"a": {"b": [torch.zeros(1), torch.zeros(2)]}, "c": torch.zeros(2)}}, {"mm.a.b": [1, 2]}),
        ([{"tokens": torch.arange(2)}, {"tokens": torch.arange(9)}], {"tokens": [2, 9]}),
        ({"name": ["a", "bcd"], "blob": [b"", b"xy"], "any": [[1], {"a": 2}]}, {}),
    ],
)
def test_a_put_says_how_long_its_ragged_rows_are(
    service: FakeService, ref: PartitionRef, values: Any, expected: dict[str, list[int]]
) -> None:
    assert lengths_of(service, ref, values) == expected


@pytest.mark.parametrize(
    ("reads_narrow", "longest", "width"), [(True, 255, 1), (True, 256, 2), (True, 1 << 16, 4), (False, 255, 0)]
)
def test_lengths_are_sent_as_narrow_as_the_controller_reads_them(
    service: FakeService, ref: PartitionRef, reads_narrow: bool, longest: int, width: int
) -> None:
    service.narrow_lengths = reads_narrow
    assert lengths_of(service, ref, {"x": [torch.zeros(longest), torch.zeros(1)]}) == {"x": [longest, 1]}
    (request,) = asked(service, "Commit")
    assert [(each.width, len(each.lengths)) for each in request.lengths] == [(width, 2 * (width or 4))]


def test_rows_that_vary_in_each_dimension_are_as_long_as_their_first(service: FakeService, ref: PartitionRef) -> None:
    values = {"x": torch.nested.nested_tensor([torch.zeros(2, 7), torch.zeros(5, 1)])}
    assert lengths_of(service, ref, values) == {"x": [2, 5]}


def test_a_name_that_two_columns_share_has_no_lengths(service: FakeService, ref: PartitionRef) -> None:
    values = {"a.b": [torch.zeros(1)], "a": {"b": [torch.zeros(2)]}, "c": [torch.zeros(3)]}
    assert lengths_of(service, ref, values) == {"c": [3]}


def test_a_row_longer_than_a_length_can_say_has_none(service: FakeService, ref: PartitionRef) -> None:
    values = {"x": [torch.empty(1 << 32, 0), torch.empty(1, 0)], "y": [torch.zeros(1), torch.zeros(2)]}
    assert lengths_of(service, ref, values) == {"y": [1, 2]}
