"""The batches that are measured. Seeded: the same name, seed and scale give the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash

Columns = dict[str, Any]
_Build = Callable[[np.random.Generator], Columns]


def multimodal(rng: np.random.Generator) -> Columns:
    """64 samples of token ids and a nested dict of image patches; 346 MB."""
    rows = 64
    patches = np.linspace(256, 2048, rows).astype(int)
    rng.shuffle(patches)
    images = [
        {
            "pixel_values": torch.from_numpy(rng.standard_normal((int(count), 1176), dtype=np.float32)),
            "image_grid_thw": torch.tensor([[1, int(count) // 16, 16]]),
        }
        for count in patches
    ]
    tokens = torch.from_numpy(rng.integers(0, 150_000, (rows, 2048)))
    return {"tokens": list(tokens.unbind()), "mm": images}


def small(rng: np.random.Generator) -> Columns:
    """8,192 samples of a short string and two numbers."""
    rows = 8192
    return {
        "uid": [f"{value:032x}" for value in rng.integers(0, 1 << 62, rows).tolist()],
        "reward": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
        "length": torch.from_numpy(rng.integers(1, 8192, (rows, 1))),
    }


def regular(rng: np.random.Generator) -> Columns:
    """256 samples of equally long token sequences; 44 MB."""
    rows, length = 256, 8192
    return {
        "input_ids": torch.from_numpy(rng.integers(0, 150_000, (rows, length))),
        "attention_mask": torch.ones((rows, length), dtype=torch.int64),
        "old_log_probs": torch.from_numpy(rng.standard_normal((rows, length), dtype=np.float32)),
        "rewards": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
    }


def jagged(rng: np.random.Generator) -> Columns:
    """512 samples whose lengths are log-uniform in 512–8,192, with text and nested metadata."""
    rows = 512
    lengths = np.exp(rng.uniform(np.log(512), np.log(8192), rows)).astype(int).tolist()
    return {
        "tokens": [torch.from_numpy(rng.integers(0, 150_000, length)) for length in lengths],
        "response_mask": [torch.from_numpy(rng.random(length) < 0.5) for length in lengths],
        "log_probs": [torch.from_numpy(rng.standard_normal(length, dtype=np.float32)) for length in lengths],
        "uid": [f"{value:032x}" for value in rng.integers(0, 1 << 62, rows).tolist()],
        "prompt": ["word " * int(count) for count in rng.integers(200, 800, rows)],
        "metadata": [{"source": {"file": f"{row}.json", "line": row}, "turns": [1, 2, row]} for row in range(rows)],
    }


WORKLOADS: Final[Mapping[str, _Build]] = {
    "multimodal": multimodal,
    "small": small,
    "regular": regular,
    "jagged": jagged,
}


def build(name: str, seed: int) -> Columns:
    """Returns the columns of a workload.

    Args:
        name: a key of `WORKLOADS`.
        seed: of the generator.
    """
    return WORKLOADS[name](np.random.default_rng(seed))


def pieces(columns: Columns) -> list[np.ndarray[Any, Any]]:
    """Returns the bytes of each value where they lie, uint8 views: what a put has to copy, one by one."""
    return [np.frombuffer(piece, np.uint8) for rows in columns.values() for row in rows for piece in _pieces(row)]


def size_bytes(columns: Columns) -> int:
    """Returns the payload bytes of a workload: tensors and encoded text, without any framing."""
    return sum(piece.size for piece in pieces(columns))


def digest(columns: Mapping[str, Any]) -> int:
    """Returns the xxh3-64 of every value, row by row: equal for what was put and what came back."""
    state = xxhash.xxh3_64()
    for name in sorted(columns):
        state.update(name.encode())
        for row in columns[name]:
            for piece in _pieces(row):
                state.update(piece)
    return state.intdigest()


def _pieces(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _pieces(value[key])
    else:
        yield str(value).encode()
