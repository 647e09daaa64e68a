"""Log, then apply: the one way in which anything changes the core."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from tqclient.errors import TQError
from tqclient.wire.v1 import journal_pb2
from tqserver import failpoints, logs
from tqserver.controller.core import Core, Effect, Outcome
from tqserver.controller.core.snapshot import without_gc
from tqserver.controller.group_commit import Entry, GroupCommit, Saved
from tqserver.controller.journal import Journal

CORE_FAILED_STATUS: Final = 5
"""The process's exit status when applying a command raised what it never should; see `Journal.failed`."""
SNAPSHOT_AFTER_BYTES: Final = 64 << 20
"""Of records, at the least, that make another snapshot worth while: directories are large, and quickly applied."""
SNAPSHOT_AFTER_FACTOR: Final = 2
"""Times what the latest snapshot took, in bytes or in seconds, make another one worth while, when that is more."""

_log = logs.get("controller.pipeline")


def recover(journal: Journal, clock: Callable[[], float], session_lease: float) -> Core:
    """Rebuilds the core from the journal.

    Args:
        journal: read from its latest snapshot on.
        clock: monotonic seconds.
        session_lease: seconds.

    Raises:
        JournalDamaged: see `Journal.records`; or a record cannot be applied, see `Journal.give_up`.
    """
    while True:
        _, state = journal.snapshot()
        now = clock()
        core = Core.restore(state, now, session_lease=session_lease) if state else Core(session_lease=session_lease)
        if _replay(core, journal, now):
            return core


@without_gc()
def _replay(core: Core, journal: Journal, now: float) -> bool:
    """Applies the records; False when one was given up: half of it may have been applied, so once more, without it."""
    for sequence, record in journal.records():
        try:
            core.apply(journal_pb2.Command.FromString(record), now, sequence)
            failpoints.hit(failpoints.REPLAY)
        except Exception as error:
            _log.exception("a record cannot be applied", sequence=sequence, error=repr(error))
            journal.give_up(sequence, record, repr(error))
            return False
    return True


class Pipeline:
    """Journals commands in groups and applies them in their order, on the event loop.

    Args:
        core: as `recover` returned it.
        journal: handed over; closed by `close`.
        clock: monotonic seconds.
        effect: told of each effect, in order.
        settled: called after some commands were applied, when their replies and effects are out.
        snapshot_records: of the journal between two snapshots; or
        replay_budget: seconds that applying what came since the last one took, which a restart would take again; or as
            many bytes as `SNAPSHOT_AFTER_BYTES` says.
        replayed: seconds that this start took already.
    """

    def __init__(
        self,
        core: Core,
        journal: Journal,
        *,
        clock: Callable[[], float],
        effect: Callable[[Effect], None],
        settled: Callable[[], None],
        snapshot_records: int,
        replay_budget: float,
        replayed: float,
    ) -> None:
        self.core = core
        self._clock = clock
        self._effect = effect
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._journal = journal
        self._snapshot_bytes, self._records_bytes = journal.sizes()
        self._commit = GroupCommit(journal, self._answered)
        self._snapshot_records = snapshot_records
        self._replay_budget = replay_budget
        self._records = 0
        self._replay_s = replayed
        self._snapshot_s = 0.0
        self._saving = False
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0

    def submit(self, command: journal_pb2.Command, done: Callable[[Outcome], None]) -> None:
        """Journals and applies a command.

        Args:
            command: that `core.check` let pass.
            done: called right after it was applied, ahead of the next command; or with why it was not journaled.

        Raises:
            Unavailable: too much is under way.
        """
        record = command.SerializeToString()

        def durable(sequence: int) -> None:
            outcome = self._apply(command, sequence, record)
            self.dispatch(outcome.effects)
            done(outcome)

        self._commit.submit(Entry(record, durable, lambda error: done(Outcome(None, error, ()))))

    async def execute(self, command: journal_pb2.Command) -> Outcome:
        """Journals and applies a command. A caller that is cancelled changes nothing about that."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self.submit(command, lambda outcome: None if future.done() else future.set_result(outcome))
        return await future

    def _apply(self, command: journal_pb2.Command, sequence: int, record: bytes) -> Outcome:
        begin = time.perf_counter()
        try:
            outcome = self.core.apply(command, self._clock(), sequence)
            failpoints.hit(failpoints.APPLY)
        except Exception as error:
            self._fail(sequence, record, error)
        failpoints.hit(failpoints.AFTER_APPLY)
        self._records += 1
        self._records_bytes += len(record)
        self._replay_s += time.perf_counter() - begin
        return outcome

    def _fail(self, sequence: int, record: bytes, error: Exception) -> NoReturn:
        """Half of a record may have been applied: the process ends; the next start replays everything but that."""
        _log.exception("applying a command failed; the process ends", sequence=sequence)
        try:
            self._journal.failed(sequence, record, repr(error))
        except Exception as unnoted:
            _log.error("it could not be noted; if it fails again, the next start refuses", error=repr(unnoted))
        os._exit(CORE_FAILED_STATUS)

    def dispatch(self, effects: Iterable[Effect]) -> None:
        """Passes effects on."""
        for effect in effects:
            self._effect(effect)

    def _answered(self, ends_group: bool) -> None:
        self._settled()
        self._arm()
        if not ends_group or self._saving:
            return
        enough_bytes = max(SNAPSHOT_AFTER_BYTES, SNAPSHOT_AFTER_FACTOR * self._snapshot_bytes)
        enough_s = max(self._replay_budget, SNAPSHOT_AFTER_FACTOR * self._snapshot_s)
        if self._records >= self._snapshot_records or self._replay_s >= enough_s or self._records_bytes >= enough_bytes:
            self._saving = True
            self._records, self._replay_s, self._records_bytes = 0, 0.0, 0
            self._commit.save(self.core.sequence, self.core.capture().chunks(), self._saved)

    def _saved(self, saved: Saved) -> None:
        self._saving = False
        self._snapshot_bytes, self._snapshot_s = saved.size_bytes, saved.seconds

    def _arm(self) -> None:
        """Sets the timer to the next deadline. Deadlines that are renewed meanwhile make it ring in vain, no more."""
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        when = self._loop.time() + max(0.0, deadline - self._clock())
        if self._timer is not None:
            if self._rings_at <= when:
                return
            self._timer.cancel()
        # uvloop has no timer for what is due already, and a handle that does not know when it rings.
        self._rings_at = when
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._clock()
        for command in self.core.due(now):
            try:
                self.submit(command, self._log_refusal)
            except TQError as error:  # the core reports it again soon
                _log.warning("the end of a lease has to wait", error=str(error))
        self.dispatch(self.core.collect(now))
        self._settled()
        self._arm()

    @staticmethod
    def _log_refusal(outcome: Outcome) -> None:
        if outcome.error is not None:
            _log.warning("the end of a lease has to wait", error=str(outcome.error))

    def close(self) -> None:
        """Waits until everything submitted is durable, and closes the journal; blocks."""
        if self._timer is not None:
            self._timer.cancel()
        self._commit.close()
