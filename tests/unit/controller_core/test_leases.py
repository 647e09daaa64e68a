"""Sessions, leases, pins and starts: what ends when, and what is freed when."""

from __future__ import annotations

from typing import NoReturn

import pytest

from tests.model.driver import ARENA, LEASE, NODE, Driver, extents_of, ids, unpack
from tqclient import limits
from tqclient.errors import InvalidArgument, LeaseExpired, UnsupportedVersion
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import BlockRecord, Core, NodeAttached, SessionEnded, SessionOpened
from tqserver.controller.core import limits as core_limits


def _locate(driver: Driver, session: int, partition: int, *samples: int) -> int:
    request = pb.LocateRequest(session=session, partition_id=partition, ids=ids(*samples))
    return int(driver.core.locate(request, driver.now).pin)


def _clear(driver: Driver, session: int, partition: int, *samples: int) -> None:
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*samples)), session=session)


def test_session_opens_with_what_the_client_needs(driver: Driver) -> None:
    outcome = driver.send("open_session", pb.OpenSessionRequest(wire_version=limits.WIRE_VERSION))
    reply = outcome.reply
    assert isinstance(reply, pb.OpenSessionReply)
    assert (reply.session, reply.lease_ms, reply.epoch, [n.name for n in reply.nodes]) == (1, 10_000, 1, [NODE])
    assert outcome.effects == (SessionOpened(1),)


def test_other_wire_version_is_refused(driver: Driver) -> None:
    outcome = driver.send("open_session", pb.OpenSessionRequest(wire_version=limits.WIRE_VERSION + 1))
    assert type(outcome.error) is UnsupportedVersion


def test_missed_lease_ends_the_session_and_redelivers(driver: Driver, session: int) -> None:
    p, other = driver.partition(session, lease_ms=60_000), driver.open()
    driver.put(session, p, 2)
    driver.claim(session, p, 2)
    assert driver.core.next_deadline() == driver.now + LEASE
    driver.now += 6
    assert driver.core.heartbeat(other, (), driver.now) == (10_000, ())
    assert driver.core.due(driver.now) == []
    driver.now += 6
    (command,) = driver.core.due(driver.now)
    assert command.end_session.session == session
    with pytest.raises(LeaseExpired):  # its end is on its way to the journal
        driver.core.heartbeat(session, (), driver.now)
    assert SessionEnded(session) in driver.journal(command).effects
    assert driver.core.due(driver.now) == []
    claim = driver.claim(other, p, 2)
    assert claim.rows.attempts == b"\x02\0\0\0" * 2
    assert driver.core.next_deadline() == driver.now - 6 + LEASE


def test_end_that_was_not_applied_is_reported_again(driver: Driver, session: int) -> None:
    driver.now += LEASE
    assert len(driver.core.due(driver.now)) == 1
    assert driver.core.due(driver.now) == []
    assert driver.core.next_deadline() == driver.now + core_limits.DUE_AGAIN_S
    driver.now += core_limits.DUE_AGAIN_S
    assert len(driver.core.due(driver.now)) == 1


def test_claim_lease_may_be_shorter_and_is_renewed_with_the_session(driver: Driver, session: int) -> None:
    p = driver.partition(session, lease_ms=2_000)
    driver.put(session, p, 1)
    claim = driver.claim(session, p, 1)
    driver.now += 1.5
    assert driver.core.heartbeat(session, (), driver.now) == (2_000, ())
    driver.now += 1.5
    assert driver.core.due(driver.now) == []
    assert driver.core.renew_claim(session, claim.claim_id, driver.now) == 2_000
    driver.now += 2
    (command,) = driver.core.due(driver.now)
    assert command.expire_claim.claim_id == claim.claim_id
    with pytest.raises(LeaseExpired):
        driver.core.renew_claim(session, claim.claim_id, driver.now)
    driver.journal(command)
    with pytest.raises(LeaseExpired):
        driver.settle(session, claim.claim_id)
    assert driver.counts(p) == (0, 1, 0, 0, 0)


