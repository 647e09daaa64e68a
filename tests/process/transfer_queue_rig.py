"""What tests of the TransferQueue drop-in put and look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tqclient.compat.transfer_queue as tq
from tqserver.local import LocalCluster

_numbers = itertools.count()


@contextmanager
def connected(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Connects this process; the name is that of a partition of the test's own."""
    monkeypatch.setenv("TQ_CONTROLLER", address)
    tq.init({})
    yield f"train/{next(_numbers)}"
    tq.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalCluster(storage_nodes=1, arena="64MiB") as running:
        yield running.address


@pytest.fixture
def name(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A partition of the test's own; the process is connected."""
    with connected(address, monkeypatch) as partition:
        yield partition


@pytest.fixture
def client(name: str) -> tq.TransferQueueClient:
    return tq.get_client()


def tensors(rows: int, width: int = 3) -> Any:
    """Rows of `x`, int64 [rows, width], counted through, and of `r`, int64 [rows], likewise."""
    return TensorDict({"x": torch.arange(rows * width).reshape(rows, width), "r": torch.arange(rows)}, batch_size=rows)


def lists(value: Any) -> list[Any]:
    """The rows of a jagged tensor."""
    return [row.tolist() for row in value.unbind()]
