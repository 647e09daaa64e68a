"""Every mutation, sent three times at once and again after a restart, leaves the state that sending it once leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.process.controller_daemon import Client, Controller, Node, daemon, ids_of
from tqclient.wire.packing import I64, pack_array, pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2, storage_pb2
from tqserver.controller.core import Core
from tqserver.controller.journal import SqliteJournal
from tqserver.controller.pipeline import recover

__all__ = ["daemon"]

TRUE: Final = b"\xc3"  # msgpack
MAX_ATTEMPTS: Final = 1


@dataclass
class _World:
    """What the cases act on, and what they learn on the way."""

    client: Client
    once: Callable[[str, Any], Any]
    part: int = 0
    doomed: int = 0
    ids: list[int] = field(default_factory=list)
    claim_id: int = 0
    permit: int = 0


def _open_session(world: _World) -> Any:
    mutation = world.client.mutation()
    mutation.session = 0
    return pb.OpenSessionRequest(mutation=mutation, label="again", version="0", wire_version=1)


def _close_session(world: _World) -> Any:
    mutation = world.client.mutation()
    mutation.session = world.once("OpenSession", _open_session(world)).session
    return pb.CloseSessionRequest(mutation=mutation)


def _create_partition(world: _World) -> Any:
    policy = pb.Policy(max_staleness=5, max_attempts=MAX_ATTEMPTS)
    return pb.CreatePartitionRequest(mutation=world.client.mutation(), name="p", consumers=["c"], policy=policy)


def _set_metadata(world: _World) -> Any:
    return pb.SetMetadataRequest(mutation=world.client.mutation(), partition_id=world.part, set={"step": b"\x03"})


def _set_version(world: _World) -> Any:
    return pb.SetVersionRequest(mutation=world.client.mutation(), partition_id=world.part, version=7)


def _commit(world: _World) -> Any:
    return world.client.commit_request(world.part, 8)


def _claim(world: _World) -> Any:
    return world.client.claim_request(world.part, 4)


def _settle(world: _World) -> Any:
    return pb.SettleRequest(mutation=world.client.mutation(), claim_id=world.claim_id, verdict=pb.VERDICT_ACK)


def _requeue(world: _World) -> Any:
    claim = world.once("Claim", world.client.claim_request(world.part, 2))
    release = pb.SettleRequest(mutation=world.client.mutation(), claim_id=claim.claim_id, verdict=pb.VERDICT_RELEASE)
    world.once("Settle", release)  # their only attempt is spent: they are dead
    return pb.RequeueRequest(
        mutation=world.client.mutation(), partition_id=world.part, consumer="c", ids=claim.rows.ids
    )


def _set_tags(world: _World) -> Any:
    tags = pack_blobs([b"\x81\xa4seen" + TRUE])
    ids = pack_array(world.ids[:1], I64)
    return pb.SetTagsRequest(mutation=world.client.mutation(), partition_id=world.part, ids=ids, tags=tags)


def _clear(world: _World) -> Any:
    ids = pack_array(world.ids[3:5], I64)
    return pb.ClearRequest(mutation=world.client.mutation(), partition_id=world.part, ids=ids)


def _reset_consumer(world: _World) -> Any:
    return pb.ResetConsumerRequest(mutation=world.client.mutation(), partition_id=world.part, consumer="c")


def _register_producer(world: _World) -> Any:
    return pb.RegisterProducerRequest(mutation=world.client.mutation(), partition_id=world.part)


def _unregister_producer(world: _World) -> Any:
    return pb.UnregisterProducerRequest(mutation=world.client.mutation(), partition_id=world.part)


def _acquire_permit(world: _World) -> Any:
    return pb.AcquirePermitRequest(mutation=world.client.mutation(), partition_id=world.part, samples=3)


def _return_permit(world: _World) -> Any:
    return pb.ReturnPermitRequest(mutation=world.client.mutation(), partition_id=world.part, permit=world.permit)


def _register_rank(world: _World) -> Any:
    alone = pb.Topology(dp=1, tp=1, pp=1, cp=1, ep=1, members=1)
    return pb.RegisterRankRequest(
        mutation=world.client.mutation(), partition_id=world.part, consumer="c", topology=alone
    )


def _seal_partition(world: _World) -> Any:
    return pb.SealPartitionRequest(mutation=world.client.mutation(), partition_id=world.part)


def _delete_partition(world: _World) -> Any:
    create = pb.CreatePartitionRequest(mutation=world.client.mutation(), name="doomed")
    world.doomed = world.once("CreatePartition", create).partition.partition_id
    return pb.DeletePartitionRequest(mutation=world.client.mutation(), partition_id=world.doomed)


CASES: Final[dict[str, Callable[[_World], Any]]] = {
    "OpenSession": _open_session,
    "CloseSession": _close_session,
    "CreatePartition": _create_partition,
    "SetMetadata": _set_metadata,
    "SetVersion": _set_version,
    "Commit": _commit,
    "Claim": _claim,
    "Settle": _settle,
    "Requeue": _requeue,
    "SetTags": _set_tags,
    "Clear": _clear,
    "ResetConsumer": _reset_consumer,
    "RegisterProducer": _register_producer,
    "UnregisterProducer": _unregister_producer,
    "AcquirePermit": _acquire_permit,
    "ReturnPermit": _return_permit,
    "RegisterRank": _register_rank,
    "SealPartition": _seal_partition,
    "DeletePartition": _delete_partition,
}
"""RPC → the request that is repeated; in this order, each on what the former ones left."""

READS: Final = {
    "Controller": {
        *("DescribePartition", "ListPartitions", "ListDead", "DescribeCluster", "GetDirectories"),
        *("Heartbeat", "RenewClaim", "Locate"),  # leases and pins: volatile, and renewed as often as they are asked for
        "Attach",  # the link of a node: its last hello counts
        "Watch",
    },
    "Storage": {"DescribeNode", "Read"},
}
"""RPCs that leave no trace in the journal."""
NOT_NUMBERED: Final = {"Storage": {"Reserve", "CloseWindow", "Write"}}
"""Changes outside of the journal: a window that nobody knows of returns with its session, closing again is no change,
and writing the same bytes into an open window again leaves them."""


def test_every_rpc_is_told_apart_here() -> None:
    """A new RPC must say which kind it is, and a new mutation must bring its case."""
    for service in (pb.DESCRIPTOR.services_by_name["Controller"], storage_pb2.DESCRIPTOR.services_by_name["Storage"]):
        numbered = {name for name, method in service.methods_by_name.items() if _is_mutation(method)}
        others = READS.get(service.name, set()) | NOT_NUMBERED.get(service.name, set())
        assert numbered == (set(CASES) if service.name == "Controller" else set())
        assert set(service.methods_by_name) == numbered | others


def _is_mutation(method: Any) -> bool:
    return "mutation" in method.input_type.fields_by_name


@pytest.fixture
def attached(daemon: Controller) -> Iterator[tuple[Controller, Node, Client]]:
    daemon.start()
    node = daemon.node()
    assert node.next_order().HasField("sync")
    yield daemon, node, daemon.client()
    node.close()


def _learn(world: _World, method: str, reply: Any) -> None:
    if method == "CreatePartition":
        world.part = reply.partition.partition_id
    elif method == "Commit":
        world.ids = ids_of(reply.ids)
    elif method == "Claim":
        world.claim_id = reply.claim_id
    elif method == "AcquirePermit":
        world.permit = reply.permit


def _comparable(reply: Any) -> bytes:
    """The reply without directories: a session is sent each of them once."""
    copy = type(reply).FromString(reply.SerializeToString())
    if isinstance(copy, pb.ClaimReply):
        for block in copy.rows.blocks:
            block.ClearField("directory")
    if isinstance(copy, pb.OpenSessionReply):
        copy.ClearField("nodes")  # whether they are attached just now
    return bytes(copy.SerializeToString(deterministic=True))


def _durable_state(core: Core) -> bytes:
    """Everything but how many records and starts it took to get there."""
    core._state.sequence = core._state.epoch = 0
    return core.snapshot()


def _recovered(daemon: Controller) -> Core:
    journal = SqliteJournal(daemon.data_dir)
    try:
        return recover(journal, lambda: 0.0, 60.0)
    finally:
        journal.close()


def test_every_mutation_sent_three_times_at_once_and_again_after_a_restart_has_one_effect(
    attached: tuple[Controller, Node, Client],
) -> None:
    daemon, node, client = attached
    node.close()
    daemon.child.kill()
    model = _recovered(daemon)  # from here on it is told each command once
    model.apply(journal_pb2.Command(start=journal_pb2.Start()), 0.0, 0)
    daemon.start()
    sent: list[tuple[str, Any, bytes]] = []

    def once(method: str, request: Any) -> Any:
        reply = client.call(method, request)
        _apply_once(model, method, request)
        return reply

    def three_times(method: str, request: Any) -> Any:
        replies = list(pool.map(lambda _: client.call(method, request), range(3)))
        _apply_once(model, method, request)
        assert len({_comparable(reply) for reply in replies}) == 1, method
        sent.append((method, request, _comparable(replies[0])))
        return replies[0]

    world = _World(client, once)
    with ThreadPoolExecutor(3) as pool:
        for method, build in CASES.items():
            _learn(world, method, three_times(method, build(world)))
    daemon.child.kill()
    daemon.start()
    for method, request, reply in sent:
        assert _comparable(client.call(method, request)) == reply, method
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert list(listed) == list(model.list_partitions())
    # Eight rows, two of them cleared, all unconsumed again; worked out by hand.
    (counts,) = listed[0].consumers
    assert (listed[0].samples, listed[0].version, listed[0].sealed) == (6, 7, True)
    assert (counts.ready, counts.leased, counts.consumed, counts.dropped) == (6, 0, 0, 0)
    daemon.child.kill()
    assert _durable_state(_recovered(daemon)) == _durable_state(model)


def _apply_once(model: Core, method: str, request: Any) -> None:
    kind = "".join("_" + letter.lower() if letter.isupper() else letter for letter in method)[1:]
    outcome = model.apply(journal_pb2.Command(**{kind: request}), 0.0, 0)
    assert outcome.error is None, (method, outcome.error)
    assert not outcome.repeated


def test_a_mutation_that_is_repeated_while_it_is_under_way_and_across_a_restart_has_one_effect(
    attached: tuple[Controller, Node, Client],
) -> None:
    """The calls are under way when the process dies; each of them is told the same by the next one."""
    daemon, _, client = attached
    part = client.create()
    requests = [client.commit_request(part, 2, keys=[f"{number}-a", f"{number}-b"]) for number in range(20)]
    calls = [client.stub.Commit.future(request, timeout=20) for request in requests for _ in range(3)]
    calls[0].result()  # the rest is on its way
    daemon.child.kill()
    daemon.start()
    answered: dict[int, set[bytes]] = {number: set() for number in range(len(requests))}
    for index, call in enumerate(calls):
        if call.exception() is None:  # the others went down with the process
            answered[index // 3].add(call.result().ids)
    for number, request in enumerate(requests):
        answered[number].update(client.call("Commit", request).ids for _ in range(2))
    assert [len(replies) for replies in answered.values()] == [1] * 20
    ids = [id_ for (packed,) in answered.values() for id_ in ids_of(packed)]
    assert len(set(ids)) == 40
    assert client.counts(part)["ready"] == 40
