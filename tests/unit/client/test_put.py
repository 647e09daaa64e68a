from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.client.fakes import FakeService, gone
from tqclient.arguments import RowArguments
from tqclient.errors import (
    BackpressureTimeout,
    DuplicateKey,
    InternalError,
    InvalidArgument,
    LeaseExpired,
    SchemaMismatch,
    StorageFull,
    TQError,
    Unavailable,
    UnsupportedValue,
)
from tqclient.info import PartitionRef
from tqclient.operations import nodes
from tqclient.operations import put as operation
from tqclient.operations.effects import Call
from tqclient.operations.put import put, settle_lost_puts
from tqclient.operations.read import get
from tqclient.operations.sessions import close_windows, live_session
from tqclient.wire.packing import U8, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb

ROWS = {"tokens": [torch.arange(3), torch.arange(5)], "reward": torch.tensor([0.5, 1.5])}


def do_put(service: FakeService, ref: PartitionRef, values: Any = None, timeout: float = 5.0, **arguments: Any) -> Any:
    return service.run(put(service.state, ref, ROWS if values is None else values, RowArguments(**arguments), timeout))


def read_back(service: FakeService, ref: PartitionRef, ids: Any) -> Any:
    delivery = service.run(get(service.state, ref, ids, None, None, True, 5.0))
    return {name: column.list() for name, column in delivery.columns.items()}


