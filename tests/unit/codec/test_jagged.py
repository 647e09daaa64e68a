"""Jagged tensors are those that torch makes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tqclient.codec.kinds import ragged
from tqclient.codec.kinds.ragged import RaggedColumn
from tqclient.schema import Form

LENGTHS = [3, 1, 5, 2]
VALUES = torch.arange(11, dtype=torch.float32)


def ours(lengths: list[int] = LENGTHS) -> Any:
    data = torch.arange(sum(lengths), dtype=torch.float32).numpy().view(np.uint8)
    return RaggedColumn(Form("ragged", "torch", "float32"), data, np.array(lengths, np.int64)).value


def torchs() -> Any:
    offsets = torch.tensor([0, 3, 4, 9, 11])
    return torch.nested.nested_tensor_from_jagged(VALUES.clone(), offsets, min_seqlen=1, max_seqlen=5)


def saved(jagged: Any) -> Any:
    file = io.BytesIO()
    torch.save(jagged, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def gradient(jagged: Any) -> torch.Tensor:
    jagged.requires_grad_()
    (jagged * jagged).values().sum().backward()
    values: torch.Tensor = jagged.grad.values()
    return values


LOOKS: list[Callable[[Any], Any]] = [
    lambda jagged: [row.tolist() for row in jagged.unbind()],
    lambda jagged: torch.nested.to_padded_tensor(jagged, -1.0).tolist(),
    lambda jagged: jagged.offsets().tolist(),
    lambda jagged: (jagged._get_min_seqlen(), jagged._get_max_seqlen()),
    lambda jagged: (jagged.layout, jagged.dtype, jagged.dim(), jagged.size(0), jagged.requires_grad, jagged.is_leaf),
    lambda jagged: (jagged * 2 + jagged).values().tolist(),
    lambda jagged: saved(jagged).values().tolist(),
    lambda jagged: gradient(jagged).tolist(),
    lambda jagged: jagged.sum(dim=1).tolist(),
]


@pytest.fixture(params=["constructor", "public"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The way in which they are made; the public one where torch has no such constructor."""
    if request.param == "public":
        monkeypatch.setitem(sys.modules, "torch.nested._internal.nested_tensor", None)
        ragged._constructor.cache_clear()
        ragged._constructor()
        monkeypatch.undo()
    yield request.param
    ragged._constructor.cache_clear()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("look", LOOKS)
def test_a_jagged_tensor_looks_like_one_of_torchs(look: Callable[[Any], Any]) -> None:
    assert look(ours()) == look(torchs())


@pytest.mark.usefixtures("way")
def test_rows_may_all_be_empty_or_none() -> None:
    assert [row.tolist() for row in ours([0, 0]).unbind()] == [[], []]
    assert ours([]).size(0) == 0


def test_the_public_function_is_taken_where_there_is_no_other(way: str) -> None:
    assert ours()._is_view() == (way == "public")


LOADED = """
import sys
import numpy as np
from tqclient.codec import load_jagged
from tqclient.codec.kinds.ragged import RaggedColumn
from tqclient.schema import Form

ragged, dense = Form("ragged", "torch", "int64"), Form("dense", "torch", "int64", (2,))
before = set(sys.modules)
load_jagged([dense, Form("ragged", "numpy", "<i8"), Form("list"), Form("struct", children=(("x", dense),))])
print(len(set(sys.modules) - before))
load_jagged([dense, Form("struct", children=(("x", ragged),))])
print(len(set(sys.modules) - before) > 100)
before = set(sys.modules)
RaggedColumn(ragged, np.zeros(16, np.uint8), np.array([2, 0])).value
print(len(set(sys.modules) - before))
"""


def test_what_torch_loads_for_its_first_jagged_tensor_is_loaded_ahead() -> None:
    found = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["0", "True", "0"]
