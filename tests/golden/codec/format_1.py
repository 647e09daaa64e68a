"""The golden batches of format 1, and the script that wrote their blocks: `python -m tests.golden.codec.format_1`.

The .bin files are what format 1 is. A release that reads or writes them otherwise breaks stored blocks: give it a new
format number and new files, and keep these.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tqclient.codec import Records, Shared, allocate, measure

FOLDER: Final = Path(__file__).parent

_DTYPES: Final = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]
_STRUCTURED: Final = np.array([(1, 2.5, b"ab"), (-3, 0.25, b"")], np.dtype([("a", "<i4"), ("b", ">f8"), ("c", "S2")]))


def _of_dtype(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(32, dtype=torch.uint8).remainder(2).view(dtype).reshape(2, -1)


BATCHES: Final[dict[str, dict[str, Any]]] = {
    "dense": {str(dtype): _of_dtype(dtype) for dtype in _DTYPES},
    "arrays": {
        "big endian": np.arange(4, dtype=">i2").reshape(2, 2),
        "unicode": np.array(["añ", ""]),
        "structured": _STRUCTURED,
        "time": np.array([0, 1 << 40], "M8[us]"),
    },
    "ragged": {
        "tokens": [torch.arange(3), torch.arange(0), torch.arange(700)],
        "routing": [torch.full((row, 2, 2), row, dtype=torch.int8) for row in (2, 0, 1)],
        "arrays": [np.arange(row, dtype=np.uint16) for row in (1, 2, 0)],
    },
    "struct": {
        "mm": [
            {
                "pixels": torch.full((row, 3), row / 2),
                "grid": {"thw": torch.tensor([[1, row, 2]]), "name": f"image {row}"},
            }
            for row in (1, 2)
        ],
    },
    "texts": {"text": ["plain", "", "ünï\U0001f600"], "bytes": [b"\0\xff", b"", b"abc"]},
    "records": {
        "scalars": [None, True, -1, 2**64 - 1, -(2**70), 1.5, float("nan"), 1 - 2j, "text", b"bytes"],
        "containers": [
            (1, (2,)),
            {3, 1},
            frozenset({b"x"}),
            {1: "a", (2,): None},
            [[]],
            {},
            (),
            set(),
            [1],
            {"__ext__": 1},
        ],
        "times": [
            dt.datetime(2024, 2, 29, 23, 59, 58, 999_999, fold=1),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=-30), "name")),
            *(
                dt.date(1, 1, 1),
                dt.time(1, 2, 3, 4),
                dt.timedelta(-1, 2, 3),
                dt.time.max,
                dt.date.max,
                dt.datetime.min,
                0,
            ),
        ],
        "numpy": [
            *(
                np.float32(0.1),
                np.int8(-1),
                np.bool_(True),
                np.str_("s\0"),
                np.bytes_(b"b\0"),
                np.datetime64("2024", "Y"),
            ),
            *(np.array(7, "<i2"), np.zeros((0, 2)), np.arange(4.0).reshape(2, 2), _STRUCTURED),
        ],
        "tensors": [
            {"a": torch.ones(2, 2), "b": [torch.tensor(3, dtype=torch.bfloat16)]},
            torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 1, 3])),
            *range(8),
        ],
        "forced": Records([torch.zeros(1)] * 10),
    },
    "shared": {
        "images": Shared([torch.arange(5), torch.arange(0), torch.arange(300)], [2, 2, 0, 1]),
        "dense": Shared(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16), [1, 1, 0, 1]),
        "struct": Shared({"name": ["a", "b"], "pixels": [np.arange(3), np.arange(2)]}, [0, 1, 1, 1]),
        "within": {"plain": torch.arange(4), "shared": Shared(Records([None, (1, torch.ones(2))]), [1, 0, 1, 1])},
    },
    "no rows": {"dense": torch.zeros(0, 3), "list": [], "array": np.zeros((0, 2), np.int8)},
}


def path(name: str) -> Path:
    """Where a golden block lies."""
    return FOLDER / f"format_1_{name.replace(' ', '_')}.bin"


def encode(name: str) -> bytes:
    """The block of a batch, as today's code writes it."""
    plan = measure(BATCHES[name])
    target = allocate(plan.size_bytes)
    plan.write(target)
    return target.tobytes()


if __name__ == "__main__":
    for batch in BATCHES:
        path(batch).write_bytes(encode(batch))
