from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from tests.unit.client.fakes import FakeService, gone
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.codec import Layout
from tqclient.errors import (
    ClaimTimeout,
    CorruptBlock,
    InternalError,
    InvalidArgument,
    LeaseExpired,
    SampleNotFound,
    TQError,
    Unavailable,
)
from tqclient.info import PartitionRef
from tqclient.operations.claims import ClaimHandle, abandon, claim, renew, settle
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.put import put
from tqclient.operations.read import Delivery, get
from tqclient.operations.sessions import close_session, heartbeat, release_lost_claims
from tqclient.samplers import Fifo

ROWS = {"tokens": [torch.arange(3), torch.arange(5), torch.arange(7)], "name": ["a", "b", "c"]}


@pytest.fixture
def filled(service: FakeService, ref: PartitionRef) -> FakeService:
    service.run(put(service.state, ref, ROWS, RowArguments(keys=["k1", "k2", "k3"]), None))
    service.run(put(service.state, ref, {name: rows[:1] for name, rows in ROWS.items()}, RowArguments(), None))
    del service.calls[:]
    return service


def do_get(service: FakeService, ref: PartitionRef, ids: Any = None, **options: Any) -> Delivery:
    options = {"keys": None, "fields": None, "copy": True, "timeout": 5.0, **options}
    return service.run(get(service.state, ref, ids, *options.values()))


def consumer(ref: PartitionRef, fields: tuple[str, ...] = ()) -> ConsumerRef:
    return ConsumerRef(ref, "trainer", fields, Fifo())


def do_claim(service: FakeService, ref: PartitionRef, size: int, timeout: float = 5.0) -> tuple[ClaimHandle, Delivery]:
    return service.run(claim(service.state, consumer(ref), size, True, timeout))


def flip_a_payload_byte(service: FakeService) -> None:
    block = next(iter(service.blocks.values()))
    position = block.extents[0].offset + block.extents[0].length - 64
    service.first.memory[position] ^= 1


def test_rows_come_in_the_order_asked_for_across_blocks(filled: FakeService, ref: PartitionRef) -> None:
    delivery = do_get(filled, ref, [3, 4, 1])
    assert delivery.columns["name"].list() == ["c", "a", "a"]
    assert [len(row) for row in delivery.columns["tokens"].list()] == [7, 3, 3]
    assert delivery.rows.ids.tolist() == [3, 4, 1]


def test_get_by_key_and_some_fields(filled: FakeService, ref: PartitionRef) -> None:
    delivery = do_get(filled, ref, keys=["k2"], fields=["name"])
    assert list(delivery.columns) == ["name"]
    assert delivery.columns["name"].list() == ["b"]


def test_one_locate_and_one_read_per_block(filled: FakeService, ref: PartitionRef) -> None:
    do_get(filled, ref, [1, 2, 3, 4])
    assert [name for name, _ in filled.calls] == ["Locate"]
    assert len(filled.first.transport.fetched) == 2


def test_a_directory_that_was_sent_before_is_remembered_or_asked_for(filled: FakeService, ref: PartitionRef) -> None:
    do_get(filled, ref, [1])
    do_get(filled, ref, [1])
    assert filled.count("GetDirectories") == 0
    filled.state.directories.__init__()  # type: ignore[misc]
    do_get(filled, ref, [1])
    assert filled.count("GetDirectories") == 1


def test_directories_that_a_reply_has_no_room_for_are_asked_for_again(filled: FakeService, ref: PartitionRef) -> None:
    do_get(filled, ref, [1, 2, 3, 4])
    filled.state.directories.__init__()  # type: ignore[misc]
    filled.directories_per_reply = 1
    assert do_get(filled, ref, [1, 2, 3, 4]).columns["name"].list() == ["a", "b", "c", "a"]
    assert filled.count("GetDirectories") == 2  # blocks
    filled.state.directories.__init__()  # type: ignore[misc]
    filled.directories_per_reply = 0
    with pytest.raises(InternalError, match="sent 0 directories of 2 blocks"):
        do_get(filled, ref, [1, 2, 3, 4])


