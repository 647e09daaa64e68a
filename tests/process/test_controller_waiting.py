"""Calls that wait on a real controller: woken, refused in time, shared by retries, and free of charge meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest

from tests.harness import wait_until
from tests.process.controller_daemon import Client, Controller, client, controller, ids_of, node
from tqclient import errors
from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb

__all__ = ["client", "controller", "node"]


def waiting(client: Client) -> int:
    return int(client.call("DescribeCluster", pb.DescribeClusterRequest()).waiting_claims)


def test_a_claim_waits_until_a_put_meets_it(client: Client) -> None:
    part = client.create()
    pending = client.stub.Claim.future(client.claim_request(part, 2, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits")
    client.commit(part, 1)
    assert not pending.done()
    second = client.commit(part, 1)
    assert ids_of(pending.result().rows.ids)[1:] == second


def test_a_claim_times_out_by_its_wait_and_by_its_deadline_and_changes_nothing(client: Client) -> None:
    part = client.create("a/1")
    client.commit(part, 1)
    for wait_ms, timeout in ((0, 10), (100, 10), (10_000, 0.3)):
        with pytest.raises(errors.ClaimTimeout, match="of partition 'a/1': 1 samples are ready"):
            client.call("Claim", client.claim_request(part, 2, wait_ms=wait_ms), timeout=timeout)
    assert client.counts(part)["ready"] == 1
    assert waiting(client) == 0


def test_a_claim_whose_caller_is_gone_is_not_granted(client: Client) -> None:
    part = client.create()
    gone = client.stub.Claim.future(client.claim_request(part, 1, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits")
    gone.cancel()
    wait_until(lambda: waiting(client) == 0, what="the claim is withdrawn")
    client.commit(part, 1)
    assert client.counts(part)["leased"] == 0


def test_a_claim_over_a_sealed_partition_gets_the_rest_and_then_sealed(client: Client) -> None:
    part = client.create()
    client.commit(part, 3)
    pending = client.stub.Claim.future(client.claim_request(part, 8, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits")
    client.call("SealPartition", pb.SealPartitionRequest(mutation=client.mutation(), partition_id=part))
    claim = pending.result()
    assert len(ids_of(claim.rows.ids)) == 3
    late = client.stub.Claim.future(client.claim_request(part, 8, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits for what may be released")
    client.settle(claim.claim_id)
    with pytest.raises(grpc.RpcError, match="has had all of it"):
        late.result()
    with pytest.raises(errors.Sealed):
        client.commit(part, 1)


def test_claims_of_a_deleted_partition_are_refused(client: Client) -> None:
    part = client.create()
    pending = client.stub.Claim.future(client.claim_request(part, 1, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits")
    client.call("DeletePartition", pb.DeletePartitionRequest(mutation=client.mutation(), partition_id=part))
    with pytest.raises(grpc.RpcError, match="deleted"):
        pending.result()


def test_repeats_of_a_waiting_claim_share_one_grant(client: Client, controller: Controller) -> None:
    part = client.create()
    request = client.claim_request(part, 1, wait_ms=10_000)
    calls = [client.stub.Claim.future(request, timeout=15) for _ in range(3)]
    wait_until(lambda: waiting(client) == 1, what="the claim waits, once")
    calls.pop().cancel()
    client.commit(part, 2)
    replies = [call.result() for call in calls] + [client.call("Claim", request)]
    assert len({reply.claim_id for reply in replies}) == 1
    assert client.counts(part) == {"pending": 0, "ready": 1, "leased": 1, "consumed": 0, "dropped": 0}


def test_a_large_claim_gathers_its_batch_while_small_ones_keep_coming(client: Client) -> None:
    part = client.create()
    large = client.stub.Claim.future(client.claim_request(part, 8, wait_ms=10_000), timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the large claim waits")
    small = []
    for number in range(10):
        small.append(client.stub.Claim.future(client.claim_request(part, 1, wait_ms=10_000), timeout=15))
        wait_until(lambda count=number + 2: waiting(client) == count, what="the small claim waits")
        if number < 7:
            client.commit(part, 1)
    ids = client.commit(part, 11)
    first = ids[0] - 7  # the samples of one partition that nobody else puts to
    assert ids_of(large.result().rows.ids) == list(range(first, first + 8))
    assert [ids_of(call.result().rows.ids) for call in small] == [[id_] for id_ in range(first + 8, first + 18)]


def test_a_claim_whose_session_ends_holds_up_nobody(client: Client, controller: Controller) -> None:
    part = client.create()
    client.commit(part, 1)
    gone = controller.client()
    large = gone.stub.Claim.future(gone.claim_request(part, 8, wait_ms=60_000), timeout=60)
    wait_until(lambda: waiting(client) == 1, what="the large claim waits")
    small = client.stub.Claim.future(client.claim_request(part, 1, wait_ms=5_000), timeout=10)
    wait_until(lambda: waiting(client) == 2, what="the small claim waits behind it")
    gone.call("CloseSession", pb.CloseSessionRequest(mutation=gone.mutation()))
    assert len(ids_of(small.result().rows.ids)) == 1
    with pytest.raises(grpc.RpcError, match="has ended"):
        large.result()


def test_a_put_waits_for_room_and_gives_up_in_time(client: Client) -> None:
    part = client.create(capacity_samples=2)
    ids = pack_array(client.commit(part, 2), I64)
    with pytest.raises(errors.BackpressureTimeout):
        client.commit(part, 1, wait_ms=50)
    pending = [client.stub.Commit.future(client.commit_request(part, 1, wait_ms=10_000), timeout=15) for _ in range(2)]
    client.call("Clear", pb.ClearRequest(mutation=client.mutation(), partition_id=part, ids=ids))
    assert [len(ids_of(call.result().ids)) for call in pending] == [1, 1]
    with pytest.raises(errors.InvalidArgument, match="capacity_samples is 2"):
        client.commit(part, 3, wait_ms=10_000)


def test_a_thousand_waiting_claims_cost_nothing_and_are_all_woken(client: Client, controller: Controller) -> None:
    part = client.create()
    channels = [controller.client() for _ in range(8)]
    woken: dict[int, float] = {}
    done = threading.Event()

    def wake(call: Any) -> None:
        woken[call.result().claim_id] = time.monotonic()
        if len(woken) == 1000:
            done.set()

    calls = [
        channels[number % 8].stub.Claim.future(channels[number % 8].claim_request(part, 1, wait_ms=60_000), timeout=60)
        for number in range(1000)
    ]
    wait_until(lambda: waiting(client) == 1000, what="all claims wait")
    laps = []
    for _ in range(100):
        begin = time.perf_counter()
        client.counts(part)
        laps.append(time.perf_counter() - begin)
    assert sorted(laps)[50] < 0.010
    for call in calls:
        call.add_done_callback(wake)
    client.commit(part, 1000)
    assert done.wait(20)
    assert len(woken) == 1000  # each its own claim
    assert client.counts(part)["leased"] == 1000


def test_a_claim_that_was_given_up_is_not_granted_by_asking_what_became_of_it(client: Client) -> None:
    part = client.create(max_attempts=1)
    request = client.claim_request(part, 1, wait_ms=10_000)
    gone = client.stub.Claim.future(request, timeout=15)
    wait_until(lambda: waiting(client) == 1, what="the claim waits")
    request.abandoned = True
    with pytest.raises(errors.ClaimTimeout, match="gave up"):
        client.call("Claim", request)
    with pytest.raises(grpc.RpcError, match="gave up"):
        gone.result()
    assert waiting(client) == 0
    client.commit(part, 1)
    request.abandoned = False
    with pytest.raises(errors.ClaimTimeout, match="gave up"):  # a copy that was long on its way
        client.call("Claim", request)
    assert client.counts(part)["ready"] == 1


def test_a_claim_that_was_granted_before_it_was_given_up_is_told(client: Client) -> None:
    part = client.create()
    client.commit(part, 1)
    request = client.claim_request(part, 1)
    claim = client.call("Claim", request)
    request.abandoned = True
    assert client.call("Claim", request).claim_id == claim.claim_id
    client.settle(claim.claim_id, pb.VERDICT_RELEASE)


def test_a_commit_that_was_given_up_is_never_applied(client: Client) -> None:
    """Neither one that waits for room, nor one that comes after the word that it was given up."""
    part = client.create(capacity_samples=1)
    ids = pack_array(client.commit(part, 1), I64)
    request = client.commit_request(part, 1, wait_ms=10_000)
    gone = client.stub.Commit.future(request, timeout=15)
    time.sleep(0.3)  # it waits by now; nothing tells, and either way it must not be applied
    late = client.commit_request(part, 1)
    for each in (request, late):
        asking = pb.CommitRequest(mutation=each.mutation, partition_id=part, abandoned=True)
        with pytest.raises(errors.BackpressureTimeout, match="gave up"):
            client.call("Commit", asking)
    with pytest.raises(grpc.RpcError, match="gave up"):
        gone.result()
    client.call("Clear", pb.ClearRequest(mutation=client.mutation(), partition_id=part, ids=ids))
    for each in (request, late):
        with pytest.raises(errors.BackpressureTimeout, match="gave up"):
            client.call("Commit", each)
    assert client.counts(part)["ready"] == 0


def test_a_commit_that_was_applied_before_it_was_given_up_is_told(client: Client) -> None:
    part = client.create()
    request = client.commit_request(part, 2)
    reply = client.call("Commit", request)
    asking = pb.CommitRequest(mutation=request.mutation, partition_id=part, abandoned=True)
    assert client.call("Commit", asking) == reply
    assert client.counts(part)["ready"] == 2
