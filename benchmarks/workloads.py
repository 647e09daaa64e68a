"""The batches that are measured. Seeded: the same name, seed and scale give the same bytes on every machine.

Peers generate them in environments of their own: nothing but numpy, torch and xxhash is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import xxhash

Columns = dict[str, Any]
_Build = Callable[[np.random.Generator, int], Columns]
SCALES: Final = {"full": 1, "small": 16}
"""By which the rows of a workload are divided: what is small is for tests, and no measure of anything."""
IMAGE_WIDTH: Final = 1176
EXPERTS: Final = (16, 8)
"""MoE layers, and experts chosen in each."""


def multimodal(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """64 samples of token ids and a nested dict of image patches; 346 MB."""
    rows = 64 // divisor
    patches = np.linspace(256, 2048, rows).astype(int)
    rng.shuffle(patches)
    images = [
        {
            "pixel_values": torch.from_numpy(rng.standard_normal((int(count), IMAGE_WIDTH), dtype=np.float32)),
            "image_grid_thw": torch.tensor([[1, int(count) // 16, 16]]),
        }
        for count in patches
    ]
    # Each row owns its memory: a view of a larger tensor is pickled with all of that, which no user would measure.
    tokens = [torch.from_numpy(row.copy()) for row in rng.integers(0, 150_000, (rows, 2048))]
    return {"tokens": tokens, "mm": images}


def small(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """8,192 samples of a short string and two numbers."""
    rows = 8192 // divisor
    return {
        "uid": [f"{value:032x}" for value in rng.integers(0, 1 << 62, rows).tolist()],
        "reward": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
        "length": torch.from_numpy(rng.integers(1, 8192, (rows, 1))),
    }


def regular(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """256 samples of equally long token sequences; 44 MB."""
    rows, length = 256 // divisor, 8192
    return {
        "input_ids": torch.from_numpy(rng.integers(0, 150_000, (rows, length))),
        "attention_mask": torch.ones((rows, length), dtype=torch.int64),
        "old_log_probs": torch.from_numpy(rng.standard_normal((rows, length), dtype=np.float32)),
        "rewards": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
    }


def jagged(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """512 samples whose lengths are log-uniform in 512–8,192, with text and nested metadata."""
    rows = 512 // divisor
    lengths = _lengths(rng, rows)
    return {
        "tokens": [torch.from_numpy(rng.integers(0, 150_000, length)) for length in lengths],
        "response_mask": [torch.from_numpy(rng.random(length) < 0.5) for length in lengths],
        "log_probs": [torch.from_numpy(rng.standard_normal(length, dtype=np.float32)) for length in lengths],
        "uid": [f"{value:032x}" for value in rng.integers(0, 1 << 62, rows).tolist()],
        "prompt": ["word " * int(count) for count in rng.integers(200, 800, rows)],
        "metadata": [{"source": {"file": f"{row}.json", "line": row}, "turns": [1, 2, row]} for row in range(rows)],
    }


def fields(count: int) -> _Build:
    """Returns what builds 256 MiB over 256 samples as `count` fields of equal size."""

    def build(rng: np.random.Generator, divisor: int = 1) -> Columns:
        rows, width = 256 // divisor, (1 << 18) // count
        return {
            f"field_{number:02}": torch.from_numpy(rng.standard_normal((rows, width), dtype=np.float32))
            for number in range(count)
        }

    return build


def tiny_jagged(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """4,096 samples of 16 ragged fields with one to three values each; 1 MB in all."""
    rows = 4096 // divisor
    return {
        f"field_{number:02}": [torch.from_numpy(rng.integers(0, 150_000, length)) for length in lengths.tolist()]
        for number, lengths in enumerate(rng.integers(1, 4, (16, rows)))
    }


def rollout(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """256 samples as a rollout of a mixture-of-experts model leaves them, a quarter with images; 240 MB.

    Its critic writes `ROLLOUT_SOURCE` back as `ROLLOUT_VALUES`: what it computes is not what is measured.
    """
    rows = 256 // divisor
    totals = _lengths(rng, rows)
    responses = [int(total * share) for total, share in zip(totals, rng.uniform(0.3, 0.9, rows), strict=True)]
    return {
        "tokens": [torch.from_numpy(rng.integers(0, 150_000, total)) for total in totals],
        "loss_masks": [torch.from_numpy(rng.integers(0, 2, length, dtype=np.int32)) for length in responses],
        ROLLOUT_SOURCE: [torch.from_numpy(rng.standard_normal(length, dtype=np.float32)) for length in responses],
        "rewards": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
        "raw_reward": torch.from_numpy(rng.standard_normal((rows, 1), dtype=np.float32)),
        "total_lengths": torch.tensor(totals)[:, None],
        "response_lengths": torch.tensor(responses)[:, None],
        "truncated": torch.from_numpy(rng.random((rows, 1)) < 0.1),
        "sample_indices": torch.arange(rows)[:, None],
        "prompt": ["word " * int(count) for count in rng.integers(200, 800, rows)],
        "label": [str(value) for value in rng.integers(0, 1000, rows)],
        "metadata": [{"source": {"file": f"{row}.json", "line": row}, "turns": [1, 2, row]} for row in range(rows)],
        "multimodal_train_inputs": [_image(rng) if row % 4 == 0 else None for row in range(rows)],
        "routed_experts": [
            torch.from_numpy(rng.integers(0, 128, (total, *EXPERTS), dtype=np.int16)) for total in totals
        ],
    }


ROLLOUT_SOURCE: Final = "rollout_log_probs"
ROLLOUT_VALUES: Final = "values"


def one_row(rng: np.random.Generator, divisor: int = 1) -> Columns:
    """One sample of 1,024 tokens, their log-probabilities and a reward; 12 KB."""
    return {
        "tokens": torch.from_numpy(rng.integers(0, 150_000, (1, 1024))),
        "log_probs": torch.from_numpy(rng.standard_normal((1, 1024), dtype=np.float32)),
        "reward": torch.from_numpy(rng.standard_normal((1, 1), dtype=np.float32)),
    }


def _lengths(rng: np.random.Generator, rows: int) -> list[int]:
    """Returns log-uniform sequence lengths in 512–8,192."""
    lengths: list[int] = np.exp(rng.uniform(np.log(512), np.log(8192), rows)).astype(int).tolist()
    return lengths


def _image(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    count = int(rng.integers(64, 256))
    pixels = torch.from_numpy(rng.standard_normal((count, IMAGE_WIDTH), dtype=np.float32))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, count // 16, 16]])}


WORKLOADS: Final[Mapping[str, _Build]] = {
    "multimodal": multimodal,
    "small": small,
    "regular": regular,
    "jagged": jagged,
    "fields-1": fields(1),
    "fields-8": fields(8),
    "fields-32": fields(32),
    "tiny-jagged": tiny_jagged,
    "rollout": rollout,
}
ONE_ROW: Final = "one-row"
"""What each call of `rows` puts."""


def build(name: str, seed: int, scale: str = "full") -> Columns:
    """Returns the columns of a workload.

    Args:
        name: a key of `WORKLOADS`, or `ONE_ROW`.
        seed: of the generator.
        scale: a key of `SCALES`.
    """
    make = one_row if name == ONE_ROW else WORKLOADS[name]
    return make(np.random.default_rng(seed), SCALES[scale])


def is_list_of_tensors(column: Any) -> bool:
    """Returns whether a column is a list with one tensor a sample."""
    return isinstance(column, list) and all(isinstance(value, torch.Tensor) for value in column)


def spec(columns: Columns) -> dict[str, Any] | None:
    """Returns dtypes and shapes, as `Partition.allocate` takes them; None where a column is not made of tensors."""
    found = {name: _spec(column) for name, column in columns.items()}
    return None if None in found.values() else found


def _spec(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return column.dtype, list(column.shape[1:])
    if is_list_of_tensors(column):
        return column[0].dtype, [list(row.shape) for row in column]
    if all(isinstance(row, dict) for row in column):
        return spec({key: [row[key] for row in column] for key in column[0]})
    return None


def fill(targets: Mapping[str, Any], columns: Columns) -> None:
    """Copies the values of a batch into tensors of its `spec`.

    On this thread alone: torch's threads spin for some milliseconds after a copy, on the cores of what comes
    next. Those of a producer whose values come from a device do not.
    """
    for name, column in columns.items():
        if isinstance(column, torch.Tensor):
            _fill(targets[name], column)
        elif isinstance(column[0], dict):
            fill(targets[name], {key: [row[key] for row in column] for key in column[0]})
        else:
            for target, row in zip(targets[name], column, strict=True):
                _fill(target, row)


def _fill(target: torch.Tensor, values: torch.Tensor) -> None:
    np.copyto(target.reshape(-1).view(torch.uint8).numpy(), values.reshape(-1).view(torch.uint8).numpy())


def rows_of(columns: Columns) -> int:
    """Returns how many samples there are."""
    return len(next(iter(columns.values())))


def stamp(columns: Columns, number: int) -> None:
    """Changes the first sample's numbers in place: what an earlier round left cannot pass for this one's."""
    for column in columns.values():
        _stamp(column[0], number)


def _stamp(value: Any, number: int) -> None:
    if isinstance(value, torch.Tensor):
        value.view(-1)[:1] = number % 2 if value.dtype == torch.bool else number % 30_000
    elif isinstance(value, Mapping):
        for part in value.values():
            _stamp(part, number)


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
    elif isinstance(value, (np.ndarray, np.generic)):
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _pieces(value[key])
    else:
        yield str(value).encode()
