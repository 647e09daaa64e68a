"""What the three kinds of worker share: the sizes of a run, and how they take deliveries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tqclient as tq
from examples.grpo_addition.ledger import Ledger

PARTITION: Final = "train/addition"
REWARD_CONSUMER: Final = "reward"
TRAIN_CONSUMER: Final = "train"

GROUP_SIZE: Final = 8
"""Completions per prompt: what an advantage is relative to."""
PROMPTS_PER_PUT: Final = 16
ROWS_PER_BATCH: Final = PROMPTS_PER_PUT * GROUP_SIZE
"""Rows of every put and claim: whole groups, so that first-in-first-out claims hold whole groups too."""
CLAIM_TIMEOUT_S: Final = 10.0
PUT_TIMEOUT_S: Final = 120.0
"""Long enough for trainers that have yet to start on a busy machine; a sealed partition ends the wait at once."""


@dataclass(frozen=True)
class Run:
    """What every worker is told.

    Attributes:
        address: of the controller, host:port.
        folder: holds the weights, the ledgers and the workers' logs while the run lasts.
        seed: of the run; each rollout worker's own follows from it and the worker's number.
    """

    address: str
    folder: Path
    seed: int


def deliveries(consumer: tq.Consumer, ledger: Ledger) -> Iterator[tq.Batch]:
    """Claims batch after batch until the partition is sealed and drained.

    A batch is acked when the loop comes back for the next one. When the loop is left early, it is released; when the
    process dies, its lease runs out; in both cases the samples are delivered again. A batch whose lease ran out under
    us is somebody else's now: the ack is refused, and only the ledger hears of it.
    """
    while True:
        started = time.monotonic()
        try:
            batch = consumer.claim(ROWS_PER_BATCH, timeout=CLAIM_TIMEOUT_S)
        except tq.ClaimTimeout:
            continue
        except tq.Sealed:
            return
        ids = batch.ids.tolist()
        ledger.write("claimed", consumer=consumer.name, ids=ids, seconds=time.monotonic() - started)
        try:
            with batch:
                yield batch
                ledger.write("acking", consumer=consumer.name, ids=ids)
        except tq.LeaseExpired:
            ledger.write("refused ack", consumer=consumer.name, ids=ids)
        else:
            ledger.write("acked", consumer=consumer.name, ids=ids)
