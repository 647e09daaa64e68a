"""Many callers over a few processes: put, get, add a column, claim, ack; each writes down what it was told.

Run as a program, it is one process of the load: threads over a blocking client, or tasks over an asyncio one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import tqclient as tq
from tests.harness import Child, Ledger, LedgerWriter, Outcome, Supervisor, wait_until

CONSUMER: Final = "trainer"
CALL_SECONDS: Final = 30.0
"""Of every call; a caller that gets no answer in this time has not resumed by itself."""
STOP_SECONDS: Final = 15.0
BATCH_ROWS: Final = 3
PROGRAM: Final = Path(__file__)

LOADS: Final = (("threads", "shm"), ("tasks", "shm"), ("threads", "grpc"), ("tasks", "grpc"))
"""(what callers are, transport) of each process."""


class MixedLoad:
    """The processes of one load, over one partition.

    Args:
        supervisor: starts and ends them.
        ledger: of every operation.
        address: of the controller.
        partition: exists already.
        callers: in all.
        loads: a process each.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        ledger: Ledger,
        address: str,
        partition: str,
        *,
        callers: int,
        seed: int,
        loads: Sequence[tuple[str, str]] = LOADS,
    ) -> None:
        self._ledger = ledger
        share = callers // len(loads)
        self.children: list[Child] = [
            supervisor.python(
                PROGRAM,
                address,
                partition,
                ledger.directory,
                kind,
                transport,
                index * share,
                share,
                seed,
                name=f"load-{index}",
            )
            for index, (kind, transport) in enumerate(loads)
        ]
        for child in self.children:
            child.wait_for("calling")

    @property
    def written_bytes(self) -> int:
        """Of the ledger: grows with each operation."""
        assert all(child.running for child in self.children), "\n".join(child.report() for child in self.children)
        return sum(path.stat().st_size for path in self._ledger.directory.iterdir())

    def stop(self) -> None:
        """Lets every caller finish what it is at; none of them may have failed."""
        for child in self.children:
            child.terminate()
        for child in self.children:
            wait_for_end(child)


def wait_for_end(child: Child) -> None:
    """Waits until a process of the load ends in good order; one that hangs says where."""
    try:
        status = child.wait(timeout=STOP_SECONDS)
    except AssertionError:
        child.signal(signal.SIGUSR1)
        wait_until(lambda: "most recent call first" in child.stderr, what="its stack")
        raise AssertionError(f"it hangs\n{child.report()}") from None
    assert status == 0, child.report()


def check(ledger: Ledger, part: tq.Partition) -> None:
    """Compares the ledger of callers that all ended in good order with what is there; drains the partition."""
    put = sorted(id_ for event in ledger.events() if event["event"] == "put" for id_ in event["ids"])
    info = part.describe()
    assert info.samples == len(put)  # nobody is in doubt
    found: set[int] = set()
    for start in range(0, len(put), 4096):
        batch = part.get(put[start : start + 4096], fields=["x", "text"])
        check_rows(batch)
        found.update(batch.ids.tolist())
    consumed = info.counts.get(CONSUMER, {}).get("consumed", 0)
    ledger.check(Outcome(frozenset(found), {CONSUMER: consumed}))
    part.seal()
    left = [batch.ids.tolist() for batch in part.consumer(CONSUMER, fields=["x", "score"]).batches(4096)]
    assert consumed + sum(map(len, left)) == len(put)  # each is delivered, whatever happened on the way


def check_rows(batch: Any) -> None:
    """A sample's values follow from its key."""
    numbers = np.asarray(batch["x"])
    assert batch.keys == ["-".join(map(str, row)) for row in numbers.tolist()], (batch.keys, numbers)
    if "text" in batch:
        assert batch.list("text") == [key * 3 for key in batch.keys]
    if "score" in batch:
        assert np.asarray(batch["score"]).tolist() == numbers.sum(axis=1).tolist()


async def _settled(result: Any) -> Any:
    """What a call came to; that of a blocking client has come about already."""
    return await result if inspect.isawaitable(result) else result


async def _call(part: Any, ledger: LedgerWriter, caller: int, rng: random.Random, stop: threading.Event) -> None:
    """One caller, over either client."""
    consumer = part.consumer(CONSUMER, fields=["x", "score"])
    turn = 0
    while not stop.is_set():
        x = np.array([(caller, turn, row) for row in range(rng.randint(1, BATCH_ROWS))])
        keys = ["-".join(map(str, row)) for row in x.tolist()]
        token = ledger.putting(len(x))
        ids = await _settled(part.put({"x": x, "text": [key * 3 for key in keys]}, keys=keys))
        ledger.put(token, ids)
        check_rows(await _settled(part.get(ids, fields=["x", "text"])))
        await _settled(part.put({"score": x.sum(axis=1)}, ids=ids))
        await _consume(consumer, ledger)
        turn += 1


async def _consume(consumer: Any, ledger: LedgerWriter) -> None:
    batch = await _settled(consumer.claim(1))  # a caller puts at least as many as it claims: it never waits for long
    check_rows(batch)
    token = ledger.claimed(CONSUMER, batch.ids)
    ledger.acking(token)
    try:
        await _settled(batch.ack())
    except tq.LeaseExpired:
        ledger.refused(token)
    else:
        ledger.acked(token)


def _run_threads(address: str, partition: str, transport: str, call: Any, callers: range) -> None:
    failed: list[BaseException] = []

    def run(part: tq.Partition, caller: int) -> None:
        try:
            asyncio.run(call(part, caller))
        except BaseException as error:
            failed.append(error)
            raise

    with tq.connect(address, transport=transport, timeout=CALL_SECONDS) as client:
        part = client.partition(partition)
        threads = [threading.Thread(target=run, args=(part, caller)) for caller in callers]
        for thread in threads:
            thread.start()
        print("calling", flush=True)  # noqa: T201
        # A signal that another thread took is handled once this one wakes up: it must not sleep for ever.
        for thread in threads:
            while thread.is_alive():
                thread.join(0.05)
    if failed:
        raise failed[0]


async def _run_tasks(address: str, partition: str, transport: str, call: Any, callers: range) -> None:
    async with tq.aio.connect(address, transport=transport, timeout=CALL_SECONDS) as client:
        part = await client.partition(partition)
        tasks = [asyncio.create_task(call(part, caller)) for caller in callers]
        print("calling", flush=True)  # noqa: T201
        await asyncio.gather(*tasks)


def main(argv: Sequence[str]) -> None:
    address, partition, directory, kind, transport, first, count, seed = argv
    stop = threading.Event()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    callers = range(int(first), int(first) + int(count))
    with LedgerWriter(Path(directory)) as ledger:

        async def call(part: Any, caller: int) -> None:
            try:
                await _call(part, ledger, caller, random.Random(f"{seed}-{caller}"), stop)
            finally:
                stop.set()  # one that fails ends them all

        if kind == "threads":
            _run_threads(address, partition, transport, call, callers)
        else:
            asyncio.run(_run_tasks(address, partition, transport, call, callers))


if __name__ == "__main__":
    main(sys.argv[1:])
