"""What the table and the plot are made of."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from examples.grpo_addition.ledger import Account, Ledger
from examples.grpo_addition.report import Curves, conclude


def ids_of(batch: int) -> list[int]:
    return [100 + 4 * batch + row for row in range(4)]


@pytest.fixture
def account(tmp_path: Path) -> Account:
    """Forty samples in batches of four; rewards 0.00, 0.02, ... 0.78; batch 2 is delivered to both consumers twice."""
    with Ledger(tmp_path, "any") as ledger:
        for batch in range(10):
            ledger.write("put", ids=ids_of(batch), seconds=0.1, size_bytes=64)
        for batch in [*range(10), 2]:
            ids = ids_of(batch)
            ledger.write("scored", ids=ids, rewards=[(id_ - 100) / 50 for id_ in ids])
            for consumer in ("reward", "train"):
                ledger.write("claimed", consumer=consumer, ids=ids, seconds=0.1)
            ledger.write("stepped", ids=ids, version=batch + 1, staleness=float(batch))
        ledger.write("killed", name="trainer-0")
    account = Account(tmp_path)
    account.read()
    return account


def test_curves_follow_the_order_of_puts_and_count_each_sample_once(account: Account) -> None:
    curves = Curves.of(account)
    np.testing.assert_allclose(curves.rewards, np.arange(40) / 50)
    assert curves.update_at.tolist() == [4 * batch + 1.5 for batch in [*range(10), 2]]
    assert curves.staleness.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2]
    assert curves.redelivered_at.tolist() == [8, 9, 10, 11]


def test_the_tenths_are_means_of_the_first_and_last_four_of_forty(account: Account) -> None:
    first, last = Curves.of(account).tenths()
    assert first == pytest.approx((0.00 + 0.02 + 0.04 + 0.06) / 4)
    assert last == pytest.approx((0.72 + 0.74 + 0.76 + 0.78) / 4)


@pytest.mark.parametrize(("last", "rose"), [(0.50, False), (0.54, False), (0.56, True), (0.40, False)])
def test_a_rise_is_more_than_luck(last: float, rose: bool) -> None:
    rewards = np.concatenate([np.full(50, 0.5), np.full(50, last)])
    assert Curves(rewards, np.empty(0), np.empty(0), np.empty(0)).rose() is rose


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["lost: never acked"], 1)])
def test_the_exit_status_follows_the_audit(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str], problems: list[str], status: int
) -> None:
    path = tmp_path / "new" / "demo.png"
    assert conclude(Console(width=200), account, problems, path) == status
    assert path.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "mean reward 0.03 in the first tenth, 0.75 in the last" in output
    assert all(problem in output for problem in problems)
    assert ("nothing lost, nothing acked twice" in output) is (not problems)


def test_a_reward_that_did_not_rise_fails_the_run(account: Account, tmp_path: Path) -> None:
    for entry in account.of("scored"):
        entry["rewards"] = [0.5] * 4
    assert conclude(Console(quiet=True), account, [], tmp_path / "demo.png") == 1
