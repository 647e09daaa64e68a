"""Groups whose members arrive in any order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import grpc
import numpy as np
import torch

import tqclient as tq
from benchmarks.scale.peer import CALL_SECONDS, Peer, ids_of
from benchmarks.statistics import Spread

SIZE: Final = 8
ROWS_PER_PUT: Final = 1_000
GROUPS_PER_CLAIM: Final = 8
CONSUMER, FIELD = "trainer", "value"


@dataclass(frozen=True, slots=True)
class Groups:
    """Puts of shuffled members, and claims of whole groups in between.

    Attributes:
        groups: of `SIZE` members each; every one was delivered whole, and once.
        put: of `ROWS_PER_PUT` rows, by the client.
        claim: of `GROUPS_PER_CLAIM` groups, over a bare stub.
        refused: claims that found too few groups complete, answered at once.
    """

    groups: int
    put: Spread
    claim: Spread
    refused: Spread


def measure(client: tq.Client, address: str, *, groups: int, seed: int) -> Groups:
    """Puts the members of all groups in random order; after each put claims whatever is complete.

    Raises:
        RuntimeError: a group was split, or not delivered exactly once.
    """
    part = client.create_partition("bench/groups", consumers=[CONSUMER])
    order = np.random.default_rng(seed).permutation(np.repeat(np.arange(groups), SIZE))
    group_of = np.empty(0, dtype=np.int64)  # by sample id, less that of the first one
    delivered: list[int] = []
    put, claim, refused = [], [], []
    peer, channel = Peer.connect(address)
    first_id = -1
    with channel:
        for start in range(0, len(order), ROWS_PER_PUT):
            chosen = order[start : start + ROWS_PER_PUT]
            begin = time.perf_counter()
            ids = part.put({FIELD: torch.zeros(len(chosen), 1)}, groups=chosen.tolist())
            put.append(time.perf_counter() - begin)
            first_id = int(ids[0]) if first_id < 0 else first_id
            group_of = np.concatenate([group_of, chosen])
            if start + ROWS_PER_PUT >= len(order):
                part.seal()
            while True:
                request = peer.claiming(
                    part._ref.partition_id, CONSUMER, tq.GroupSampler(SIZE), SIZE * GROUPS_PER_CLAIM, [FIELD]
                )
                begin = time.perf_counter()
                try:
                    reply = peer.stub.Claim(request, timeout=CALL_SECONDS)
                except grpc.RpcError:
                    refused.append(time.perf_counter() - begin)
                    break
                claim.append(time.perf_counter() - begin)
                delivered += _groups(group_of[ids_of(reply) - first_id])
                peer.stub.Settle(peer.acking(reply), timeout=CALL_SECONDS)
    if sorted(delivered) != list(range(groups)):
        raise RuntimeError(f"{groups} groups were put, {len(delivered)} delivered, {len(set(delivered))} different")
    return Groups(groups, Spread.of(put), Spread.of(claim), Spread.of(refused))


def _groups(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """Returns the groups of a claim, once it is certain that they are whole."""
    groups = rows.reshape(-1, SIZE)
    if (groups != groups[:, :1]).any():
        raise RuntimeError(f"a claim split groups: {rows.tolist()}")
    found: list[int] = groups[:, 0].tolist()
    return found
