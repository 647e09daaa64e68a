"""A consumer that is held for longer than its lease, and then acks: refused; every row is acknowledged once."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

import tqclient as tq
from tests.faults.probe import LEASE
from tests.harness import Ledger, Outcome, Supervisor, wait_until
from tqserver.local import LocalCluster

ROWS = 64

# Claims and stops itself in the middle of it, as many times as it is told to; then acks.
CONSUMER = """
import os, signal, sys
from pathlib import Path
import tqclient as tq
from tests.harness import LedgerWriter

with tq.connect(sys.argv[1], timeout=20) as client, LedgerWriter(Path(sys.argv[2])) as ledger:
    consumer = client.partition("part").consumer("actor")
    for turn in range(int(sys.argv[3])):
        try:
            batch = consumer.claim(int(sys.argv[4]), timeout=0.5)
        except tq.ClaimTimeout:
            break
        token = ledger.claimed("actor", batch.ids)
        os.kill(os.getpid(), signal.SIGSTOP)
        ledger.acking(token)
        try:
            batch.ack()
        except tq.LeaseExpired as error:
            ledger.refused(token)
            print(f"turn {turn}: LeaseExpired")
        else:
            ledger.acked(token)
            print(f"turn {turn}: acked")
print("done")
"""


def outcome(part: tq.Partition, ids: list[int]) -> Outcome:
    return Outcome(present=frozenset(ids), consumed={"actor": part.describe().counts["actor"]["consumed"]})


def put_rows(part: tq.Partition, ledger: Ledger, rows: int) -> list[int]:
    with ledger.writer() as writer:
        token = writer.putting(rows)
        ids: list[int] = part.put({"x": torch.arange(rows)}).tolist()
        writer.put(token, ids)
    return ids


def test_the_ack_of_a_consumer_that_was_held_past_its_lease_is_refused(
    no_leaks: None, supervisor: Supervisor, ledger: Ledger
) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part", lease=LEASE)
        ids = put_rows(part, ledger, ROWS)
        held = supervisor.python(CONSUMER, cluster.address, ledger.directory, 1, ROWS)
        wait_until(lambda: held.stopped, what="the consumer stops")
        with ledger.writer() as writer:
            batch = part.consumer("actor").claim(ROWS, timeout=10)
            token = writer.claimed("actor", batch.ids)
            assert batch.ids.tolist() == ids
            assert batch.attempts.tolist() == [2] * ROWS
            held.resume()
            assert held.wait_for("turn 0: ") == "turn 0: LeaseExpired"
            assert part.describe().counts["actor"]["leased"] == ROWS  # the refused ack has not touched the other claim
            writer.acking(token)
            batch.ack()
            writer.acked(token)
        assert held.wait() == 0, held.report()
        assert part.describe().counts["actor"]["consumed"] == ROWS
        ledger.check(outcome(part, ids))


def hold_around_the_lease(supervisor: Supervisor, ledger: Ledger, rng: random.Random, turns: int) -> None:
    """A consumer is held for about its lease, again and again, while another one takes what becomes free."""
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part", lease=LEASE, max_attempts=1000)
        ids = put_rows(part, ledger, turns * ROWS)
        held = supervisor.python(CONSUMER, cluster.address, ledger.directory, turns, ROWS)
        wait_until(lambda: held.stopped, what="the consumer stops")

        def consume() -> None:
            with ledger.writer() as writer:
                while part.describe().counts["actor"]["consumed"] < len(ids):
                    try:
                        batch = part.consumer("actor").claim(ROWS // 4, timeout=0.2)
                    except tq.ClaimTimeout:
                        continue
                    token = writer.claimed("actor", batch.ids)
                    writer.acking(token)
                    batch.ack()
                    writer.acked(token)

        other: threading.Thread | None = None
        for turn in range(turns):
            wait_until(lambda: held.stopped or not held.running, what=f"the consumer stops in turn {turn}")
            resumes = time.monotonic() + LEASE * rng.uniform(0.9, 1.1)
            wait_until(lambda: time.monotonic() >= resumes, what="about a lease")  # noqa: B023
            held.resume()
            if other is None:
                other = threading.Thread(target=consume)
                other.start()
            if held.running:
                wait_until(lambda: f"turn {turn}: " in held.stdout or not held.running, what="an ack")  # noqa: B023
        assert other is not None
        held.resume()
        other.join(60)
        assert held.wait() == 0, held.report()
        assert part.describe().counts["actor"]["consumed"] == len(ids)
        ledger.check(outcome(part, ids))


def test_acks_around_the_end_of_a_lease_count_once(
    no_leaks: None, supervisor: Supervisor, ledger: Ledger, seed: int
) -> None:
    hold_around_the_lease(supervisor, ledger, random.Random(seed), 4)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_many_acks_around_the_end_of_a_lease_count_once(
    no_leaks: None, supervisor: Supervisor, ledger: Ledger, seed: int, rounds: int | None
) -> None:
    hold_around_the_lease(supervisor, ledger, random.Random(seed), rounds or 100)
