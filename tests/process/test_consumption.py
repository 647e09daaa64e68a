"""Who gets which samples, over real daemons: samplers, tags, token budgets, and the ranks of one replica."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import ROOT
from tqserver.local import LocalCluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=10) as client:
        yield client


def ragged(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(length) for length in lengths]


def test_samplers_order_what_is_claimed(client: tq.Client) -> None:
    part = client.create_partition("part")
    first = part.put({"x": torch.arange(4)}, tags=[{"p": 1}, {"p": 3.5}, {"q": 9}, {"p": 3.5}])[0]

    def order(name: str, sampler: tq.Sampler, size: int = 4) -> list[int]:
        with part.consumer(name, sampler=sampler).claim(size, timeout=5) as batch:
            assert batch.step is None
            return [int(sample - first) for sample in batch.ids]

    assert order("fifo", tq.Fifo()) == [0, 1, 2, 3]
    assert order("lifo", tq.Lifo(), 3) == [3, 2, 1]
    assert order("prioritized", tq.Prioritized("p")) == [1, 3, 0, 2]
    drawn = {seed: order(f"random-{seed}", tq.Random(seed)) for seed in range(8)}
    assert all(sorted(each) == [0, 1, 2, 3] for each in drawn.values())
    assert len({tuple(each) for each in drawn.values()}) > 1
    assert order("again", tq.Random(5)) == drawn[5]
    with pytest.raises(tq.InvalidArgument, match="no sampler is called 'mine'; there are: fifo, "):
        part.consumer("own", sampler=tq.Sampler("mine", alpha=0.5)).claim(1)


def test_groups_come_whole_and_what_is_left_over_is_dropped(client: tq.Client) -> None:
    part = client.create_partition("part")
    groups = ["a", "b", "a", "b", "b", "a", "c"]
    tags = [{"aborted": row == 3} for row in range(7)]
    first = part.put({"x": torch.arange(7)}, groups=groups, tags=tags)[0]
    consumer = part.consumer("actor", sampler=tq.GroupSampler(2))
    with consumer.claim(4, timeout=5) as batch:
        assert (batch.ids - first).tolist() == [0, 2, 1, 4]  # b's second member was aborted, a's third is one too many
        assert batch.groups == ["a", "a", "b", "b"]
    assert part.describe().counts["actor"]["dropped"] == 2
    with pytest.raises(tq.ClaimTimeout):
        consumer.claim(2, timeout=0)
    unequal = part.consumer("unequal", sampler=tq.GroupSampler())
    part.put({"x": torch.arange(5)}, groups=list("ddede"), tags=[{"group_size": 3}, {}, {"group_size": 2}, {}, {}])
    with unequal.claim(4, timeout=5) as batch:  # both have 5 rows, which do not fit
        assert batch.groups == ["d"] * 3
    part.seal()
    with unequal.claim(4, timeout=5) as batch:
        assert batch.groups == ["e"] * 2


def test_tags_choose_and_tokens_limit(client: tq.Client) -> None:
    part = client.create_partition("part")
    values = {"tokens": ragged(3, 4, 2, 5, 1), "mm": [{"pixels": torch.zeros(n, 2)} for n in (9, 1, 1, 1, 1)]}
    statuses = ["finished", "finished", "aborted", "finished", "finished"]
    first = part.put(values, tags=[{"status": status} for status in statuses])[0]
    finished = part.consumer("actor", where={"status": "finished"}, token_field="tokens")
    with finished.claim(max_tokens=7, timeout=5) as batch:
        assert (batch.ids - first).tolist() == [0, 1]
    with finished.claim(1, max_tokens=7, timeout=5) as batch:
        assert (batch.ids - first).tolist() == [3]
    pixels = part.consumer("critic", token_field="mm.pixels")
    with pytest.raises(tq.InvalidArgument, match=f"sample {first} .* has 9 of 'mm.pixels' alone, but max_tokens is 8"):
        pixels.claim(max_tokens=8)
    with pytest.raises(tq.InvalidArgument, match=r"fields that have them: mm\.pixels, tokens"):
        part.consumer("critic", token_field="mm").claim(max_tokens=8)
    part.seal()
    batches = [batch.ids - first for batch in part.consumer("other", token_field="tokens").batches(max_tokens=9)]
    assert [each.tolist() for each in batches] == [[0, 1, 2], [3, 4]]
    assert [(batch.ids - first).tolist() for batch in finished.batches(8)] == [[4]]  # and row 2 holds nobody up


SAMPLER = """
import numpy as np

class Every:
    def check(self, params):
        int(params["nth"])

    def sample(self, view, request):
        if request.params.get("fail"):
            raise RuntimeError("out of order")
        ready = np.flatnonzero(view.ready[: request.samples.size])
        return ready[:: request.params["nth"]][: request.batch_size]
