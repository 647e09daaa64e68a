"""A reply is lost after its command was committed: the same request gets the same answer, and has one effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tqclient as tq
import tqclient.lane
from tests.harness import FaultProxy, wait_until
from tests.process.controller_daemon import Client, Controller, daemon, ids_of
from tqclient import errors
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.local import LocalCluster

__all__ = ["daemon"]

LEASE = 1.0
LEASE_MS = 1000
SLACK = 0.5
"""Seconds by which a redelivery may follow the end of its lease."""


@pytest.fixture
def proxied(daemon: Controller) -> Iterator[tuple[FaultProxy, Client, Client]]:
    """A proxy before a controller, a client through it, and one beside it, with three samples in no partition yet."""
    daemon.start()
    node, beside = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    direct = daemon.address
    with FaultProxy(direct) as proxy:
        daemon.address = proxy.address
        through = daemon.client()
        daemon.address = direct
        yield proxy, through, beside
    node.close()


def _send_in_vain(proxy: FaultProxy, client: Client, method: str, request: Any) -> None:
    """Sends a request whose answer is swallowed on its way back."""
    dropped = proxy.counters.dropped_replies
    proxy.drop_next_reply()
    with pytest.raises(errors.Unavailable):
        client.call(method, request)
    assert proxy.counters.dropped_replies == dropped + 1


def test_the_same_request_gets_the_claim_whose_reply_was_lost(proxied: tuple[FaultProxy, Client, Client]) -> None:
    proxy, through, beside = proxied
    part = beside.create()
    ids = beside.commit(part, 3)
    request = through.claim_request(part, 2)
    _send_in_vain(proxy, through, "Claim", request)
    assert beside.counts(part)["leased"] == 2  # it was granted
    claim = through.call_again("Claim", request)
    assert ids_of(claim.rows.ids) == ids[:2]
    assert ids_of(beside.claim(part, 1).rows.ids) == ids[2:]
    assert beside.call("DescribeCluster", pb.DescribeClusterRequest()).claims == 2
    through.settle(claim.claim_id)
    assert beside.counts(part) == {"pending": 0, "ready": 0, "leased": 1, "consumed": 2, "dropped": 0}


def test_a_claim_that_nobody_asks_for_again_is_delivered_again_at_its_lease(
    proxied: tuple[FaultProxy, Client, Client],
) -> None:
    proxy, through, beside = proxied
    part = beside.create(lease_ms=LEASE_MS)
    ids = beside.commit(part, 2)
    request = through.claim_request(part, 2)
    _send_in_vain(proxy, through, "Claim", request)
    with pytest.raises(errors.ClaimTimeout):
        beside.claim(part, 2)
    again = beside.claim(part, 2, wait_ms=int((LEASE + SLACK) * 1000))
    assert ids_of(again.rows.ids) == ids
    assert np.frombuffer(again.rows.attempts, "<u4").tolist() == [2, 2]
    # Whoever asks at last is given the recorded claim, and can do no harm with it.
    late = through.call_again("Claim", request)
    assert late.claim_id != again.claim_id
    with pytest.raises(errors.LeaseExpired):
        through.settle(late.claim_id)
    beside.settle(again.claim_id)
    assert beside.counts(part)["consumed"] == 2


@pytest.fixture
def over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients call over gRPC alone: a lane would go past the proxy."""
    monkeypatch.setenv("TQ_LANE", "off")


class _Calls:
    """What a user calls, of each kind that changes something, and what it must come to; one after the other."""

    def __init__(self, client: tq.Client) -> None:
        self.client = client
        self.part: Any = None
        self.ids: Any = None
        self.batch: Any = None

    def create(self) -> None:
        self.part = self.client.create_partition("part", lease=LEASE)
        assert [each.name for each in self.client.partitions()] == ["part"]

    def put(self) -> None:
        self.ids = self.part.put({"x": np.arange(6)})
        assert self.part.describe().samples == 6

    def put_with_keys(self) -> None:
        assert len(self.part.put({"x": np.arange(2)}, keys=["a", "b"])) == 2
        assert self.part.describe().samples == 8

    def add_column(self) -> None:
        self.part.put({"y": np.arange(6) * 2}, ids=self.ids)
        assert self.part.get(self.ids, fields=["y"])["y"].tolist() == [0, 2, 4, 6, 8, 10]

    def claim(self) -> None:
        self.batch = self.part.consumer("c", fields=["x", "y"]).claim(2)
        assert self.batch.ids.tolist() == self.ids[:2].tolist()
        assert self.batch.attempts.tolist() == [1, 1]
        assert self.client.describe().claims == 1

    def ack(self) -> None:
        self.batch.ack()
        assert self.part.describe().counts["c"]["consumed"] == 2

    def clear(self) -> None:
        assert self.part.clear(self.ids[1:3]).tolist() == self.ids[1:3].tolist()
        assert self.part.describe().samples == 6

    def tags(self) -> None:
        self.part.set_tags(self.ids[:1], {"seen": True})
        assert self.part.get(self.ids[:1], fields=["x"]).tags == [{"seen": True}]

    def metadata(self) -> None:
        self.part.metadata["step"] = 3
        assert self.part.metadata.to_dict() == {"step": 3}

    def seal(self) -> None:
        self.part.seal()
        with pytest.raises(tq.Sealed):
            self.part.put({"x": np.arange(1)})


def test_no_call_of_a_client_shows_that_its_reply_was_lost(no_leaks: None, over_grpc: None) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", session_lease=LEASE) as cluster,
        FaultProxy(cluster.address) as proxy,
        tq.connect(proxy.address, timeout=10) as client,
    ):
        calls = _Calls(client)
        steps = [calls.create, calls.put, calls.put_with_keys, calls.add_column, calls.claim, calls.ack]
        for number, step in enumerate([*steps, calls.clear, calls.tags, calls.metadata, calls.seal], 1):
            proxy.drop_next_reply()
            step()
            assert proxy.counters.dropped_replies == number, step.__name__


def test_a_client_whose_replies_are_lost_at_random_puts_and_acks_each_sample_once(seed: int, over_grpc: None) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", session_lease=LEASE) as cluster,
        FaultProxy(cluster.address, seed=seed) as proxy,
        tq.connect(proxy.address, timeout=20) as client,
    ):
        part = client.create_partition("part", lease=LEASE)
        consumer = part.consumer("c")
        proxy.reset_at_random(0.1, direction="reply")
        acked: list[int] = []
        put: list[int] = []
        for turn in range(60):
            put += part.put({"x": np.full(3, turn)}).tolist()
            batch = consumer.claim(3)
            try:
                batch.ack()
            except tq.LeaseExpired:
                continue  # it comes again
            acked += batch.ids.tolist()
        assert proxy.counters.resets > 10
        proxy.heal()
        part.seal()
        for batch in consumer.batches(64):
            acked += batch.ids.tolist()
        info = part.describe()
        wait_until(lambda: client.describe().claims == 0, what="no claim is left over")
    assert info.samples == len(put) == 180
    assert sorted(acked) == sorted(put)
    assert info.counts["c"]["consumed"] == 180
