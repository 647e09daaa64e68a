"""Where a rank stands, by Megatron's order of ranks, and which topologies contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tqclient as tq
from tqclient.errors import InvalidArgument, TopologyMismatch
from tqclient.topology import Device, plan_replicas

# dp=2, tp=2, pp=2, cp=2 as Megatron-LM's default order `tp-cp-ep-dp-pp` numbers it: (tp, cp, dp, pp) by rank.
MEGATRON = [(tp, cp, dp, pp) for pp in (0, 1) for dp in (0, 1) for cp in (0, 1) for tp in (0, 1)]


@pytest.mark.parametrize("rank", range(16))
def test_ranks_are_numbered_as_megatron_does(rank: int) -> None:
    tp, cp, dp, pp = MEGATRON[rank]
    place = tq.Topology(dp=2, tp=2, pp=2, cp=2, rank=rank)
    assert [place.coordinate(axis) for axis in ("tp", "cp", "dp", "pp")] == [tp, cp, dp, pp]
    assert (place.dp_rank, place.member) == (dp, tp + 2 * cp + 4 * pp)
    again = tq.Topology(dp=2, tp=2, pp=2, cp=2, coordinates={"tp": tp, "cp": cp, "dp": dp, "pp": pp})
    assert again.world_rank == rank
    assert again.to_wire() == place.to_wire()


def test_megatron_s_own_example() -> None:
    """16 GPUs with tp=2, pp=4: DP groups are [0, 2], [1, 3], [4, 6], ... and pipeline stages four ranks apart."""
    places = [tq.Topology(dp=2, tp=2, pp=4, rank=rank) for rank in range(16)]
    assert [place.dp_rank for place in places] == [0, 0, 1, 1] * 4
    assert [place.coordinate("pp") for place in places] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [rank for rank, place in enumerate(places) if place.dp_rank == 1] == [2, 3, 6, 7, 10, 11, 14, 15]
    assert [places[rank].member for rank in (2, 3, 6, 7, 10, 11, 14, 15)] == list(range(8))


def test_the_leader_of_a_dp_rank_is_member_0() -> None:
    assert tq.Topology(dp=4, tp=2, rank=4).member == 0
    assert tq.Topology(dp=4, tp=2, rank=5).member == 1


def test_one_rank_alone_needs_no_number() -> None:
    wire = tq.Topology(leader_acks=True).to_wire()
    assert (wire.dp, wire.members, wire.dp_rank, wire.member, wire.world_rank) == (1, 1, 0, 0, 0)
    assert wire.leader_acks


def test_a_launcher_with_another_order_keeps_its_rank_for_messages() -> None:
    place = tq.Topology(dp=2, tp=2, rank=1, coordinates={"dp": 1, "tp": 0})
    assert (place.dp_rank, place.member, place.world_rank) == (1, 0, 1)
    assert str(place) == "rank 1 (DP rank 1, member 0) of dp=2, tp=2, pp=1, cp=1, ep=1"


def test_another_rank_of_the_same_topology() -> None:
    assert replace(tq.Topology(dp=4, rank=0), rank=3).dp_rank == 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"dp": 8, "ep": 2, "rank": 0, "world_size": 1},
            "is 8 ranks.*world of 1; ep=2 was asked for.*ep=1 is in effect",
        ),
        ({"dp": 2, "tp": 2, "rank": 0, "world_size": 8}, "dp=2 × tp=2 × pp=1 × cp=1 is 4 ranks.*world of 8"),
        ({"dp": 3, "ep": 2, "rank": 0}, "ep=2 was asked for.*are 3, no multiple of it: at most ep=1"),
        ({"dp": 6, "pp": 2, "ep": 4, "rank": 0}, "stage are 6, no multiple of it: at most ep=2"),
        ({"dp": 2, "rank": 2}, "rank 2 lies outside the 2 ranks"),
        ({"dp": 2, "coordinates": {"dp": 2}}, r"coordinates\['dp'\]=2 lies outside dp=2"),
    ],
)
def test_sizes_that_contradict_each_other(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyMismatch, match=message):
        tq.Topology(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 0}, "dp=0"),
        ({"dp": True}, "dp=True"),
        ({"tp": 2.0}, "tp=2.0"),
        ({"dp": 2}, "give the rank"),
        ({"dp": 2, "rank": -1}, "rank=-1"),
        ({"dp": 2, "tp": 2, "coordinates": {"dp": 1}}, "lack 'tp'"),
        ({"dp": 2, "coordinates": {"dp": 1, "ep": 0}}, "not ep"),
        ({"world_size": 0}, "world_size=0"),
        ({"dp": 65_537, "rank": 0}, "dp=65537: expected an int from 1 to 65536"),
        ({"dp": 4_096, "tp": 32, "rank": 0}, "dp × tp × pp × cp=131072: expected an int from 1 to 65536"),
    ],
)
def test_what_is_no_topology(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tq.Topology(**sizes)


# Plans. Worked out by hand: an engine has lcm(tp, ep) × pp ranks, of which lcm(tp, ep) / tp are data-parallel.


@pytest.mark.parametrize(
    ("asked", "replicas", "world", "dp"),
    [
        ({"gpus_per_node": 8, "nodes": 1}, 8, 1, 1),
        ({"gpus_per_node": 8, "nodes": 1, "ep": 2}, 4, 2, 2),  # what dp=8, ep=2 must be started as
        ({"gpus_per_node": 8, "nodes": 1, "tp": 2, "ep": 2}, 4, 2, 1),
        ({"gpus_per_node": 8, "nodes": 1, "tp": 4, "ep": 2}, 2, 4, 1),
        ({"gpus_per_node": 8, "nodes": 2, "tp": 2, "ep": 8}, 2, 8, 4),
        ({"gpus_per_node": 8, "nodes": 2, "ep": 16}, 1, 16, 16),  # over both nodes
        ({"gpus_per_node": 8, "nodes": 4, "tp": 8, "pp": 2}, 2, 16, 1),
        ({"gpus_per_node": 8, "nodes": 4, "tp": 4, "pp": 2, "ep": 4}, 4, 8, 1),
        ({"gpus_per_node": 6, "nodes": 1, "tp": 2, "ep": 3}, 1, 6, 3),  # lcm(2, 3) = 6
        ({"gpus_per_node": 8, "nodes": 2, "ep": 4, "independent": False}, 1, 16, 16),
        ({"gpus_per_node": 8, "nodes": 2, "tp": 2, "pp": 2, "ep": 8, "independent": False}, 1, 16, 4),
    ],
)
def test_replicas_have_the_parallelism_that_was_asked_for(
    asked: dict[str, Any], replicas: int, world: int, dp: int
) -> None:
    plan = plan_replicas(**asked)
    assert [(each.index, each.world_size, each.dp) for each in plan] == [(i, world, dp) for i in range(replicas)]
    everything = [Device(node, gpu) for node in range(asked["nodes"]) for gpu in range(asked["gpus_per_node"])]
    assert [device for each in plan for device in each.devices] == everything  # each once, and none left over
    for each in plan:
        assert each.ranks == range(world)
        for rank in each.ranks:  # a topology refuses sizes that do not give the ep
            place = each.topology(rank)
            assert (place.size, place.world_size, place.ep) == (world, world, asked.get("ep", 1))


def test_a_replica_knows_its_hosts() -> None:
    plan = plan_replicas(4, 4, tp=4, pp=2)
    assert [(each.node, each.nodes) for each in plan] == [(0, (0, 1)), (2, (2, 3))]
    assert plan[1].devices[5] == Device(node=3, gpu=1)
    tp_group = [rank for rank in plan[1].ranks if plan[1].topology(rank).coordinate("pp") == 1]
    assert {plan[1].devices[rank].node for rank in tp_group} == {3}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((8, 1, 1, 1, 16), "an engine needs 16 GPUs .* and there are 8; ep could be 1, 2, 4, 8$"),
        ((8, 1, 1, 1, 3), "needs 3 GPUs .* 2 of each node's would be left over; ep could be 1, 2, 4, 8$"),
        ((8, 2, 1, 1, 12), "needs 12 GPUs .* not whole nodes; ep could be 1, 2, 4, 8, 16$"),
        ((8, 3, 1, 1, 16), "2 nodes, and 3 nodes are no multiple of that; ep could be 1, 2, 4, 8, 24$"),
        ((8, 1, 3, 1, 1), "the 8 GPUs of a node are no multiple of tp.*; no ep can be had with tp=3, pp=1$"),
        ((8, 1, 16, 1, 1), "no multiple of tp, so that a TP group would span nodes"),
        ((8, 1, 2, 3, 1), "needs 6 GPUs .* 2 of each node's would be left over"),
        ((8, 1, 1, 1, 3, False), "a pipeline stage has 8 ranks, no multiple of ep; ep could be 1, 2, 4, 8$"),
        ((8, 1, 2, 3, 1, False), "8 GPUs are no multiple of tp × pp = 6"),
    ],
)
def test_plans_that_cannot_be_had_say_why(asked: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TopologyMismatch, match=message):
        plan_replicas(*asked)


@pytest.mark.parametrize("asked", [(0, 1), (8, 0), (8, 1, 0), (8, 1, 1, True), (8, 1, 1, 1, 1.0)])
def test_what_is_no_plan(asked: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match="plan_replicas"):
        plan_replicas(*asked)
