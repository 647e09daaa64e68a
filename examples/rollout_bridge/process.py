"""One process of the job."""

from __future__ import annotations

import os
from typing import Final

import torch

from examples.rollout_bridge.rollout import publish
from examples.rollout_bridge.trainer import act, criticise
from tqclient.integrations.rollout_bridge import RolloutOptions, connect

DP: Final = 2


def run(role: str, rank: int, rollouts: int, options: RolloutOptions, meet: str) -> None:
    """Plays one role to the end."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with connect(options) as bridge:
        if role == "worker":
            publish(bridge, rollouts, DP, seed=0)
        elif role == "critic":
            criticise(bridge, rollouts, DP)
        else:
            act(bridge, rollouts, rank, DP, meet)
