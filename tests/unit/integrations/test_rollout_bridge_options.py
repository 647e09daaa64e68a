"""The bridge's flags, and devices that are not there."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

import tqclient as tq
from tqclient.integrations.rollout import mover_to
from tqclient.integrations.rollout_options import RolloutOptions, add_arguments


def parsed(*flags: str) -> RolloutOptions:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-6)
    add_arguments(parser)
    return RolloutOptions.from_args(parser.parse_args(list(flags)))


def test_without_flags_options_are_the_defaults() -> None:
    default = RolloutOptions()
    assert parsed() == default
    assert RolloutOptions.from_args(argparse.Namespace(lr=0.1)) == default
    assert (default.tasks, default.max_staleness, default.device) == (("actor_train",), 0, "cpu")


def test_flags_set_what_they_name() -> None:
    flags = "--tq-controller c:1 --tq-run r --tq-tasks actor_train critic_train --tq-max-staleness 3"
    more = "--tq-start-rollout-id 50 --tq-extra-fields a b --tq-device cuda:1 --tq-timeout 5 --tq-transport shm"
    assert parsed(*flags.split(), *more.split(), "--tq-max-attempts", "9") == RolloutOptions(
        controller="c:1",
        run="r",
        tasks=("actor_train", "critic_train"),
        max_staleness=3,
        start_rollout_id=50,
        extra_fields=("a", "b"),
        device="cuda:1",
        timeout=5.0,
        transport="shm",
        max_attempts=9,
    )
    assert parsed("--tq-max-staleness", "-1").max_staleness is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": ""},
        {"run": "a/b"},
        {"tasks": ()},
        {"tasks": "actor_train"},
        {"extra_fields": "a"},
        {"max_staleness": -2},
        {"start_rollout_id": None},
        {"start_rollout_id": True},
        {"device": ""},
        {"device": None},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"timeout": "5"},
        {"run": 5},
        {"tasks": ("a", "b", "a")},
        {"tasks": 5},
        {"tasks": ("",)},
        {"extra_fields": (None,)},
        {"extra_fields": ("a", "a")},
        {"max_attempts": 0},
        {"max_attempts": True},
        {"max_attempts": 1 << 32},
        {"max_staleness": 0.5},
    ],
    ids=str,
)
def test_options_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(tq.InvalidArgument, match=name):
        RolloutOptions(**wrong)


@pytest.mark.parametrize("device", ["npu", "npu:0", "cuda:99", "meta", "gpu"])
def test_an_accelerator_that_is_not_there_is_an_error(device: str) -> None:
    with pytest.raises(tq.InvalidArgument, match=device):
        mover_to(device)


def test_the_device_that_is_named_is_the_one_that_is_used() -> None:
    moved, _ = mover_to("cpu").move([torch.ones(2)])
    assert moved[0].device.type == "cpu"
