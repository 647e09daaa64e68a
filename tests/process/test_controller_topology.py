"""Ranks of a topology against a real controller: they wait, wake together, and go on after it was killed."""

from __future__ import annotations

import pytest

from tests.harness import wait_until
from tests.process.controller_daemon import Client, Controller, daemon, ids_of
from tqclient.errors import LeaseExpired, TopologyMismatch
from tqclient.wire.v1 import controller_pb2 as pb

__all__ = ["daemon"]


def _place(dp_rank: int, member: int, **options: int) -> pb.Topology:
    sizes = {"dp": 2, "tp": 2, "pp": 1, "cp": 1, "ep": 1, "members": 2, **options}
    return pb.Topology(dp_rank=dp_rank, member=member, world_rank=2 * dp_rank + member, **sizes)


def test_waiting_ranks_wake_with_the_same_rows_and_outlive_the_controller(daemon: Controller) -> None:
    daemon.start()
    node, producer = daemon.node(), daemon.client()
    part = producer.create()
    places = [(dp_rank, member) for dp_rank in (0, 1) for member in (0, 1)]
    ranks: dict[tuple[int, int], Client] = {place: daemon.client() for place in places}
    for place, rank in ranks.items():
        request = pb.RegisterRankRequest(
            mutation=rank.mutation(), partition_id=part, consumer="c", topology=_place(*place)
        )
        assert rank.call("RegisterRank", request).registered == places.index(place) + 1
    pending = {
        place: rank.stub.Claim.future(rank.claim_request(part, 3, wait_ms=10_000, topology=_place(*place)), timeout=15)
        for place, rank in ranks.items()
    }
    wait_until(
        lambda: producer.call("DescribeCluster", pb.DescribeClusterRequest()).waiting_claims == 4,
        what="every rank waits",
    )
    put = producer.commit(part, 6)
    claims = {place: future.result() for place, future in pending.items()}
    rows = {place: ids_of(claim.rows.ids) for place, claim in claims.items()}
    assert rows[0, 0] == rows[0, 1]
    assert rows[1, 0] == rows[1, 1]
    assert sorted(rows[0, 0] + rows[1, 0]) == put
    assert all(claim.rows.blocks[0].directory for claim in claims.values())
    ranks[0, 0].settle(claims[0, 0].claim_id)
    node.close()
    daemon.child.kill()
    daemon.start()
    ranks[0, 1].settle(claims[0, 1].claim_id)
    assert producer.counts(part) == {"pending": 0, "ready": 0, "leased": 3, "consumed": 3, "dropped": 0}
    ranks[1, 1].settle(claims[1, 1].claim_id, pb.VERDICT_RELEASE)
    with pytest.raises(LeaseExpired):
        ranks[1, 0].settle(claims[1, 0].claim_id)
    again = ranks[1, 0].claim(part, 3, topology=_place(1, 0))
    assert (ids_of(again.rows.ids), again.step) == (rows[1, 0], 0)
    with pytest.raises(TopologyMismatch, match="registered with dp=2"):
        producer.claim(part, 3, topology=_place(0, 0, dp=4))