def test_leases_that_ended_long_before_their_deadlines_leave_nothing_behind(driver: Driver, session: int) -> None:
    p = driver.partition(session, lease_ms=60_000)
    driver.put(session, p, 1)
    leases = driver.core._state.leases
    driver.claim(session, p, 1)
    (kept,) = leases.claims
    driver.put(session, p, 3 * core_limits.ENDED_LEASES_MIN)
    for _ in range(3 * core_limits.ENDED_LEASES_MIN):
        driver.settle(session, driver.claim(session, p, 1).claim_id)
        assert len(leases._heap) <= core_limits.ENDED_LEASES_MIN + 1
    assert driver.core.next_deadline() == driver.now + LEASE  # the session's own
    driver.now += LEASE - 1
    driver.core.heartbeat(session, (), driver.now)
    driver.now += LEASE - 1
    assert driver.core.due(driver.now) == []
    driver.now += LEASE
    (end,) = driver.core.due(driver.now)
    assert end.end_session.session == session
    assert driver.core.heartbeat(driver.open(), (), driver.now)[0] == 10_000
    driver.now += 60
    assert kept in {command.expire_claim.claim_id for command in driver.core.due(driver.now)}


def test_claim_that_was_settled_while_its_expiry_was_under_way_stays_settled(driver: Driver, session: int) -> None:
    p = driver.partition(session, lease_ms=1_000)
    driver.put(session, p, 1)
    claim = driver.claim(session, p, 1)
    driver.now += 1
    (command,) = driver.core.due(driver.now)
    driver.settle(session, claim.claim_id)
    assert driver.journal(command).error is None
    assert driver.counts(p) == (0, 0, 0, 1, 0)


def test_pin_keeps_cleared_bytes_until_it_is_dropped(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    first, second = _locate(driver, session, p, 1), _locate(driver, session, p, 1)
    _clear(driver, session, p, 1)
    assert len(driver.sealed) == len(driver.synced()) == 1
    driver.believe(driver.core.drop_pins(session, [first, first, 999], driver.now))
    assert len(driver.sealed) == 1
    driver.believe(driver.core.heartbeat(session, [second], driver.now)[1])
    assert driver.sealed == set()


def test_a_pin_that_the_client_chose_is_held_once(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    request = pb.LocateRequest(session=session, partition_id=p, ids=ids(1), pin=7)
    assert driver.core.locate(request, driver.now).pin == 7
    with pytest.raises(InvalidArgument, match="pin 7"):
        driver.core.locate(request, driver.now)
    driver.believe(driver.core.drop_pins(session, [7], driver.now))
    assert driver.core.locate(request, driver.now).pin == 7
    _clear(driver, session, p, 1)
    assert len(driver.sealed) == 1
    driver.believe(driver.core.drop_pins(session, [7], driver.now))
    assert driver.sealed == set()
    with pytest.raises(InvalidArgument, match="pin"):
        driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(1), pin=1 << 40), driver.now)


def test_end_of_the_session_drops_its_pins(driver: Driver, session: int) -> None:
    p, other = driver.partition(session), driver.open()
    driver.put(session, p, 1)
    _locate(driver, other, p, 1)
    _clear(driver, session, p, 1)
    assert len(driver.sealed) == 1
    driver.ok("close_session", pb.CloseSessionRequest(), session=other)
    assert driver.sealed == set()


def test_after_a_start_nothing_is_freed_for_one_lease(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, blocks=[1, 1])
    old = _locate(driver, session, p, 1)
    driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    driver.send("start", journal_pb2.Start())
    assert driver.core.epoch == 2
    driver.quiet_until = driver.now + LEASE
    _clear(driver, session, p, 1)
    pin = _locate(driver, session, p, 2)
    assert pin != old
    _clear(driver, session, p, 2)
    driver.believe(driver.core.drop_pins(session, [old], driver.now))  # of before: names nothing
    driver.now += LEASE - 1
    driver.core.heartbeat(session, (), driver.now)
    assert driver.core.collect(driver.now) == ()
    assert driver.core.next_deadline() == driver.quiet_until
    driver.now += 1
    driver.believe(driver.core.collect(driver.now))
    assert len(driver.sealed) == 1  # the second is still pinned
    driver.believe(driver.core.drop_pins(session, [pin], driver.now))
    assert driver.sealed == set()


def test_pins_of_before_a_start_are_taken_again(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, blocks=[1, 1, 1])
    for pin, number in ((1, 1), (2, 2), (3, 3)):
        driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(number), pin=pin), driver.now)
    blocks = {pin: driver.core._state.leases.session(session).pins[pin][0] for pin in (1, 2, 3)}
    driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    driver.send("start", journal_pb2.Start())
    driver.quiet_until = driver.now + LEASE
    _clear(driver, session, p, 1)  # lingers for one lease
    held = [[1, blocks[1]], [1, blocks[1] + 100], [2, blocks[2]], [1 << 40, blocks[3]], [4, 12345]]
    for _ in range(2):  # a reply may be lost
        driver.core.hold_pins(session, pack_array(held, U64))
    assert driver.core._state.leases.session(session).pins == {1: [blocks[1]], 2: [blocks[2]]}
    driver.now += LEASE
    driver.core.heartbeat(session, (), driver.now)
    driver.believe(driver.core.collect(driver.now))
    _clear(driver, session, p, 2)
    _clear(driver, session, p, 3)
    assert len(driver.sealed) == 2
    driver.core.check_invariants()
    driver.believe(driver.core.drop_pins(session, [1], driver.now))
    assert len(driver.sealed) == 1
    driver.believe(driver.core.drop_pins(session, [2], driver.now))
    assert driver.sealed == set()
    with pytest.raises(LeaseExpired):
        driver.core.hold_pins(session + 100, pack_array(held, U64))


