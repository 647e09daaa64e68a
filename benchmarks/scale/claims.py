"""How long a claim takes, by sampler and by the samples in the partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import tqclient as tq
from benchmarks.scale.peer import CALL_SECONDS, Peer
from benchmarks.statistics import Spread

FIELD: Final = "tokens"
GROUP_SIZE: Final = 8
ROWS_PER_PUT: Final = 8_192
SAMPLERS: Final[dict[str, tq.Sampler]] = {
    "fifo": tq.Fifo(),
    "lifo": tq.Lifo(),
    "random": tq.Random(1),
    "prioritized": tq.Prioritized("priority"),
    "group": tq.GroupSampler(GROUP_SIZE),
    "seqlen balanced": tq.SeqlenBalanced(FIELD),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the claims of one sampler, at one size.

    Attributes:
        sampler: its name.
        rows: in the partition.
        times: from request to reply, over a bare stub: no bytes of samples are read.
        first_ms: of a consumer's first claim, which looks at every row once.
    """

    sampler: str
    rows: int
    times: Spread
    first_ms: float


def fill(part: tq.Partition, rows: int, rng: np.random.Generator, tick: Callable[[int], object]) -> None:
    """Puts samples of a few tokens each, in bulk: in groups, with a priority as tag."""
    for start in range(0, rows, ROWS_PER_PUT):
        count = min(ROWS_PER_PUT, rows - start)
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rng.integers(1, 9, count))]))
        part.put(
            {FIELD: torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int16), offsets)},
            groups=[(start + row) // GROUP_SIZE for row in range(count)],
            tags=[{"priority": number} for number in rng.integers(0, 1 << 30, count).tolist()],
        )
        tick(count)


class _Claims:
    """The claims of one sampler in one partition, each of them acked."""

    def __init__(self, peer: Peer, partition_id: int, rows: int, sampler: str, batch_rows: int) -> None:
        self.rows = rows
        self.sampler = sampler
        self.seconds: list[float] = []
        self._peer = peer
        self._partition_id = partition_id
        self._batch_rows = batch_rows
        self._ready = rows
        self.first_ms = 1e3 * self.once()

    def once(self) -> float:
        """Claims and acks; returns the seconds of the claim."""
        if self._ready - self._batch_rows < self.rows // 2:
            self._peer.reset(self._partition_id, self.sampler)
            self._ready = self.rows
        request = self._peer.claiming(
            self._partition_id, self.sampler, SAMPLERS[self.sampler], self._batch_rows, [FIELD]
        )
        start = time.perf_counter()
        reply = self._peer.stub.Claim(request, timeout=CALL_SECONDS)
        elapsed = time.perf_counter() - start
        self._peer.stub.Settle(self._peer.acking(reply), timeout=CALL_SECONDS)
        self._ready -= self._batch_rows
        return elapsed


def measure(
    address: str,
    parts: dict[int, tq.Partition],
    *,
    samplers: Sequence[str],
    batch_rows: int,
    repeats: int,
    tick: Callable[[], Any],
) -> list[Cost]:
    """Times claims of all sizes in turn, so that whatever else the machine does slows down all of them.

    Args:
        address: of the controller.
        parts: rows in it → partition.
        samplers: names in `SAMPLERS`; each is a consumer of its own.
        batch_rows: of each claim.
        repeats: claims that count, of each sampler at each size.
        tick: called after each round.
    """
    costs = []
    peer, channel = Peer.connect(address)
    with channel:
        for sampler in samplers:
            claims = [_Claims(peer, part._ref.partition_id, rows, sampler, batch_rows) for rows, part in parts.items()]
            for turn in range(WARM_UP + repeats):
                for each in claims:
                    seconds = each.once()
                    if turn >= WARM_UP:
                        each.seconds.append(seconds)
                tick()
            costs += [Cost(sampler, each.rows, Spread.of(each.seconds), each.first_ms) for each in claims]
    return costs


WARM_UP: Final = 10
"""Claims of each kind that are not counted: they meet blocks that their session was not told of before."""


def growth(costs: Sequence[Cost], sampler: str) -> float:
    """Returns how many times as long as in the smallest partition a claim takes in the largest one, at the median."""
    by_rows = {cost.rows: cost.times.median_ms for cost in costs if cost.sampler == sampler}
    return by_rows[max(by_rows)] / by_rows[min(by_rows)]
