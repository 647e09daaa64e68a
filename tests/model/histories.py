"""Runs random histories and counts their steps; what breaks is reported by the name of the promise that it breaks.

To see a check at work, break a line of tqserver/controller/core and run `pytest tests/model`:

- counts_always_add_up: consumer.py, `move`: `self.counts[state] += len(slots[:3])`
- no_sample_comes_again_after_its_ack: ranks.py, `end_membership`: move to 0 (open) for CONSUMED
- no_sample_is_delivered_too_often: partition.py, `give_up`: `>` for `>=`
- groups_are_never_split: samplers/grouped.py, `sample`: `[:size - 1]` for `[:size]`
- members_of_a_dp_rank_see_the_same: shares.py, `next_of`: `next(reversed(list(had)), None)`
- accepted_and_running_are_within_the_bound: admission.py, `_staleness`: leave `admitted.running` out of the sum
- no_more_versions_are_live_than_may_be: admission.py, `_versions`: `most + 1` for `most`
- puts_and_claims_keep_pace: ratelimit.py, `lacks_for_put`: `self._off(0, 0)` for `self._off(rows, 0)`
- a_snapshot_is_of_one_moment: snapshot.py, `_dump_partition`: `list(samples.groups.sizes)` without `list`
- nothing_is_kept_from_anybody: samplers/base.py, `has`: `view.count > request.batch_size`
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ClassVar, ParamSpec

import hypothesis
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from tests.model.driver import LEASE, Driver
from tqserver.controller.core import Core, limits
from tqserver.controller.core.snapshot import Capture

Arguments = ParamSpec("Arguments")

STEPS_PER_HISTORY = 60
STEPS_MIN = 2000
"""Rules that each machine runs at least, in CI too."""

COMPACT_ROWS_MIN = 4
"""Histories are short: what a million rows would compact now and then, these do as well."""


def promise(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Makes a check fail by its name."""

    @wraps(check)
    def named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except AssertionError as broken:
            raise AssertionError(f"{check.__name__}: {broken}") from broken

    return named


class Machine(RuleBasedStateMachine):
    """A core and what was promised of it; `driver` is made by each history's first rule."""

    driver: Driver
    steps: ClassVar[int] = 0
    _captured: tuple[Capture, bytes] | None = None

    @invariant()
    def indexes_agree(self) -> None:
        type(self).steps += 1
        self.driver.core.check_invariants()

    @invariant()
    @promise
    def a_snapshot_is_of_one_moment(self) -> None:
        """Whatever happens between looking at the state and putting it into bytes."""
        if self._captured is not None:
            capture, expected = self._captured
            assert b"".join(capture.chunks()) == expected, "it changed meanwhile"
            self._captured = None
        elif type(self).steps % 4 == 0:
            self._captured = self.driver.core.capture(), self.driver.core.snapshot()

    def teardown(self) -> None:
        """Replaying the journal gives the same state, byte for byte."""
        if not hasattr(self, "driver"):
            return
        replayed = Core(session_lease=LEASE)
        for command, sequence in self.driver.log:
            replayed.apply(command, 0.0, sequence)
        assert replayed.snapshot() == self.driver.core.snapshot()


def run(machine: type[Machine], histories: int, seed: int | None = None) -> int:
    """Runs histories; returns the steps taken.

    Args:
        machine: whose rules.
        histories: how many.
        seed: of the choices; None: as the hypothesis profile has it.
    """
    counted: type[Machine] = type(machine.__name__, (machine,), {"steps": 0})
    if seed is not None:
        counted = hypothesis.seed(seed)(counted)
    chosen = settings(max_examples=histories, stateful_step_count=STEPS_PER_HISTORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "COMPACT_ROWS_MIN", COMPACT_ROWS_MIN)
        run_state_machine_as_test(counted, settings=chosen)
    return counted.steps


def run_many(machine: type[Machine], histories: int) -> None:
    """Runs histories of enough steps."""
    steps = run(machine, histories)
    sys.stdout.write(f"{machine.__name__}: {steps} steps\n")
    assert steps >= STEPS_MIN


def run_seeds(machine: type[Machine], seed: int, rounds: int | None) -> None:
    """Runs a long range of seeds; `--seed` and `--rounds=1` repeat the one that failed, which is printed last."""
    steps = 0
    for each in range(seed, seed + (rounds or 100)):
        sys.stdout.write(f"{machine.__name__}: seed {each} after {steps} steps\n")
        steps += run(machine, 20, each)
