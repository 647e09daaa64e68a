"""A repeated request has one effect and one answer."""

from __future__ import annotations

import pytest

from tests.model.driver import Driver, client_id, unpack
from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument, LeaseExpired
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, limits
from tqserver.controller.core.dedup import Replies


def _mutation(request: int, settled_below: int = 1, client: int = 1) -> common_pb2.Mutation:
    return common_pb2.Mutation(client_id=client_id(client), request=request, settled_below=settled_below)


def test_repeated_put_is_answered_with_the_same_ids_even_after_its_session_and_a_restart(
    driver: Driver, session: int
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    command, _ = driver.log[-1]
    driver.send("end_session", journal_pb2.EndSession(session=session))
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    outcome = driver.journal(command)
    assert outcome.repeated
    assert isinstance(outcome.reply, pb.CommitReply)
    assert unpack(outcome.reply.ids) == [1, 2, 3]
    assert driver.core.describe_partition(p).samples == 3
    assert driver.core.recorded(command.commit.mutation, "commit") == outcome.reply


def test_error_is_not_recorded(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    request = pb.ClaimRequest(partition_id=p, consumer="x", batch_size=1)
    assert driver.send("claim", request, session=session).error is not None
    command, _ = driver.log[-1]
    driver.put(session, p, 1)
    outcome = driver.journal(command)
    assert not outcome.repeated
    assert outcome.error is None


def test_same_number_for_another_command_is_refused(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.requests[1] -= 1
    outcome = driver.send("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    assert type(outcome.error) is InvalidArgument
    assert not driver.core.describe_partition(p).sealed


def test_settled_request_is_never_applied_again(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    command, _ = driver.log[-1]
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session, settled_below=4)
    outcome = driver.journal(command)
    assert type(outcome.error) is InvalidArgument
    assert driver.core.describe_partition(p).samples == 1


@pytest.mark.parametrize(
    "mutation",
    [
        common_pb2.Mutation(client_id=b"short", request=1, session=1),
        common_pb2.Mutation(client_id=client_id(1), request=0, session=1),
        common_pb2.Mutation(client_id=client_id(1), request=1, settled_below=2, session=1),
        common_pb2.Mutation(client_id=client_id(1), request=3, settled_until=4, session=1),
        common_pb2.Mutation(client_id=client_id(1), request=3, settled_until=4, open=b"1234567", session=1),
    ],
)
def test_malformed_mutation_is_refused(driver: Driver, mutation: common_pb2.Mutation) -> None:
    command = journal_pb2.Command(create_partition=pb.CreatePartitionRequest(mutation=mutation, name="p"))
    with pytest.raises(InvalidArgument):
        driver.core.check(command)
    assert type(driver.journal(command).error) is InvalidArgument


def test_unknown_session_is_refused(driver: Driver) -> None:
    assert type(driver.send("create_partition", pb.CreatePartitionRequest(name="p")).error) is LeaseExpired


def test_close_of_an_ended_session_succeeds(driver: Driver, session: int) -> None:
    driver.send("end_session", journal_pb2.EndSession(session=session))
    driver.ok("close_session", pb.CloseSessionRequest(), session=session)


def test_oldest_replies_are_forgotten_but_not_applied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLY_BYTES_PER_CLIENT_MAX", 100)
    replies = Replies()
    for request in (1, 2, 3):
        replies.record(_mutation(request), "clear", pb.ClearReply(ids=bytes(40)))
    with pytest.raises(InvalidArgument, match="forgotten"):
        replies.recorded(_mutation(1), "clear")
    assert replies.recorded(_mutation(3), "clear") == pb.ClearReply(ids=bytes(40))
    assert Replies.from_tree(replies.to_tree()).to_tree() == replies.to_tree()


def test_client_that_never_settles_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REPLIES_PER_CLIENT_MAX", 2)
    replies = Replies()
    replies.session_opened(client_id(1))
    for request in (1, 2):
        replies.record(_mutation(request), "clear", pb.ClearReply())
    with pytest.raises(InvalidArgument, match="settled_below"):
        replies.admit(_mutation(3))
    replies.admit(_mutation(3, settled_below=2))


def test_replies_behind_a_request_that_waits_for_long_are_settled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests 2 and 5 are open, 1 to 6 were sent; what was said before and comes late unsettles nothing."""
    monkeypatch.setattr(limits, "REPLIES_PER_CLIENT_MAX", 2)
    replies = Replies()
    for request in (1, 3, 4):
        replies.record(_mutation(request), "clear", pb.ClearReply())
    with pytest.raises(InvalidArgument, match="or settled_until"):
        replies.admit(_mutation(6, 2))
    told, late = _mutation(6, 2), _mutation(7, 1)
    told.settled_until, told.open = 6, pack_array([2, 5], U64)
    late.settled_until, late.open = 4, pack_array([1, 2, 3], U64)
    replies.admit(told)
    replies.record(told, "clear", pb.ClearReply())
    replies.record(late, "clear", pb.ClearReply())
    for table in (replies, Replies.from_tree(replies.to_tree())):
        for settled in (1, 3, 4):
            with pytest.raises(InvalidArgument, match=f"request {settled}: this client has settled it"):
                table.recorded(_mutation(settled), "clear")
        known = [table.recorded(_mutation(request), "clear") is not None for request in (2, 5, 6, 7, 8)]
        assert known == [False, False, True, True, False]
    replies.record(_mutation(2), "clear", pb.ClearReply())  # the long one, at last
    assert replies.recorded(_mutation(2), "clear") == pb.ClearReply()


def test_a_snapshot_from_before_says_nothing_of_single_requests() -> None:
    replies = Replies.from_tree([[[client_id(1), 4, 1, [[4, "clear", b""]]]], []])
    with pytest.raises(InvalidArgument, match="all below 4"):
        replies.recorded(_mutation(3), "clear")
    assert replies.recorded(_mutation(4), "clear") == pb.ClearReply()


def test_longest_idle_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_CLIENTS_MAX", 2)
    replies = Replies()
    for client in (1, 2, 3, 4):
        replies.session_opened(client_id(client))
        replies.record(_mutation(1, client=client), "clear", pb.ClearReply())
    for client in (2, 1, 3):
        replies.session_ended(client_id(client))
    known = [replies.recorded(_mutation(1, client=client), "clear") is not None for client in (1, 2, 3, 4)]
    assert known == [True, False, True, True]


def test_wire_version_is_the_current_one() -> None:
    request = pb.OpenSessionRequest(wire_version=wire_limits.WIRE_VERSION, mutation=_mutation(1))
    Core().check(journal_pb2.Command(open_session=request))