class _Unlooked(dict[int, BlockRecord]):
    """Nobody goes through it."""

    def values(self) -> NoReturn:
        raise AssertionError("all of it was looked at")

    __iter__ = items = values  # type: ignore[assignment]


def test_the_next_deadline_is_known_without_a_look_at_what_lingers(driver: Driver, session: int) -> None:
    """It is asked for after every few commands, and a reader may hold thousands of blocks that were cleared."""
    p = driver.partition(session)
    driver.put(session, p, 2)
    driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    driver.send("start", journal_pb2.Start())
    grace_until = driver.quiet_until = driver.now + LEASE
    driver.now += LEASE / 2
    driver.core.heartbeat(session, (), driver.now)
    _locate(driver, session, p, 1)
    _clear(driver, session, p, 1, 2)
    blocks = driver.core._state.blocks
    lingering = blocks.lingering
    blocks.lingering = _Unlooked(lingering)
    assert driver.core.next_deadline() == grace_until
    blocks.lingering = lingering
    driver.now = grace_until
    assert driver.core.collect(driver.now) == ()  # it is pinned
    blocks.lingering = _Unlooked(lingering)
    assert driver.core.next_deadline() == driver.now + LEASE / 2
    assert driver.core.collect(driver.now) == ()


def test_leases_restart_in_full(driver: Driver, session: int) -> None:
    driver.now += LEASE - 1
    driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    driver.send("start", journal_pb2.Start())
    driver.now += LEASE - 1
    assert driver.core.due(driver.now) == []
    driver.core.heartbeat(session, (), driver.now)


def test_session_of_another_client_is_refused(driver: Driver, session: int) -> None:
    request = pb.CreatePartitionRequest(name="p")
    assert type(driver.send("create_partition", request, client=2, session=session).error) is InvalidArgument


def test_node_sync_is_the_whole_truth(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, blocks=[1, 1])
    assert extents_of(driver.core, NODE, ARENA) == [[0, 512, 1, p], [512, 512, 1, p]]
    assert driver.core.node_sync(NODE, ARENA)[1].tolist() == [session]
    assert not extents_of(driver.core, NODE, 5)


def test_node_sync_tells_some_extents_at_a_time_as_they_were_when_it_was_asked_for(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_limits, "BLOCKS_TOLD_AT_ONCE", 2)
    p = driver.partition(session, keep=True)
    driver.put(session, p, 5, blocks=[1] * 5)
    parts, _ = driver.core.node_sync(NODE, ARENA)
    assert next(parts).tolist() == [[0, 512, 1, p], [512, 512, 1, p]]
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1, 3, 5)), session=session)
    driver.put(session, p, 1)
    assert [part[:, 0].tolist() for part in parts] == [[1024, 1536], [2048]]
    assert [extent[0] for extent in extents_of(driver.core, NODE, ARENA)] == [512, 1536, 2560]


def test_topology_changes_with_the_nodes(driver: Driver) -> None:
    version = driver.core.topology_version
    node = pb.Node(name=NODE, address="127.0.0.1:1", arena=ARENA)
    outcome = driver.send("attach_node", pb.NodeHello(node=node))
    assert outcome.effects == (NodeAttached(NODE),)
    assert driver.core.topology_version == version
    node.incarnation = 9
    driver.send("attach_node", pb.NodeHello(node=node))
    assert driver.core.topology_version == version + 1
    thief = pb.Node(name="thief", address="127.0.0.1:2", arena=ARENA)
    assert type(driver.send("attach_node", pb.NodeHello(node=thief)).error) is InvalidArgument


def test_blocks_stay_readable_after_a_node_restart(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    driver.send("attach_node", pb.NodeHello(node=pb.Node(name=NODE, address="127.0.0.1:9", arena=ARENA, incarnation=2)))
    assert _locate(driver, session, p, 1)
    assert driver.put(session, p, 1) == [2]
    assert unpack(driver.claim(session, p, 2).rows.ids) == [1, 2]
