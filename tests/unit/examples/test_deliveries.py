"""How a worker takes deliveries, and what its ledger says of them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

import tqclient as tq
from examples.grpo_addition.ledger import Account, Ledger
from examples.grpo_addition.worker import deliveries


class Batch:
    """A batch as its worker sees it; `verdict` says how it was settled."""

    def __init__(self, ids: list[int], *, expired: bool = False) -> None:
        self.ids = np.array(ids)
        self.verdict = ""
        self._expired = expired

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._expired:
            raise tq.LeaseExpired("the claim is not held any more")
        self.verdict = "released" if kind else "acked"


class Consumer:
    """Answers claims with what it was given, one after another."""

    name = "train"

    def __init__(self, *answers: Batch | tq.errors.TQError) -> None:
        self._answers = list(answers)

    def claim(self, batch_size: int, timeout: float) -> Batch:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def account(tmp_path: Path) -> Account:
    return Account(tmp_path)


def events(account: Account) -> list[tuple[str, list[int]]]:
    return [(entry["event"], entry["ids"].tolist()) for entry in account.read()]


def test_each_batch_is_acked_when_the_next_one_is_asked_for(tmp_path: Path, account: Account) -> None:
    first, second = Batch([1, 2]), Batch([3])
    consumer = Consumer(tq.ClaimTimeout("none yet"), first, second, tq.Sealed("no more"))
    with Ledger(tmp_path, "trainer-0") as ledger:
        verdicts = [(first.verdict, second.verdict) for _ in deliveries(consumer, ledger)]
    assert verdicts == [("", ""), ("acked", "")]
    assert second.verdict == "acked"
    acts = ("claimed", "acking", "acked")
    assert events(account) == [(act, [1, 2]) for act in acts] + [(act, [3]) for act in acts]


def test_a_refused_ack_is_recorded_as_one_and_work_goes_on(tmp_path: Path, account: Account) -> None:
    consumer = Consumer(Batch([1], expired=True), Batch([2]), tq.Sealed("no more"))
    with Ledger(tmp_path, "trainer-0") as ledger:
        assert len(list(deliveries(consumer, ledger))) == 2
    assert [event for event, ids in events(account) if ids == [1]] == ["claimed", "acking", "refused ack"]
    assert account.ids("acked").tolist() == [2]


def test_a_batch_whose_work_fails_is_released_and_never_acked(tmp_path: Path, account: Account) -> None:
    batch = Batch([1])
    with Ledger(tmp_path, "trainer-0") as ledger:
        stream = deliveries(Consumer(batch), ledger)
        next(stream)
        stream.close()  # what leaving the loop by an exception amounts to
    assert batch.verdict == "released"
    assert events(account) == [("claimed", [1])]
