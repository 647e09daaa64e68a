"""Agent loops: many prompts at once, whose groups end in another order than they began in."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import torch
from tensordict import NonTensorStack, TensorDict

import tqclient.compat.transfer_queue as tq

FAILED_SHARE = 0.03
PROMPTS_AT_ONCE = 4


@dataclass
class Weights:
    """The weights that generate, as far as this loop cares: their version.

    Attributes:
        version: the trainer's step that made them.
    """

    version: int = 0


async def session(partition: str, uid: str, number: int, weights: Weights, rng: random.Random) -> None:
    """Runs one session of a prompt: a few turns, each of which becomes a sample `{uid}_{session}_{turn}`.

    Raises:
        RuntimeError: the session failed; it has put nothing.
    """
    started = weights.version
    turns = rng.randint(1, 3)
    for _ in range(turns * rng.randint(1, 5)):
        await asyncio.sleep(0.001)  # generates
    if rng.random() < FAILED_SHARE:
        raise RuntimeError(f"session {number} of {uid} failed")
    lengths = [rng.randint(2, 32) for _ in range(turns)]
    responses = [torch.tensor([rng.randrange(1000) for _ in range(length)]) for length in lengths]
    samples = TensorDict(
        {
            "responses": torch.nested.as_nested_tensor(responses, layout=torch.jagged),
            "rewards": torch.tensor([float(rng.random() < 0.5)] * turns),
            "messages": NonTensorStack(*([{"role": "assistant", "turn": turn}] for turn in range(turns))),
        },
        batch_size=turns,
    )
    tags = [
        {"status": "success", "seq_len": length, "min_version": started, "max_version": weights.version}
        for length in lengths
    ]
    await tq.async_kv_batch_put([f"{uid}_{number}_{turn}" for turn in range(turns)], partition, samples, tags)


async def prompt(partition: str, uid: str, sessions: int, weights: Weights, seed: int) -> None:
    """Runs all sessions of a prompt; its own key, `{uid}`, has tags alone, and says how far it is."""
    await tq.async_kv_put(uid, partition, tag={"status": "running", "sessions": sessions})
    runs = [
        session(partition, uid, number, weights, random.Random(f"{seed} {uid} {number}")) for number in range(sessions)
    ]
    failures = [each for each in await asyncio.gather(*runs, return_exceptions=True) if each is not None]
    for failure in failures:
        if not isinstance(failure, RuntimeError):
            raise failure
    await tq.async_kv_put(uid, partition, tag={"status": "failure" if failures else "finished"})


async def generate(partition: str, groups: int, sessions: int, weights: Weights, seed: int) -> None:
    """Runs all prompts, some of them at once.

    Args:
        partition: that gets the samples.
        groups: prompts.
        sessions: of each prompt.
        weights: that generate; the trainer changes the version meanwhile.
        seed: of what the sessions draw.
    """
    places = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def placed(uid: str) -> None:
        async with places:
            await prompt(partition, uid, sessions, weights, seed)

    await asyncio.gather(*(placed(f"p{group:03}") for group in range(groups)))