"""


def test_a_sampler_of_ones_own_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "every_nth.py").write_text(SAMPLER)
    metadata = tmp_path / "every_nth-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: every-nth\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tq.samplers]\nevery = every_nth:Every\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", environ={"PYTHONPATH": path}) as cluster,
        tq.connect(cluster.address, timeout=10) as client,
    ):
        part = client.create_partition("part")
        first = part.put({"x": torch.arange(7)})[0]
        consumer = part.consumer("actor", sampler=tq.Sampler("every", nth=3))
        held = consumer.claim(2)
        assert (held.ids - first).tolist() == [0, 3]
        with pytest.raises(tq.InternalError, match=r"sampler 'every' raised RuntimeError\('out of order'\)"):
            part.consumer("actor", sampler=tq.Sampler("every", nth=1, fail=True)).claim(1)
        cluster.controller.kill()
        cluster.controller.restart()
        held.ack()
        with consumer.claim(2) as batch:
            assert (batch.ids - first).tolist() == [1, 5]  # of 1, 2, 4, 5, 6
        assert part.describe().counts["actor"]["consumed"] == 4


class Ranks:
    """Ranks of dp=2, tp=2, each with a client of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.clients: dict[int, tq.Client] = {}

    def consumer(self, rank: int, /, **topology: Any) -> tq.Consumer:
        if rank not in self.clients:
            self.clients[rank] = tq.connect(self._address, timeout=10)
        place = tq.Topology(**{"dp": 2, "tp": 2, "rank": rank, **topology})
        return self.clients[rank].partition("part").consumer("actor", topology=place)

    def close(self, *ranks: int) -> None:
        for rank in ranks or list(self.clients):
            self.clients.pop(rank).close()


@pytest.fixture
def ranks(cluster: LocalCluster) -> Iterator[Ranks]:
    ranks = Ranks(cluster.address)
    yield ranks
    ranks.close()


def test_a_dead_member_has_its_replica_s_batches_delivered_again_whole(client: tq.Client, ranks: Ranks) -> None:
    part = client.create_partition("part")
    part.put({"x": torch.arange(8)})
    leader, member, other = (ranks.consumer(rank) for rank in (0, 1, 2))
    held, again = leader.claim(2), member.claim(2)
    assert held.ids.tolist() == again.ids.tolist()
    assert (held.step, again.step) == (0, 0)
    held.ack()
    assert part.describe().counts["actor"]["consumed"] == 0  # not before all have acked
    ahead = leader.claim(2)
    theirs = other.claim(2)
    ranks.close(1)  # the member is gone, with its claim
    with pytest.raises(tq.LeaseExpired, match="step 1: another member of this DP rank released the batch or died"):
        ahead.ack()
    theirs.ack()  # of another replica

    restarted = ranks.consumer(1)
    for consumer in (leader, restarted):
        batch = consumer.claim(2)
        assert (batch.step, batch.ids.tolist(), batch.attempts.tolist()) == (0, held.ids.tolist(), [2, 2])
        batch.ack()
    assert part.describe().counts["actor"]["consumed"] == 2
    with restarted.claim(2) as batch:
        assert batch.ids.tolist() == ahead.ids.tolist()


def test_ranks_that_do_not_fit_are_refused(client: tq.Client, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    part = client.create_partition("part")
    part.put({"x": torch.arange(8)})
    assert [ranks.consumer(rank).register() for rank in (0, 1, 3)] == [1, 2, 3]
    assert ranks.consumer(3).register() == 3  # again: no effect
    with pytest.raises(tq.TopologyMismatch, match=r"rank 2 registers with dp=4, .* live ranks \(0, 1, 3\) .* dp=2"):
        ranks.consumer(2, dp=4).register(0.2)
    with pytest.raises(tq.TopologyMismatch, match="claims member 1 of DP rank 1, which live rank 3"):
        ranks.consumer(2, rank=3).claim(1, timeout=0.2)
    assert "trying again until a dead rank's lease has run out" in caplog.text
    waiting = threading.Timer(0.05, lambda: ranks.close(3))  # the holder was on its way out
    waiting.start()
    assert ranks.consumer(2, rank=3).register(5) == 3
    waiting.join()
    with pytest.raises(tq.TopologyMismatch, match="world of 1; ep=2 was asked for, and at most ep=1 is in effect"):
        ranks.consumer(2, rank=2, ep=2, world_size=1)


def test_ranks_with_await(cluster: LocalCluster) -> None:
    async def run() -> None:
        async with tq.aio.connect(cluster.address, timeout=10) as client:
            part = await client.create_partition("part")
            await part.put({"x": ragged(2, 3, 4)}, tags=[{"s": 1}, {"s": 0}, {"s": 1}])
            solo = part.consumer("solo", topology=tq.Topology(world_size=1), where={"s": 1}, token_field="x")
            assert solo.topology is not None
            assert await solo.register() == 1
            async with solo.claim(max_tokens=6) as batch:
                assert (batch.step, len(batch.ids)) == (0, 2)
            await part.seal()
            consumer = part.consumer("all", sampler=tq.Lifo())
            assert [len(batch.ids) async for batch in consumer.batches(2)] == [2, 1]

    asyncio.run(run())
