"""Many small blocks of one producer, each row of which is told from all others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.unit.codec.blocks import Block, encode
from tqclient.codec import Shared
from tqclient.codec.directory import Node, Stream

SHARED_FIELDS = ("image", "scene", "prompt")
FIELDS = ("dense", "even", "tokens", "wide", "uid", "image", "raw", "meta", "mm", "scene", "prompt", "flag")
COUNT = 12
ROWS = (1, 3)
"""Of a block."""


def row_of(number: int) -> dict[str, Any]:
    """Of a different length in each field; of "wide" in another number of checksums, "long" takes counts of 2 bytes.

    Rows 0 and 1, 2 and 3 and so on have the same of each of `SHARED_FIELDS`.
    """
    pair = number // 2
    return {
        "dense": torch.tensor([[number, -number]]),
        "even": torch.full((1, 512), number),  # a unit a row
        "tokens": [torch.arange(200 + number * 37 % 250) + number],
        "wide": [torch.full((100 + 397 * number % 6000, 3), number)],
        "uid": [f"row {number} é" * (1 + number % 3)],
        "raw": [b"\0\xff" * (number % 4)],
        "meta": [[number, torch.full((1 + number % 3, 2), float(number)), ("a", None)]],
        "mm": [{"pixels": torch.arange(1 + number % 6), "text": str(number)}],
        "image": [torch.arange(900 + pair * 613 % 1000, dtype=torch.int32) - pair],
        "scene": [{"pixels": torch.full((1 + pair % 5, 2), pair), "text": f"scene {pair}"}],
        "prompt": [["what is", pair, "?" * (pair % 4)]],
        "flag": torch.tensor([number % 2 == 0]),
    }


def numbers_of(block: int, rows: int) -> range:
    """Of the rows of a block."""
    return range(block * rows, (block + 1) * rows)


def encoded(rows: int = 1, count: int = COUNT) -> list[Block]:
    return [encode(put_of([row_of(number) for number in numbers_of(block, rows)])) for block in range(count)]


def put_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins rows to the values of one put."""
    put = {
        field: torch.cat([row[field] for row in rows])
        if isinstance(first, torch.Tensor)
        else [value for row in rows for value in row[field]]
        for field, first in rows[0].items()
    }
    prompts = [row["prompt"][0] for row in rows]
    distinct = list(dict.fromkeys(map(str, reversed(prompts))))  # the last one first
    index = [distinct.index(str(prompt)) for prompt in prompts]
    places = [index.index(value) for value in range(len(distinct))]
    return put | {field: Shared([put[field][place] for place in places], index) for field in SHARED_FIELDS}


def streams_of(node: Node) -> Iterator[Stream]:
    yield from node.streams
    for child in node.children:
        yield from streams_of(child)


DIRECTORIES = {rows: [block.directory for block in encoded(rows)] for rows in ROWS}
