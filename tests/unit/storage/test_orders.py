"""Orders about very many extents are carried out by and by: the node answers its callers meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tqclient.limits import EXTENT_ALIGN, MIB
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver import limits
from tqserver.storage.arena import open_arena
from tqserver.storage.node import Node

ROWS = 1_000


def test_others_go_on_while_a_node_hears_of_many_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXTENTS_PER_STEP", 10)
    seen: list[int] = []

    async def carried_out(node: Node, order: pb.NodeOrder) -> int:
        """Returns how often others had their turn before the order was carried out."""
        seen.clear()
        done = asyncio.create_task(node.apply(order))
        while not done.done():
            await asyncio.sleep(0)
            seen.append(node.usage().sealed)
        await done
        return len(seen)

    async def main(node: Node, rows: bytes) -> None:
        bytes_sealed = ROWS * EXTENT_ALIGN
        synced = pb.NodeOrder(sequence=7, sync=pb.NodeSync(extents=rows))
        assert await carried_out(node, synced) > ROWS / 10
        assert any(0 < sealed < bytes_sealed for sealed in seen)
        assert node.usage().sealed == bytes_sealed
        assert await carried_out(node, synced) > ROWS / 10  # the link broke, no more
        assert set(seen) == {bytes_sealed}  # nothing was freed in between
        freed = pb.NodeOrder(sequence=8, freed=pb.ExtentsFreed(extents=rows))
        assert await carried_out(node, freed) >= ROWS / 10
        assert node.usage().sealed == 0
        assert node.arena.controller_sequence == 8
        few = pb.NodeOrder(sequence=9, sealed=pb.ExtentsSealed(extents=rows[: 10 * 32]))
        assert await carried_out(node, few) == 1  # others lose nothing by it
        assert node.usage().sealed == 10 * EXTENT_ALIGN
        assert await carried_out(node, pb.NodeOrder(sequence=10, sync=pb.NodeSync(extents=rows[:32]))) > 1
        assert node.usage().sealed == EXTENT_ALIGN

    with open_arena(tmp_path / "a", node="n", file_bytes=8 * MIB, segment_bytes=4 * MIB) as arena:
        extents = np.full((ROWS, 4), (0, 200, 3, 1), dtype=np.uint64)
        extents[:, 0] = arena.header.data_offset + EXTENT_ALIGN * np.arange(ROWS)
        asyncio.run(main(Node(arena), pack_array(extents, U64)))
