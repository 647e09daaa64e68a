"""The replay-buffer loop in the shape of verl's, over real daemons."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import pytest
import torch

import tqclient
import tqclient.compat.transfer_queue as tq
from examples.verl_replay_buffer.buffer import ReplayBuffer
from examples.verl_replay_buffer.loop import run
from tqserver.local import LocalCluster


@pytest.fixture(autouse=True)
def service(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TQ_CONTROLLER", cluster.address)
    tq.init()
    yield
    tq.close()


def assert_whole(keys: Sequence[str], sessions: int) -> None:
    """A group has all sessions, and of each session all samples."""
    parts = [match.groups() for key in keys if (match := re.fullmatch(r"(p\d+)_(\d+)_(\d+)", key))]
    assert len(parts) == len(keys)
    turns = defaultdict(set)
    for _, session, turn in parts:
        turns[int(session)].add(int(turn))
    assert len({uid for uid, _, _ in parts}) == 1
    assert set(turns) == set(range(sessions))
    assert all(numbers == set(range(len(numbers))) for numbers in turns.values())


def test_every_group_is_trained_on_once_or_given_up_whole(cluster: LocalCluster, seed: int) -> None:
    report = run("train", groups=12, sessions=3, per_step=2, max_staleness=3, seed=seed)
    for step in report.steps:
        assert 1 <= len(step) <= 2
        for group in step:
            assert_whole(group, 3)
    stale = defaultdict(list)
    for key in report.stale:
        stale[key.split("_")[0]].append(key)
    for keys in stale.values():
        assert_whole(keys, 3)
    assert report.trained
    assert set(Counter([*report.trained, *report.stale, *report.failed]).values()) == {1}
    assert report.left == []
    with tqclient.connect(cluster.address) as client:
        info = client.partition("train").describe()
    # Each prompt had a key of its own, and every one of its samples is accounted for.
    assert info.inserted == 12 + len(report.trained) + len(report.stale) + len(report.failed)
    assert (info.samples, info.bytes) == (0, 0)


def put(uid: str, session: int, turns: int, versions: tuple[int, int]) -> None:
    tag = {"status": "success", "min_version": versions[0], "max_version": versions[1]}
    keys = [f"{uid}_{session}_{turn}" for turn in range(turns)]
    tq.kv_batch_put(keys, "train", {"responses": torch.zeros(turns, 4)}, [tag] * turns)


def mark(uid: str, status: str) -> None:
    tq.kv_put(uid, "train", tag={"status": status})


def test_the_buffer_takes_whole_groups_whatever_order_they_end_in() -> None:
    buffer = ReplayBuffer("train", max_staleness=2)
    with pytest.raises(TimeoutError):
        buffer.sample(4, version=5, timeout=0)
    for uid in ("p0", "p1", "p2", "p3", "p4"):
        mark(uid, "running")
    put("p2", 1, 2, (4, 5))
    put("p1", 0, 1, (3, 3))
    put("p0", 1, 1, (5, 5))
    put("p3", 0, 1, (2, 5))
    with pytest.raises(TimeoutError):
        buffer.sample(4, version=5, timeout=0)
    put("p2", 0, 1, (4, 4))
    mark("p2", "finished")
    put("p3", 1, 1, (5, 5))
    mark("p3", "finished")
    put("p4", 1, 1, (5, 5))
    mark("p4", "failure")
    put("p1", 1, 2, (5, 5))
    mark("p1", "finished")
    groups = buffer.sample(4, version=5, timeout=0)
    assert [sorted(group.keys) for group in groups] == [["p1_0_0", "p1_1_0", "p1_1_1"], ["p2_0_0", "p2_1_0", "p2_1_1"]]
    assert groups[0].select_keys(["p1_0_0"]).tags == [{"status": "success", "min_version": 3, "max_version": 3}]
    assert (sorted(buffer.stale), buffer.failed) == (["p3_0_0", "p3_1_0"], ["p4_1_0"])
    left = ["p0", "p1", "p2", "p0_1_0", *groups[0].keys, *groups[1].keys]
    assert sorted(tq.kv_list("train")["train"]) == sorted(left)
    put("p0", 0, 3, (5, 5))
    mark("p0", "finished")
    assert [len(group) for group in buffer.sample(1, version=5, timeout=0)] == [3]
    later = buffer.sample(4, version=6, timeout=0)
    assert [sorted(group.keys)[0] for group in later] == ["p2_0_0", "p0_0_0"]