@pytest.mark.parametrize("copy", [True, False])
def test_jagged_tensors_of_equal_lengths_can_be_computed_with(
    service: FakeService, ref: PartitionRef, copy: bool
) -> None:
    """torch does so only for those that have the very same offsets."""
    values = {
        "log_probs": [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])],
        "mask": [torch.tensor([True, False]), torch.tensor([False, True, True])],
        "inner": [{"advantages": torch.full((2,), 10.0)}, {"advantages": torch.full((3,), 20.0)}],
        "others": [torch.ones(3), torch.ones(2)],
    }
    ids = service.run(put(service.state, ref, values, RowArguments(), None))
    batch = BatchData(service.state, do_get(service, ref, ids, copy=copy))
    product = batch["log_probs"] * batch["mask"] * batch["inner"]["advantages"]
    assert [row.tolist() for row in product.unbind()] == [[10.0, 0.0], [0.0, 80.0, 100.0]]
    with pytest.raises(RuntimeError):  # theirs differ
        batch["log_probs"] * batch["others"]
    del product
    batch.close()


def test_a_copy_drops_its_pin_with_the_next_call(filled: FakeService, ref: PartitionRef) -> None:
    do_get(filled, ref, [1])
    assert all(fetched.closed for fetched in filled.first.transport.fetched)
    assert len(filled.pins) == 1
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()


def test_pins_that_could_not_be_delivered_are_delivered_later(filled: FakeService, ref: PartitionRef) -> None:
    do_get(filled, ref, [1])
    filled.fault("Heartbeat", gone())
    with pytest.raises(Unavailable):
        filled.run(heartbeat(filled.state, 1.0))
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()


def test_a_look_up_whose_reply_was_lost_leaves_one_pin_and_one_that_failed_none(
    filled: FakeService, ref: PartitionRef
) -> None:
    filled.fault("Locate", gone(), reply_lost=True)
    do_get(filled, ref, [1])
    assert filled.count("Locate") == 2
    assert len(filled.pins) == 1
    filled.fault("Locate", InternalError("the reply could not be read"), reply_lost=True)
    with pytest.raises(InternalError):
        do_get(filled, ref, [1])
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()


def test_views_hold_their_pin_until_the_batch_is_closed_or_collected(filled: FakeService, ref: PartitionRef) -> None:
    batches = [BatchData(filled.state, do_get(filled, ref, [1], copy=False)) for _ in range(2)]
    filled.run(heartbeat(filled.state, 1.0))
    assert len(filled.pins) == 2
    batches[0].close()
    filled.run(heartbeat(filled.state, 1.0))
    assert len(filled.pins) == 1
    del batches[:]
    gc.collect()
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()


def test_a_missing_sample(filled: FakeService, ref: PartitionRef) -> None:
    with pytest.raises(SampleNotFound) as caught:
        do_get(filled, ref, [1, 99])
    assert caught.value.ids == (99,)


def test_a_session_that_ended_is_opened_again(filled: FakeService, ref: PartitionRef) -> None:
    filled.end_sessions()
    assert do_get(filled, ref, [1]).columns["name"].list() == ["a"]
    assert filled.count("OpenSession") == 1


def test_damage_is_looked_at_twice_and_named(filled: FakeService, ref: PartitionRef) -> None:
    flip_a_payload_byte(filled)
    with pytest.raises(CorruptBlock, match="partition 'train', field 'name'"):
        do_get(filled, ref, [2])
    assert filled.count("Locate") == 2
    assert do_get(filled, ref, [4]).columns["name"].list() == ["a"]


