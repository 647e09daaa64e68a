"""Bits that flip in stored extents: an error that names field and row, never other bytes, and neighbours are served."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tqclient as tq
from tests.faults.probe import node_probe
from tests.unit.codec.values import identical
from tqclient.codec import Column, Layout
from tqclient.operations.effects import CONTROLLER, call
from tqclient.operations.read import Holdings, fetch
from tqclient.operations.sessions import live_session
from tqclient.rows import RowSet, Run
from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.local import LocalCluster

FLIPS = 10_000
OTHERS_EVERY = 10
"""Flips between two looks at the fields that were not damaged; at the damaged one it looks each time."""
BLOCKS = 4
ROWS = 8  # of each block


def block_values(rng: np.random.Generator) -> dict[str, Any]:
    """Every kind of column; rows larger and smaller than what one checksum covers."""
    return {
        "dense": torch.from_numpy(rng.standard_normal((ROWS, 1024))),
        "ragged": [torch.from_numpy(rng.integers(99, size=int(rng.integers(0, 3000)))) for _ in range(ROWS)],
        "mm": [
            {"pixels": torch.from_numpy(rng.random((int(rng.integers(1, 40)), 64), np.float32)), "grid": row}
            for row in range(ROWS)
        ],
        "prompt": [f"prompt {int(rng.integers(1 << 30))} " * int(rng.integers(0, 500)) for _ in range(ROWS)],
        "extra": [[row, None, {"t": torch.full((row * 200,), row)}] for row in range(ROWS)],
    }


@dataclass(frozen=True)
class Damage:
    """What a byte of a block stands for.

    Attributes:
        field: that it belongs to; None for header, directory and padding, which no get reads.
        rows: that share a checksum with it, ascending.
    """

    field: str | None
    rows: Sequence[int]

    @classmethod
    def of(cls, layout: Layout, position: int) -> Damage:
        """Works it out from the directory, unit by unit."""
        for field in layout.fields:
            for leaf in layout.node(field).leaves():
                for stream in leaf.streams:
                    within = position - stream.offset
                    if 0 <= within < stream.length:
                        start = within - within % stream.unit
                        bounds = stream.bounds().tolist()
                        spans = enumerate(itertools.pairwise(bounds))
                        unit = range(start, start + stream.unit)
                        rows = [row for row, (a, b) in spans if a < unit.stop and b > unit.start and a < b]
                        return cls(field, rows)
        return cls(None, ())


class Stored:
    """Blocks in the arena of a node, how they are read, and a hand that flips their bits."""

    def __init__(self, client: tq.Client, arena: NDArray[np.uint8], rng: np.random.Generator) -> None:
        self.part = client.create_partition("part")
        self.client, self.rng = client, rng
        self._arena = arena
        self._state = client._state
        self.values = [block_values(rng) for _ in range(BLOCKS)]
        self.ids = [self.part.put(values).tolist() for values in self.values]
        self._session = client._run(live_session(self._state, self._state.deadline(None)))
        request = pb.LocateRequest(
            partition_id=self.part._ref.partition_id,
            session=self._session.session,
            ids=pack_array(np.concatenate(self.ids), I64),
            pin=self._state.new_pin(),
        )
        self._pin = request.pin
        deadline = self._state.deadline(None)
        reply = client._run(call(CONTROLLER, "Locate", request, deadline, self._state.rng))
        self._rows = RowSet.from_wire(reply.rows, [field.name for field in reply.fields])
        self._blocks = [run.block_id for run in self._rows.runs["dense"]]
        self.layouts = [Layout.parse(self._rows.blocks[block].directory) for block in self._blocks]

    def close(self) -> None:
        """Lets go of the blocks."""
        self._state.drop_pin(self._session.session, self._pin)
        self.client.delete_partition(self.part.name)

    def read(self, block: int, wanted: Mapping[str, Sequence[int]]) -> dict[str, Column]:
        """Reads rows of a block, all that a get does once it knows where the rows lie."""
        runs = {field: [Run(self._blocks[block], np.array(rows, np.int64))] for field, rows in wanted.items() if rows}
        rows = replace(self._rows, ids=np.array(self.ids[block]), runs=runs)
        deadline = self._state.deadline(None)
        reading = fetch(self._state, self.part._ref, rows, self._session, True, Holdings(), deadline)
        return self.client._run(reading)

    @contextmanager
    def flipped(self) -> Iterator[tuple[int, Damage]]:
        """Flips one bit of one block, anywhere in it, for as long as the context lasts."""
        block = int(self.rng.integers(BLOCKS))
        layout = self.layouts[block]
        bit = int(self.rng.integers(layout.size_bytes * 8))
        extent = self._rows.blocks[self._blocks[block]].extents[0]
        assert extent.length == layout.size_bytes
        address = extent.offset + bit // 8
        self._arena[address] ^= 1 << bit % 8
        try:
            yield block, Damage.of(layout, bit // 8)
        finally:
            self._arena[address] ^= 1 << bit % 8

    def assert_equal(self, block: int, field: str, rows: Sequence[int], found: Sequence[Any]) -> None:
        expected = [self.values[block][field][row] for row in rows]
        assert all(map(identical, expected, found)), f"field {field!r} has other values"


@contextmanager
def stored(seed: int, transport: str) -> Iterator[Stored]:
    with (
        LocalCluster(storage_nodes=1, arena="16MiB") as cluster,
        tq.connect(cluster.address, transport=transport, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        arena = np.memmap(probe.describe().arena_path, np.uint8, "r+")
        yield Stored(client, arena, np.random.default_rng(seed))


def expected_message(stored: Stored, block: int, damage: Damage) -> str:
    row = damage.rows[0]
    return f"partition 'part', field {damage.field!r}, row {row}, sample {stored.ids[block][row]}: "


def test_a_flipped_bit_is_found_and_spares_the_neighbours(no_leaks: None, seed: int) -> None:
    everything = range(ROWS)
    hit: dict[str | None, int] = {}
    with stored(seed, "shm") as blocks:
        for turn in range(FLIPS):
            with blocks.flipped() as (block, damage):
                hit[damage.field] = hit.get(damage.field, 0) + 1
                if damage.field is not None:
                    with pytest.raises(tq.CorruptBlock) as caught:
                        blocks.read(block, {damage.field: everything})
                    assert str(caught.value).startswith(expected_message(blocks, block, damage))
                    assert caught.value.rows == (damage.rows[0],)
                    assert caught.value.ids == (blocks.ids[block][damage.rows[0]],)
                # Other fields are whole, and so is this one where no checksum is shared with the damage.
                wanted = {
                    field: [row for row in everything if field != damage.field or row not in damage.rows]
                    for field in blocks.values[block]
                    if field == damage.field or turn % OTHERS_EVERY == 0
                }
                read = blocks.read(block, wanted)
                for field, rows in wanted.items():
                    if rows:
                        blocks.assert_equal(block, field, rows, read[field].list())
        for block in range(BLOCKS):
            batch = blocks.part.get(blocks.ids[block])
            for field in blocks.values[block]:
                blocks.assert_equal(block, field, everything, batch.list(field))
    assert set(hit) == {"dense", "ragged", "mm", "prompt", "extra", None}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_get_of_a_flipped_bit_names_the_sample(transport: str, no_leaks: None, seed: int) -> None:
    with stored(seed, transport) as blocks:
        found = 0
        while found < 100:
            with blocks.flipped() as (block, damage):
                if damage.field is None:
                    continue
                found += 1
                everyone = blocks.rng.permutation(np.concatenate(blocks.ids)).tolist()
                hit = {blocks.ids[block][row] for row in damage.rows}
                row = next(row for row, id_ in enumerate(everyone) if id_ in hit)
                for copy in (True, False):
                    with pytest.raises(tq.CorruptBlock) as caught:
                        blocks.part.get(everyone, copy=copy)
                    where = f"partition 'part', field {damage.field!r}, row {row}, sample {everyone[row]}: "
                    assert str(caught.value).startswith(where)
                    assert (caught.value.rows, caught.value.ids) == ((row,), (everyone[row],))
                spared = [row for row in range(ROWS) if row not in damage.rows]
                if spared:
                    batch = blocks.part.get([blocks.ids[block][row] for row in spared])
                    for field in blocks.values[block]:
                        blocks.assert_equal(block, field, spared, batch.list(field))


def test_a_claim_of_a_flipped_bit_fails_and_is_delivered_once_the_bit_is_back(no_leaks: None, seed: int) -> None:
    with stored(seed, "shm") as blocks:
        consumer = blocks.part.consumer("actor")
        blocks.part.clear(ids=[id_ for ids in blocks.ids[1:] for id_ in ids])
        damaged = False
        while not damaged:
            with blocks.flipped() as (block, damage):
                damaged = block == 0 and damage.field is not None
                if damaged:
                    with pytest.raises(tq.CorruptBlock) as caught:
                        consumer.claim(ROWS, timeout=10)
                    assert str(caught.value).startswith(expected_message(blocks, block, damage))
        batch = consumer.claim(ROWS, timeout=10)
        assert batch.attempts.tolist() == [2] * ROWS
        for field in blocks.values[0]:
            blocks.assert_equal(0, field, range(ROWS), batch.list(field))
        batch.ack()
