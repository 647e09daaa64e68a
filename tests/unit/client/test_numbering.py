"""Which requests a mutation says are settled."""

from __future__ import annotations

from tests.unit.client.fakes import FakeService
from tqclient.state import LAG_MAX
from tqclient.wire.packing import U64, unpack_array


def test_requests_behind_one_that_waits_for_long_are_told_by_name(service: FakeService) -> None:
    state = service.state
    first = state.requests.take()
    others = [state.requests.take() for _ in range(LAG_MAX)]
    short = state.mutation(others[-1], None)
    assert (short.settled_below, short.settled_until, short.open) == (first, 0, b"")
    for number in others[:-1]:
        state.requests.settle(number)
    last = state.requests.take()
    told = state.mutation(last, None)
    assert (told.settled_below, told.settled_until) == (first, last + 1)
    assert unpack_array(told.open, U64, what="open").tolist() == [first, others[-1], last]
    state.requests.settle(first)
    assert state.mutation(last, None).open == b""
