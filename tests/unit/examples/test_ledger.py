"""The ledgers, and the audit that finds a lost sample and one that was acked twice."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from examples.grpo_addition.ledger import Account, Ledger, PartitionState, audit

Write = Callable[..., None]
ALL_CONSUMED = {"pending": 0, "ready": 0, "leased": 0, "consumed": 4, "dropped": 0}


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Appends one entry to a worker's ledger."""

    def append(worker: str, event: str, ids: list[int], **values: object) -> None:
        with Ledger(tmp_path, worker) as ledger:
            ledger.write(event, ids=ids, **values)

    return append


def audited(account: Account, *, samples: int = 4, counts: dict[str, int] = ALL_CONSUMED) -> list[str]:
    account.read()
    return audit(account, PartitionState(samples, {"train": counts}))


def put(write: Write, ids: list[int], worker: str = "rollout-0") -> None:
    keys = [f"{worker}/{id_}" for id_ in ids]
    write(worker, "putting", [], keys=keys)
    write(worker, "put", ids, keys=keys)


def deliver(write: Write, worker: str, ids: list[int], *, upto: str = "acked") -> None:
    for event in ("claimed", "acking", "acked"):
        write(worker, event, ids, consumer="train")
        if event == upto:
            return


def test_a_run_without_faults_has_no_problems(account: Account, write: Write) -> None:
    put(write, [0, 1])
    put(write, [2, 3], "rollout-1")
    deliver(write, "trainer-0", [0, 1])
    deliver(write, "trainer-1", [2, 3])
    assert audited(account) == []


def test_a_lost_sample_is_found(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1, 3])
    assert audited(account) == ["lost: never acked for consumer 'train': 1 samples, the first is 2"]


def test_a_sample_acked_twice_is_found(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1, 2, 3])
    deliver(write, "trainer-1", [1, 2])
    assert audited(account) == ["acked twice for consumer 'train': 2 samples, the first is 1"]


def test_a_batch_that_a_killed_trainer_held_is_redelivered_and_acked_once(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1], upto="claimed")
    deliver(write, "trainer-1", [2, 3])
    deliver(write, "trainer-2", [0, 1])
    assert audited(account) == []
    assert account.redelivered("train") == 2


def test_an_ack_cut_short_counts_when_the_partition_says_so(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1], upto="acking")
    deliver(write, "trainer-1", [2, 3])
    assert audited(account) == []
    held = {**ALL_CONSUMED, "consumed": 2, "leased": 2}
    assert audited(account, counts=held) == [f"partition: of 4 samples, consumer 'train' has {held}"]


def test_a_refused_ack_settles_nothing(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1], upto="acking")
    write("trainer-0", "refused ack", [0, 1], consumer="train")
    deliver(write, "trainer-1", [2, 3])
    assert audited(account) == ["lost: never acked for consumer 'train': 2 samples, the first is 0"]


def test_a_put_cut_short_is_settled_by_its_keys(account: Account, write: Write) -> None:
    put(write, [0, 1])
    write("rollout-1", "putting", [], keys=["rollout-1/a", "rollout-1/b"])
    deliver(write, "trainer-0", [0, 1, 2, 3])
    account.read()
    assert account.doubtful_keys() == ["rollout-1/a", "rollout-1/b"]
    assert "delivered to consumer 'train' but never put: 2 samples, the first is 2" in audited(account)
    write("demo", "found", [2, 3], keys=["rollout-1/a", "rollout-1/b"])
    assert audited(account) == []
    assert account.put_ids().tolist() == [0, 1, 2, 3]


def test_a_put_that_was_refused_is_no_doubt(account: Account, write: Write) -> None:
    write("rollout-0", "putting", [], keys=["a"])
    write("rollout-0", "refused put", [], keys=["a"])
    account.read()
    assert account.doubtful_keys() == []


def test_cleared_samples_are_not_expected_in_the_partition(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    deliver(write, "trainer-0", [0, 1, 2, 3])
    write("demo", "cleared", [0, 1, 2])
    assert audited(account, samples=1, counts={**ALL_CONSUMED, "consumed": 1}) == []
    assert audited(account) == ["partition: holds 4 samples, but 1 were put and not cleared"]


def test_one_id_for_two_samples_is_found(account: Account, write: Write) -> None:
    put(write, [0, 1, 2, 3])
    put(write, [3], "rollout-1")
    deliver(write, "trainer-0", [0, 1, 2, 3])
    assert audited(account) == ["the same id was given to two samples: 1 samples, the first is 3"]


def test_a_line_that_is_not_whole_waits_for_its_rest(account: Account, write: Write, tmp_path: Path) -> None:
    put(write, [0, 1])
    path = tmp_path / "rollout-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert [entry["event"] for entry in account.read()] == ["putting"]
    path.write_bytes(whole)
    assert [entry["event"] for entry in account.read()] == ["put"]
    assert account.read() == []
    np.testing.assert_array_equal(account.ids("put"), [0, 1])
