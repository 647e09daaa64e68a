"""What the rollout bridge promises, one thing at a time, over real daemons."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tqclient as tq
from tqclient.integrations import rollout_bridge
from tqclient.integrations.rollout_bridge import Rollout, RolloutBridge, RolloutOptions, connect, context_rows
from tqserver.local import LocalCluster

TASKS = ("actor_train", "critic_train")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=2.0) as running:
        yield running


@pytest.fixture
def client(shared_cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(shared_cluster.address, timeout=10) as connected:
        yield connected


def options(**more: Any) -> RolloutOptions:
    return RolloutOptions(**{"run": f"run-{next(_numbers)}", "max_staleness": None, "timeout": 10.0, **more})


def batch_of(rows: int, **more: Any) -> dict[str, Any]:
    return {"tokens": [torch.arange(row, 2 * row + 1) for row in range(rows)], **more}


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def train(bridge: RolloutBridge, rollout_id: int, dp_size: int = 1, task: str = "actor_train") -> None:
    for dp_rank in range(dp_size):
        with bridge.fetch(rollout_id, dp_rank, task=task):
            pass


def test_a_fetch_waits_for_its_rollout_and_has_its_schedule(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options())
    thread, fetched = in_background(lambda: bridge.fetch(3, 1))
    thread.join(0.05)
    assert fetched == []
    schedule = {
        "partition": [[4, 0], [3, 1, 2]],
        "global_batch_sizes": [[5], [5]],
        "num_microbatches": [[1], [2]],
        "micro_batch_indices": [[[0, 1]], [[0], (1, 2)]],
    }
    assert bridge.publish(3, batch_of(5, raw_reward=[0.5, 1, None, "x", 2.5], **schedule), 2, weight_version=7)
    thread.join(60)
    with fetched[0] as rollout:
        assert {name: rollout[name] for name in schedule} == {name: value[1] for name, value in schedule.items()}
        assert [tokens.tolist() for tokens in rollout["tokens"]] == [[3, 4, 5, 6], [1, 2], [2, 3, 4]]
        assert rollout["raw_reward"] == ["x", 1, None]
        assert list(rollout) == ["tokens", "raw_reward", *schedule]
        assert rollout.batch.weight_versions.tolist() == [[7, 7]] * 3
        with pytest.raises(KeyError, match="'rewards' is not in this rollout"):
            rollout["rewards"]


def test_optional_fields_that_were_not_published_stay_absent(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options(extra_fields=("teacher_log_probs", "entropy")))
    bridge.publish(0, batch_of(2, teacher_log_probs=[torch.ones(2), torch.ones(3)], rewards=None), 1)
    with bridge.fetch(0, 0, ["rewards", "entropy", "teacher_log_probs", "num_microbatches"]) as rollout:
        assert list(rollout) == ["teacher_log_probs", "partition"]
    bridge.publish(1, batch_of(2), 1)
    with bridge.fetch(1, 0, ["rewards"], ranges={"rewards": (0, 1)}) as rollout:
        assert list(rollout) == ["partition"]
        assert rollout.samples == 2


def test_a_fetch_that_names_what_a_critic_writes_waits_for_it(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options(tasks=TASKS))
    bridge.publish(0, batch_of(4), 2)
    thread, fetched = in_background(lambda: bridge.fetch(0, 0, ["values", "tokens"]))
    with bridge.fetch(0, 1, task="critic_train") as other:
        other.put({"values": [tokens * 2.0 for tokens in other["tokens"]]})
        other.put({"values": [tokens * 3.0 for tokens in other["tokens"]]})  # as it does after a crash
    thread.join(0.05)
    assert fetched == []  # another shard's values
    with bridge.fetch(0, 0, task="critic_train") as share:
        share.put({"values": [tokens * 2.0 for tokens in share["tokens"]]})
    thread.join(60)
    with fetched[0] as rollout:
        assert rollout.ids.tolist() == share.ids.tolist()
        assert [values.tolist() for values in rollout["values"]] == [[0.0], [4.0, 6.0, 8.0]]
    assert bridge.live() == [0]
    with bridge.fetch(0, 1, ["values"]) as rollout:
        assert [values.tolist() for values in rollout["values"]] == [[3.0, 6.0], [9.0, 12.0, 15.0, 18.0]]
    assert bridge.live() == []


def test_one_who_dies_before_the_ack_leaves_the_rollout_to_whoever_asks_next(
    client: tq.Client, shared_cluster: LocalCluster
) -> None:
    chosen = options()
    bridge = RolloutBridge(client, chosen)
    bridge.publish(0, batch_of(3), 1)
    with tq.connect(shared_cluster.address) as first:
        ids = RolloutBridge(first, chosen).fetch(0, 0).ids.tolist()
    again = bridge.fetch(0, 0)
    assert again.ids.tolist() == ids
    with pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    rollout = bridge.fetch(0, 0)
    assert rollout.ids.tolist() == ids
    with pytest.raises(tq.ClaimTimeout, match=r"00000000': the share of DP rank 0 .*'actor_train' .* process holds it"):
        bridge.fetch(0, 0, timeout=0.05)
    rollout.ack()
    rollout.ack()
    with pytest.raises(tq.Sealed):
        bridge.fetch(0, 0)


def test_a_fetch_in_vain_says_what_its_share_lacks(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options())
    share = "'{}/00000007': the share of DP rank {} for task 'actor_train' "
    run = bridge.options.run
    with pytest.raises(tq.ClaimTimeout) as caught:
        bridge.fetch(7, 1, timeout=0)
    assert str(caught.value) == share.format(run, 1) + "is not there: the rollout was not published in time"
    bridge.publish(7, batch_of(4), 2)
    with pytest.raises(tq.ClaimTimeout) as caught:
        bridge.fetch(7, 1, ["tokens", "values"], timeout=0)
    assert str(caught.value) == share.format(run, 1) + "lacks values: no task has written that in time"
    with bridge.fetch(7, 0) as rollout:
        rollout.put({"values": [torch.zeros(3)] * rollout.samples})
    with pytest.raises(tq.ClaimTimeout, match=r"some samples lack values, or another process holds it"):
        bridge.fetch(7, 1, ["values"], timeout=0)
    with pytest.raises(tq.TopologyMismatch, match=r"published for DP ranks \[0, 1\], not 2"):
        bridge.fetch(7, 2, timeout=0)


def test_at_most_one_more_than_max_staleness_is_live_whatever_the_order(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options(max_staleness=1))
    assert bridge.publish(0, batch_of(2), 2)
    with pytest.raises(tq.BackpressureTimeout, match=r"rollout 3 waits for .*00000001"):
        bridge.publish(3, batch_of(1), 1, timeout=0.1)  # it would take the place of 1, which others wait for
    thread, published = in_background(lambda: bridge.publish(2, batch_of(1), 1))
    assert bridge.publish(1, batch_of(1), 1)
    thread.join(0.05)
    assert published == []
    assert bridge.live() == [0, 1]
    train(bridge, 0, 2)
    thread.join(60)
    assert published == [True]
    assert bridge.live() == [1, 2]
    with pytest.raises(tq.BackpressureTimeout):
        bridge.admit(3, timeout=0.05)
    bridge.cleanup(1)
    bridge.admit(3)


def test_a_job_that_goes_on_waits_for_none_of_its_former_rollouts(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options(start_rollout_id=50))
    assert bridge.publish(50, batch_of(1), 1)
    bounded = RolloutBridge(client, options(start_rollout_id=50, max_staleness=0))
    bounded.admit(50)
    with pytest.raises(tq.BackpressureTimeout):
        bounded.admit(51, timeout=0.05)


def test_publishing_again_has_no_effect_and_replaces_what_a_dead_worker_left(client: tq.Client) -> None:
    chosen = options()
    bridge = RolloutBridge(client, chosen)
    left = client.create_partition(f"{chosen.run}/00000000", consumers=chosen.tasks, max_attempts=chosen.max_attempts)
    left.put({"tokens": [torch.zeros(1)] * 9, "rewards": [0.0] * 9}, keys=[f"row/{row}" for row in range(9)])
    thread, waiting = in_background(lambda: bridge.fetch(0, 0))
    bounded = RolloutBridge(client, replace(chosen, max_staleness=0))
    admission, admitted = in_background(lambda: bounded.admit(1))
    thread.join(0.05)
    assert bridge.publish(0, batch_of(4), 2)
    assert not bridge.publish(0, batch_of(7), 1)
    with bridge.fetch(0, 1) as rollout:
        assert [tokens.tolist() for tokens in rollout["tokens"]] == [[1, 2], [3, 4, 5, 6]]
        assert list(rollout) == ["tokens", "partition"]
    thread.join(60)
    assert admitted == []
    with waiting[0] as rollout:
        assert list(rollout) == ["tokens", "partition"]
    admission.join(60)
    assert admitted == [None]
    assert bridge.live() == []
    assert not bridge.publish(0, batch_of(4), 2)


def test_cleaning_up_is_repeatable_and_ends_waits(client: tq.Client) -> None:
    chosen = options(tasks=TASKS)
    bridge = RolloutBridge(client, chosen)
    bridge.publish(0, batch_of(4), 2)
    held = bridge.fetch(0, 0)

    def wait_in_vain() -> str:
        with pytest.raises(tq.Sealed) as error:
            bridge.fetch(1, 0)
        return str(error.value)

    thread, ended = in_background(wait_in_vain)
    for rollout_id in (0, 0, 1, 1):
        bridge.cleanup(rollout_id)
    thread.join(60)
    assert "sealed" in ended[0]
    assert bridge.live() == []
    assert client.partition(f"{chosen.run}/00000000").describe().bytes == 0
    assert [tokens.tolist() for tokens in held["tokens"]] == [[0], [2, 3, 4]]  # whoever has it, has it
    held.release()
    assert not bridge.publish(0, batch_of(4), 2)
    bridge.rewind(1)
    assert bridge.publish(1, batch_of(2), 1)
    assert not bridge.publish(0, batch_of(4), 2)
    assert bridge.live() == [1]


def test_finished_rollouts_are_forgotten_in_the_end(client: tq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_bridge, "REMEMBERED", 2)
    monkeypatch.setattr(rollout_bridge, "FORGOTTEN_TOGETHER", 3)
    chosen = options()
    bridge = RolloutBridge(client, chosen)
    for rollout_id in range(7):
        bridge.publish(rollout_id, batch_of(1), 1)
        if rollout_id != 2:
            train(bridge, rollout_id)
    kept = [info.name for info in client.partitions(f"{chosen.run}/")]
    assert sorted(kept) == [f"{chosen.run}/{number:08d}" for number in (2, 4, 5, 6)]  # 2 is not finished


def test_context_parallel_ranks_read_runs_of_each_sequence(client: tq.Client) -> None:
    experts = [torch.arange(8 * length, dtype=torch.int16).reshape(length, 4, 2) for length in (5, 1, 8)]
    tokens = [torch.arange(length) for length in (5, 1, 8)]
    place = {"dp": 1, "cp": 2, "leader_acks": True}
    chosen = options()
    ranks = [RolloutBridge(client, chosen, topology=tq.Topology(**place, rank=rank)) for rank in range(2)]
    ranks[0].publish(0, {"tokens": tokens, "routed_experts": experts}, 1)
    parts = []
    for cp_rank, bridge in enumerate(ranks):
        cut = context_rows(cp_rank, 2)
        parts.append(bridge.fetch(0, 0, ["tokens", "routed_experts"], ranges={"routed_experts": cut}))
    assert [len(part) for part in parts[0]["routed_experts"]] == [3, 1, 4]
    for row, whole in enumerate(experts):
        assert torch.equal(torch.cat([part["routed_experts"][row] for part in parts]), whole)
        assert all(torch.equal(part["tokens"][row], tokens[row]) for part in parts)
    # With two runs a rank, as balanced causal attention has them: the first and the last quarter.
    ends = [parts[0].read(["tokens"], ranges={"tokens": context_rows(run, 4)}).list("tokens") for run in (0, 3)]
    assert [[run.tolist() for run in runs] for runs in ends] == [[[0, 1], [0], [0, 1]], [[4], [], [6, 7]]]
    parts[0].ack()
    assert ranks[0].live() == []  # the leader's ack is what counts
    parts[1].ack()


def test_a_rollout_is_broadcast_as_one_tensor(client: tq.Client) -> None:
    bridge = RolloutBridge(client, options())
    images = [{"pixels": torch.ones(2, 3)}, None]
    bridge.publish(0, batch_of(2, multimodal_train_inputs=images, rewards=torch.tensor([0.5, 1.5])), 1)
    with bridge.fetch(0, 0) as rollout:
        copy = Rollout.from_buffer(rollout.to_buffer())
    with copy:
        assert (copy.rollout_id, copy.dp_rank, copy.schedule) == (0, 0, {"partition": [0, 1]})
        assert list(copy) == list(rollout)
        assert [tokens.tolist() for tokens in copy["tokens"]] == [[0], [1, 2]]
        assert copy["rewards"].tolist() == [0.5, 1.5]
        assert torch.equal(copy["multimodal_train_inputs"][0]["pixels"], torch.ones(2, 3))
        assert copy["multimodal_train_inputs"][1] is None
        assert copy.ids.tolist() == rollout.ids.tolist()
        with pytest.raises(tq.InvalidArgument, match="by broadcast"):
            copy.put({"values": [1, 2]})


def test_what_does_not_fit_is_refused(client: tq.Client, shared_cluster: LocalCluster) -> None:
    chosen = options(timeout=0.5)
    bridge = RolloutBridge(client, chosen)
    bridge.publish(0, batch_of(4), 2)
    with pytest.raises(tq.InvalidArgument, match="critic_train"):
        bridge.fetch(0, 0, task="critic_train")
    with pytest.raises(tq.InvalidArgument, match="rollout_id=-1"):
        bridge.fetch(-1, 0)
    for timeout in ("5", -1, float("nan"), True):
        with pytest.raises(tq.InvalidArgument, match=f"timeout={timeout!r}: expected seconds"):
            bridge.fetch(0, 0, timeout=timeout)
    with pytest.raises(tq.TopologyMismatch, match=r"DP ranks \[0, 1\], not 2"):
        bridge.fetch(0, 2)
    with pytest.raises(tq.InvalidArgument, match="tokens"):
        bridge.fetch(0, 0, ranges={"tokens": (0, 100)})
    with pytest.raises(tq.InvalidArgument, match="fields='tokens': give a list of names"):
        bridge.fetch(0, 0, "tokens")  # which would wait for fields `t`, `o`, ...
    for ranges in ({"token": (0, 1)}, {"truncated": (0, 1)}):
        with pytest.raises(tq.InvalidArgument, match="that is not fetched; what is: 'tokens', 'rewards'"):
            bridge.fetch(0, 0, ["tokens", "rewards"], ranges=ranges)
    with bridge.fetch(0, 0, ["tokens", "rewards"], ranges={"rewards": (0, 1)}) as left_out:  # not published
        assert list(left_out) == ["tokens", "partition"]
    bridge.rewind(0)
    bridge.publish(0, batch_of(4), 2)
    with pytest.raises(tq.InvalidArgument, match="cuda:99"):
        connect(RolloutOptions(controller=shared_cluster.address, device="cuda:99"))
    with connect(RolloutOptions(controller=shared_cluster.address, run=chosen.run)) as connected:
        assert connected.live() == [0]
        train(connected, 0, 2)
        assert connected.live() == []


def test_ranks_of_another_topology_are_refused(client: tq.Client) -> None:
    chosen = options()
    RolloutBridge(client, chosen).publish(0, batch_of(4), 2)
    other = RolloutBridge(client, chosen, topology=tq.Topology(dp=4, rank=1))
    with pytest.raises(tq.TopologyMismatch, match="DP rank 0"):
        other.fetch(0, 0)
    with pytest.raises(tq.TopologyMismatch, match="published for 2 DP ranks"):
        other.fetch(0, 1)


def test_a_schedule_costs_next_to_nothing(client: tq.Client) -> None:
    rows, dp_size = 256, 4
    lengths = [256 + 7 * row % 2048 for row in range(rows)]
    batch = {
        "tokens": [torch.arange(length) for length in lengths],
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "rollout_log_probs": [torch.zeros(length) for length in lengths],
        "rewards": [float(row) for row in range(rows)],
    }
    per_rank = rows // dp_size
    schedule = {
        "global_batch_sizes": [[64] * 4] * dp_size,
        "num_microbatches": [[8] * 4] * dp_size,
        "micro_batch_indices": [[[row, row + 1] for row in range(0, per_rank, 2)] for _ in range(dp_size)],
    }
    bridges = [RolloutBridge(client, options()) for _ in range(2)]

    def seconds(bridge: RolloutBridge, rollout_id: int, published: dict[str, Any]) -> float:
        start = time.process_time()  # whatever else the machine does
        bridge.publish(rollout_id, published, dp_size)
        train(bridge, rollout_id, dp_size)
        return time.process_time() - start

    rounds = range(23)  # interleaved, and the best of each
    pairs = [
        (seconds(bridges[0], rollout_id, batch), seconds(bridges[1], rollout_id, {**batch, **schedule}))
        for rollout_id in rounds
    ]
    plain, scheduled = map(min, zip(*pairs, strict=True))
    assert scheduled <= 1.2 * plain