def test_put_is_visible_with_its_bytes(service: FakeService, ref: PartitionRef) -> None:
    ids = do_put(service, ref)
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 2]
    back = read_back(service, ref, ids)
    assert [row.tolist() for row in back["tokens"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [float(row) for row in back["reward"]] == [0.5, 1.5]


def test_small_puts_share_a_window_and_need_one_call_each(service: FakeService, ref: PartitionRef) -> None:
    do_put(service, ref)
    del service.calls[:]
    do_put(service, ref)
    assert [name for name, _ in service.calls] == ["Commit"]


def test_a_large_put_is_one_block_where_it_fits_in_one_piece(
    service: FakeService, ref: PartitionRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "WHOLE_MIN", 16 * 1024)
    monkeypatch.setattr(operation, "BLOCK_BYTES_APART", 16 * 1024)
    values = {"x": torch.arange(12_800).view(100, 128)}  # 1,024 bytes a row
    whole = do_put(service, ref, values)
    service.first.longest_bytes = 32 * 1024
    apart = do_put(service, ref, values)
    commits = [request for name, request in service.calls if name == "Commit"]
    assert [len(request.blocks) for request in commits] == [1, 7]  # 15 rows of 1 KiB and the directory fit 16 KiB
    assert sum(block.rows for block in commits[1].blocks) == 100
    for ids in (whole, apart):
        assert torch.equal(torch.stack(read_back(service, ref, ids)["x"]), values["x"])


@pytest.mark.parametrize("lost", [gone(), InternalError("the reply could not be read")])
def test_bytes_that_may_have_been_committed_are_never_written_again(
    service: FakeService, ref: PartitionRef, lost: TQError
) -> None:
    do_put(service, ref)  # now there is a window with room for more
    late = lambda: setattr(service.clock, "now", service.clock.now + 60)  # noqa: E731
    service.fault("Commit", lost, reply_lost=True, before=late)
    with pytest.raises(type(lost)):
        do_put(service, ref)
    do_put(service, ref)
    assert sorted(service.samples) == [1, 2, 3, 4, 5, 6]
    for ids in ([1, 2], [3, 4], [5, 6]):
        assert [row.tolist() for row in read_back(service, ref, ids)["tokens"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    extents = [(each.offset, each.length) for _, request in service.calls for each in _extents(request)]
    assert len(set(extents)) == len(extents) == 3


@pytest.mark.parametrize("applied", [False, True])
def test_room_of_a_put_that_was_given_up_is_used_again_once_it_is_known_that_it_was_not_applied(
    service: FakeService, ref: PartitionRef, applied: bool
) -> None:
    do_put(service, ref)
    (window,) = next(iter(service.state.windows._open.values()))
    used = window.used
    service.fault("Commit", KeyboardInterrupt(), reply_lost=applied)
    with pytest.raises(KeyboardInterrupt):
        do_put(service, ref)
    lost = service.state.requests.settled_below()
    assert (window.used, window.pending) == (2 * used, 1)
    service.fault("Commit", gone())
    service.run(settle_lost_puts(service.state))  # the controller is away
    assert (window.pending, service.state.requests.settled_below()) == (1, lost)
    service.run(settle_lost_puts(service.state))
    assert (window.used, window.pending) == (2 * used if applied else used, 0)
    assert service.state.requests.settled_below() > lost
    do_put(service, ref)
    extents = {(each.offset, each.length) for _, request in service.calls for each in _extents(request)}
    assert len(extents) == (3 if applied else 2)


def _extents(request: Any) -> list[Any]:
    return [block.extents[0] for block in request.blocks] if isinstance(request, pb.CommitRequest) else []


def test_an_unavailable_controller_is_asked_again_with_the_same_request(
    service: FakeService, ref: PartitionRef
) -> None:
    service.fault("Commit", gone())
    service.fault("Commit", gone())
    do_put(service, ref)
    commits = [request for name, request in service.calls if name == "Commit"]
    assert len({commit.mutation.request for commit in commits}) == 1
    assert len(commits) == 3
    assert len(service.sleeps) == 2
    assert max(service.sleeps) <= 0.04  # full jitter below 20 ms, then 40 ms


def test_a_lost_reply_has_one_effect(service: FakeService, ref: PartitionRef) -> None:
    service.fault("Commit", gone(), reply_lost=True)
    ids = do_put(service, ref)
    assert sorted(service.samples) == ids.tolist() == [1, 2]
    assert service.count("Reserve") == 1


def test_a_lost_session_is_opened_again_and_the_bytes_are_written_again(
    service: FakeService, ref: PartitionRef
) -> None:
    service.fault("Commit", LeaseExpired("the session has ended"), before=service.end_sessions)
    ids = do_put(service, ref)
    assert service.count("OpenSession") == 2
    assert service.count("Reserve") == 2
    first, second = (request for name, request in service.calls if name == "Commit")
    assert first.mutation.request == second.mutation.request
    assert (first.mutation.session, second.mutation.session) == (1, 2)
    assert service.first.transport.sessions == [2]
    assert [row.tolist() for row in read_back(service, ref, ids)["tokens"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_put_that_is_late_leaves_no_lock_of_an_ended_session(service: FakeService, ref: PartitionRef) -> None:
    """The heartbeat learns of the end between the put's look at the session and its reservation."""

    def notice() -> None:
        service.end_sessions()
        session = service.state.session
        assert session is not None
        service.state.session_ended(session)
        service.first.transport.session_opened(session.session)  # as the put, on its way to the node, does

    service.fault("Reserve", LeaseExpired("unknown session"), before=notice)
    do_put(service, ref)
    assert service.first.transport.sessions == [2]


def test_a_session_that_the_node_does_not_know_yet_is_not_given_up(service: FakeService, ref: PartitionRef) -> None:
    service.fault("Reserve", LeaseExpired("unknown session"))
    do_put(service, ref)
    assert service.count("OpenSession") == 1
    assert service.count("Heartbeat") == 1


@pytest.mark.parametrize("error", [gone(), LeaseExpired("the node does not know the window")])
def test_a_write_that_fails_is_repeated_at_another_place(
    service: FakeService, ref: PartitionRef, error: Exception
) -> None:
    service.fault("write", error)
    ids = do_put(service, ref)
    assert service.count("OpenSession") == 1
    assert service.count("Reserve") == 2
    assert [float(row) for row in read_back(service, ref, ids)["reward"]] == [0.5, 1.5]


def test_the_deadline_ends_the_tries(service: FakeService, ref: PartitionRef) -> None:
    do_put(service, ref)
    for _ in range(100):
        service.fault("Commit", gone())
    start = service.clock.now
    with pytest.raises(Unavailable):
        do_put(service, ref, timeout=3.0)
    assert 2.0 <= service.clock.now - start <= 3.1


def test_a_full_node_is_tried_for_a_second(service: FakeService, ref: PartitionRef) -> None:
    service.first.full = True
    start = service.clock.now
    with pytest.raises(StorageFull, match="n0: node n0 has 1048576 bytes free"):
        do_put(service, ref)
    assert 1.0 <= service.clock.now - start <= 2.0
    assert not service.samples


def test_a_node_with_little_room_gets_a_window_that_fits_exactly(service: FakeService, ref: PartitionRef) -> None:
    service.first.free_offset = (1 << 20) - 4096
    do_put(service, ref)
    lengths = [request.length for name, request in service.calls if name == "Reserve"]
    assert lengths[0] == 256 * 1024
    assert lengths[1] <= 4096


def test_a_large_put_reserves_a_window_of_its_own_and_fills_it(service: FakeService, ref: PartitionRef) -> None:
    from tqclient.operations import nodes

    assert nodes.WHOLE_MIN == 2 << 20  # larger than the fake's arena: so the bound is moved for this test
    service.run(live_session(service.state, service.state.deadline(1)))
    service.state.wake.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "WHOLE_MIN", 4096)
        do_put(service, ref, {"x": torch.zeros(100, 100)})
    assert service.first.windows == {}
    assert service.first.free_offset == next(request.length for name, request in service.calls if name == "Reserve")
    assert not service.state.wake.is_set()  # nothing is left that the heartbeat would have to close
    assert service.state.windows.take_closing() == []


def test_a_large_put_that_is_refused_gives_all_of_its_window_back(service: FakeService, ref: PartitionRef) -> None:
    from tqclient.operations import nodes

    service.fault("Commit", BackpressureTimeout("full"))
    service.run(live_session(service.state, service.state.deadline(1)))
    service.state.wake.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "WHOLE_MIN", 4096)
        with pytest.raises(BackpressureTimeout):
            do_put(service, ref, {"x": torch.zeros(100, 100)})
    assert service.state.wake.is_set()
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert service.first.free_offset == 0


def test_a_window_is_closed_within_the_deadline_of_the_call_that_it_is_closed_for(
    service: FakeService, ref: PartitionRef
) -> None:
    do_put(service, ref)
    service.state.windows.retire(partition_id=ref.partition_id)
    closing = service.state.windows.take_closing()
    effect = next(close_windows(service.state, closing, deadline=service.state.deadline(0.3)))
    assert isinstance(effect, Call)
    assert effect.method == "CloseWindow"
    assert effect.timeout == pytest.approx(0.3)


def test_a_refused_put_leaves_nothing_reserved_but_the_window(service: FakeService, ref: PartitionRef) -> None:
    do_put(service, ref)
    before = next(iter(service.state.windows._open.values()))[0].used
    service.fault("Commit", BackpressureTimeout("full"))
    with pytest.raises(BackpressureTimeout):
        do_put(service, ref)
    assert next(iter(service.state.windows._open.values()))[0].used == before


def test_the_wait_on_the_server_ends_before_the_call(service: FakeService, ref: PartitionRef) -> None:
    do_put(service, ref, timeout=5.0)
    (commit,) = [request for name, request in service.calls if name == "Commit"]
    assert 4400 <= commit.wait_ms <= 4500


def test_the_same_key_with_the_same_bytes_has_no_effect(service: FakeService, ref: PartitionRef) -> None:
    ids = do_put(service, ref, keys=["a", "b"])
    again = do_put(service, ref, keys=["a", "b"])
    assert again.tolist() == ids.tolist()
    assert len(service.samples) == 2
    commit = service.calls[-1][1]
    assert unpack_array(commit.skip, U8, what="skip").tolist() == [1, 1]


def test_the_same_key_with_other_bytes_is_refused(service: FakeService, ref: PartitionRef) -> None:
    ids = do_put(service, ref, keys=["a", "b"])
    other = {"tokens": ROWS["tokens"], "reward": torch.tensor([0.5, 9.0])}
    with pytest.raises(DuplicateKey, match=rf"row 1 .* sample {ids[1]}") as caught:
        do_put(service, ref, other, keys=["a", "b"])
    assert caught.value.rows == (1,)
    assert caught.value.existing_ids == (ids[1],)
    assert [float(row) for row in read_back(service, ref, ids)["reward"]] == [0.5, 1.5]


def test_one_of_two_keys_exists(service: FakeService, ref: PartitionRef) -> None:
    (first,) = do_put(service, ref, {"x": torch.tensor([1])}, keys=["a"])
    both = do_put(service, ref, {"x": torch.tensor([1, 2])}, keys=["a", "b"])
    assert both[0] == first
    assert len(service.samples) == 2


def test_a_column_that_does_not_fit_is_refused_before_anything_is_reserved(
    service: FakeService, ref: PartitionRef
) -> None:
    do_put(service, ref)
    del service.calls[:]
    with pytest.raises(SchemaMismatch, match="reward"):
        do_put(service, ref, {"reward": torch.tensor([1, 2])})
    with pytest.raises(UnsupportedValue, match="x"):
        do_put(service, ref, {"x": [object()]})
    assert service.calls == []


def test_no_row_is_no_call(service: FakeService, ref: PartitionRef) -> None:
    assert do_put(service, ref, {"x": torch.zeros(0, 3)}).tolist() == []
    assert service.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": ["a"]}, "keys: 1 of them for 2 rows"),
        ({"keys": ["a", "a"]}, r"keys\[1\]='a' is the same as keys\[0\]"),
        ({"keys": ["a", ""]}, r"keys\[1\]=''"),
        ({"keys": ["a", 3]}, r"keys\[1\]=3"),
        ({"keys": "ab"}, "expected one per row"),
        ({"keys": ["a", "x" * 513]}, r"keys\[1\].*512 bytes"),
        ({"keys": ["a", "\udc80"]}, r"keys\[1\].*UTF-8"),
        ({"ids": [1, 2], "keys": ["a", "b"]}, "samples that exist .* keep their keys"),
        ({"ids": [1]}, "ids: 1 of them for 2 rows"),
        ({"ids": [4, 4]}, r"ids\[1\]=4 is the same as ids\[0\]"),
        ({"ids": [1.5, 2.5]}, "expected integers"),
        ({"groups": ["g", 1.5]}, r"groups\[1\]=1.5"),
        ({"groups": "gg"}, "expected one per row"),
        ({"weight_version": (7, 6)}, r"weight_version=\(7, 6\)"),
        ({"weight_version": -1}, "weight_version=-1"),
        ({"weight_version": True}, "weight_version=True"),
        ({"weight_version": [1, (3, 2)]}, r"weight_version\[1\]=\(3, 2\)"),
        ({"weight_version": [1]}, "weight_version: 1 of them for 2 rows"),
        ({"tags": [{"a": 1}, 5]}, r"tags\[1\]=5"),
        ({"tags": {"a": [1]}}, r"tags\['a'\]=\[1\]"),
        ({"tags": {"a": None}}, r"tags\['a'\]=None"),
        ({"tags": {"a": "x" * 65536}}, "at most 65536"),
    ],
)
def test_arguments_that_are_off(
    service: FakeService, ref: PartitionRef, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        do_put(service, ref, **arguments)
    assert service.calls == []


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True])
def test_a_timeout_that_is_no_number_of_seconds(service: FakeService, ref: PartitionRef, timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        do_put(service, ref, timeout=timeout)
