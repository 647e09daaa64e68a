"""One rank of a training job, as a process of its own: claims, says what it got, acks, until the partition is drained.

A JSON object per line on stdout: `registered`, then `claimed` and `acked` for each step, then `drained`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from typing import Any

import tqclient as tq


def say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--dp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of each DP rank and step")
    parser.add_argument("--hold", type=int, default=-1, help="step that it never gets beyond")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes")
    parser.add_argument("--together", action="store_true", help="begin when every rank is there")
    options = parser.parse_args()
    place = tq.Topology(dp=options.dp, tp=options.tp, rank=options.rank, world_size=options.dp * options.tp)
    with tq.connect(options.address, timeout=60) as client:
        consumer = client.partition("train").consumer(
            "actor", fields=["tokens", "row"], topology=place, sampler=tq.SeqlenBalanced("tokens")
        )
        while consumer.register() < place.size and options.together:
            time.sleep(0.05)
        say("registered")
        while not drained(consumer, options):
            say("overtaken")  # another member died: what this one held is delivered again
    say("drained")


def drained(consumer: tq.Consumer, options: argparse.Namespace) -> bool:
    """Consumes all there is; false when an ack came too late."""
    for batch in consumer.batches(options.rows):
        tokens = batch.list("tokens")
        for row, values in zip(batch["row"].tolist(), tokens, strict=True):
            if values.tolist() != list(range(row, row + len(values))):
                raise AssertionError(f"row {row} has other values than were put")
        lengths = [len(values) for values in tokens]
        ids, attempts = batch.ids.tolist(), batch.attempts.tolist()
        say("claimed", step=batch.step, ids=ids, attempts=attempts, lengths=lengths)
        time.sleep(options.pace)
        while batch.step == options.hold:
            signal.pause()
        try:
            batch.ack()
        except tq.LeaseExpired:
            return False
        say("acked", step=batch.step, ids=ids)
    return True


if __name__ == "__main__":
    main()