def test_damage_of_a_large_copy_is_named_too(service: FakeService, ref: PartitionRef) -> None:
    """Those of all fields are made together, at the end."""
    values = {"other": torch.zeros(4, 10_000), "long": torch.ones(4, 10_000)}
    ids = service.run(put(service.state, ref, values, RowArguments(), 5.0))
    (block,) = service.blocks.values()
    (stream,) = Layout.parse(block.directory).node("long").streams
    service.first.memory[block.extents[0].offset + stream.offset + 3 * 40_000 - 8] ^= 1
    with pytest.raises(
        CorruptBlock, match=r"partition 'train', field 'long', row 2, sample 3: .* row 2 of its"
    ) as raised:
        do_get(service, ref, ids)
    assert (raised.value.ids, raised.value.rows) == ((3,), (2,))


def test_an_extent_that_is_gone_is_located_again(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("read", SampleNotFound("no such extent"))
    assert do_get(filled, ref, [1]).columns["name"].list() == ["a"]
    assert filled.count("Locate") == 2


def test_a_node_that_is_away_is_read_when_it_is_back(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("read", gone())
    assert do_get(filled, ref, [1]).columns["name"].list() == ["a"]
    assert filled.count("Locate") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "ids or keys"),
        ({"ids": [1], "keys": ["k1"]}, "ids or keys"),
        ({"ids": []}, "no id or key"),
        ({"ids": [1], "fields": []}, "asks for nothing"),
        ({"ids": [1], "fields": "name"}, "give a list of names"),
        ({"ids": ["x"]}, "expected integers"),
    ],
)
def test_get_arguments_that_are_off(
    filled: FakeService, ref: PartitionRef, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        do_get(filled, ref, **options)
    assert filled.calls == []


def test_a_claim_brings_its_rows_and_is_acked_once(filled: FakeService, ref: PartitionRef) -> None:
    handle, delivery = do_claim(filled, ref, 2)
    assert delivery.rows.ids.tolist() == [1, 2]
    assert delivery.rows.attempts.tolist() == [1, 1]
    assert delivery.columns["name"].list() == ["a", "b"]
    filled.run(settle(filled.state, handle, "acked"))
    filled.run(settle(filled.state, handle, "acked"))
    assert filled.count("Settle") == 1
    assert filled.consumed == [1, 2]
    with pytest.raises(InvalidArgument, match="acked already"):
        filled.run(settle(filled.state, handle, "released"))
    with pytest.raises(InvalidArgument, match="acked already"):
        filled.run(renew(filled.state, handle))


def test_an_ack_whose_reply_was_lost_counts_once(filled: FakeService, ref: PartitionRef) -> None:
    handle, _ = do_claim(filled, ref, 2)
    filled.fault("Settle", gone(), reply_lost=True)
    filled.run(settle(filled.state, handle, "acked"))
    assert filled.consumed == [1, 2]


def test_an_ack_that_ran_out_of_time_may_be_given_again(filled: FakeService, ref: PartitionRef) -> None:
    handle, _ = do_claim(filled, ref, 2)
    filled.fault("Settle", gone(), reply_lost=True, before=lambda: setattr(filled.clock, "now", filled.clock.now + 5))
    with pytest.raises(Unavailable):
        filled.run(settle(filled.state, handle, "acked", 1.0))
    filled.run(settle(filled.state, handle, "acked"))
    assert filled.consumed == [1, 2]


@pytest.mark.parametrize("lost", [gone(), InternalError("the reply could not be read")])
def test_an_ack_that_was_applied_counts_although_its_session_ended_since(
    filled: FakeService, ref: PartitionRef, lost: TQError
) -> None:
    handle, _ = do_claim(filled, ref, 2)
    filled.fault("Settle", lost, reply_lost=True, before=lambda: setattr(filled.clock, "now", filled.clock.now + 5))
    with pytest.raises(type(lost)):
        filled.run(settle(filled.state, handle, "acked", 1.0))
    assert filled.consumed == [1, 2]
    filled.end_sessions()
    do_get(filled, ref, [1])  # under a new session
    filled.run(settle(filled.state, handle, "acked"))
    assert filled.count("Settle") == 2


def test_a_grant_that_could_not_be_read_is_given_back(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("Claim", InternalError("the reply is too large"), reply_lost=True)
    with pytest.raises(InternalError):
        do_claim(filled, ref, 2)
    assert filled.leased == {1, 2}
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()


def test_a_batch_that_is_collected_inside_the_client_blocks_nobody(filled: FakeService, ref: PartitionRef) -> None:
    """The collector may run a batch's finalizer in a thread that holds any lock of the client."""
    handle, _ = do_claim(filled, ref, 2)
    state = filled.state

    def collect() -> None:
        with state._lock, state.requests._lock, state.wake._cond:
            abandon(state, handle)
            state.drop_pin(1, 7)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert state.take_dropped_pins() == [7]
    assert [lost.claim_id for lost in state.lost_claims] == [handle.claim_id]


def test_an_ack_after_the_session_ended_is_refused(filled: FakeService, ref: PartitionRef) -> None:
    handle, _ = do_claim(filled, ref, 2)
    filled.end_sessions()
    with pytest.raises(LeaseExpired):
        filled.run(settle(filled.state, handle, "acked"))
    filled.run(heartbeat(filled.state, 1.0))  # learns that the session has ended
    assert filled.state.session is None
    with pytest.raises(LeaseExpired, match="delivered again"):
        filled.run(settle(filled.state, handle, "acked"))
    assert filled.consumed == []


def test_a_claim_that_cannot_be_met_ends_with_its_timeout(filled: FakeService, ref: PartitionRef) -> None:
    start = filled.clock.now
    with pytest.raises(ClaimTimeout):
        do_claim(filled, ref, 100, timeout=2.0)
    assert 1.7 <= filled.clock.now - start <= 2.1
    filled.run(release_lost_claims(filled.state))
    assert filled.count("Claim") == 1  # it is known that nothing was granted


@pytest.mark.parametrize(("lease", "seconds"), [(1, 2), (10, 10), (3600, 30)])
def test_what_was_granted_is_read_for_its_lease_or_as_long_as_other_calls_take(
    ref: PartitionRef, monkeypatch: pytest.MonkeyPatch, lease: int, seconds: int
) -> None:
    monkeypatch.setattr("tests.unit.client.fakes.LEASE_MS", lease * 1000)
    service = FakeService("grpc")
    service.run(put(service.state, ref, ROWS, RowArguments(), None))
    service.first.condition = "hung"
    start = service.clock.now
    with pytest.raises(Unavailable):
        do_claim(service, ref, 1, timeout=2.0)
    assert service.clock.now - start == pytest.approx(seconds, abs=0.2)
    service.run(release_lost_claims(service.state))
    assert not service.leased


def test_a_long_wait_is_cut_so_that_the_controller_may_forget_replies(filled: FakeService, ref: PartitionRef) -> None:
    start = filled.clock.now
    with pytest.raises(ClaimTimeout):
        do_claim(filled, ref, 100, timeout=50.0)
    assert 49.4 <= filled.clock.now - start <= 50.1
    asked = [request for name, request in filled.calls if name == "Claim"]
    assert [round(request.wait_ms, -2) for request in asked[:3]] == [20_000, 20_000, 9_500]
    assert asked[1].mutation.settled_below > asked[0].mutation.request


def test_a_lease_that_is_not_the_sessions_does_not_cost_the_session(filled: FakeService, ref: PartitionRef) -> None:
    held, _ = do_claim(filled, ref, 1)
    filled.fault("Claim", LeaseExpired("the recorded claim has ended"))
    other, _ = do_claim(filled, ref, 1)
    assert filled.count("OpenSession") == 0
    for handle in (held, other):
        filled.run(settle(filled.state, handle, "acked"))
    assert filled.consumed == [1, 2]


def test_a_grant_whose_reply_never_came_is_given_back(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("Claim", gone(), reply_lost=True, before=lambda: setattr(filled.clock, "now", filled.clock.now + 5))
    with pytest.raises(Unavailable):
        do_claim(filled, ref, 2, timeout=1.0)
    assert filled.leased == {1, 2}
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()
    first, again = (request for name, request in filled.calls if name == "Claim")
    assert first.mutation.request == again.mutation.request
    assert filled.state.requests.settled_below() > first.mutation.request


def test_a_claim_that_was_given_up_before_it_was_granted_takes_nothing(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("Claim", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        do_claim(filled, ref, 2)
    filled.run(release_lost_claims(filled.state))
    assert filled.claims == {}
    assert filled.count("Settle") == 0
    first, again = (request for name, request in filled.calls if name == "Claim")
    assert (again.mutation.request, again.abandoned) == (first.mutation.request, True)


def test_a_grant_whose_reply_was_lost_is_the_same_claim(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("Claim", gone(), reply_lost=True)
    _, delivery = do_claim(filled, ref, 2)
    assert delivery.rows.ids.tolist() == [1, 2]
    assert filled.leased == {1, 2}


def test_a_claim_that_is_interrupted_is_given_back(filled: FakeService, ref: PartitionRef) -> None:
    filled.fault("Claim", KeyboardInterrupt(), reply_lost=True)
    with pytest.raises(KeyboardInterrupt):
        do_claim(filled, ref, 2)
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()


def test_a_claim_that_cannot_be_read_is_given_back(filled: FakeService, ref: PartitionRef) -> None:
    flip_a_payload_byte(filled)
    with pytest.raises(CorruptBlock):
        do_claim(filled, ref, 3)
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()


def test_a_claim_that_is_forgotten_is_given_back(filled: FakeService, ref: PartitionRef) -> None:
    handle, delivery = do_claim(filled, ref, 2)
    batch = BatchData(filled.state, delivery, handle)
    del batch
    gc.collect()
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()
    assert filled.consumed == []


@pytest.mark.parametrize("size", [0, -1, None, 1.5, True, (1 << 17) + 1])
def test_batch_sizes_that_are_off(filled: FakeService, ref: PartitionRef, size: Any) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        do_claim(filled, ref, size)
    assert filled.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": object()}, "expected a tq.Topology"),
        ({"where": {"a": None}}, r"where\['a'\]=None"),
        ({"where": [1]}, r"where=\[1\]: expected a mapping"),
        ({"token_field": ""}, "token_field"),
        ({"sampler": "fifo"}, "sampler"),
        ({"fields": []}, "asks for nothing"),
        ({"fields": "tokens"}, "list of names"),
        ({"fields": ["a", "a"]}, "twice"),
    ],
)
def test_consumer_arguments_that_are_off(ref: PartitionRef, arguments: dict[str, Any], message: str) -> None:
    defaults = {"fields": None, "sampler": None, "topology": None, "where": None}
    with pytest.raises(InvalidArgument, match=message):
        ConsumerRef.from_arguments(ref, "trainer", **{**defaults, **arguments})


def test_closing_returns_what_was_reserved(filled: FakeService) -> None:
    assert filled.first.windows
    filled.run(close_session(filled.state))
    assert filled.first.windows == {}
    assert filled.sessions == set()
    assert filled.first.transport.sessions == []


def test_a_get_that_runs_out_of_time_at_the_controller_says_what_it_was_waiting_for(
    filled: FakeService, ref: PartitionRef
) -> None:
    filled.fault("read", Unavailable("storage node 'n0' is away"))
    filled.fault(
        "DescribeCluster", Unavailable("no answer"), before=lambda: setattr(filled.clock, "now", filled.clock.now + 5)
    )
    with pytest.raises(Unavailable, match="storage node 'n0' is away") as caught:
        do_get(filled, ref, [1])
    assert isinstance(caught.value.__cause__, Unavailable)
