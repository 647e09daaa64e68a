"""What a link sends, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from tqclient.errors import Unavailable
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller import links
from tqserver.controller.links import _Link

FIRST, SECOND = np.array([[0, 64, 1, 7]], np.uint64), np.array([[64, 64, 2, 7]], np.uint64)


def extents(*rows: np.ndarray) -> bytes:
    return pack_array(np.concatenate(rows), U64)


async def upcoming(orders: AsyncIterator[pb.NodeOrder]) -> pb.NodeOrder:
    return await asyncio.wait_for(anext(orders), 5)


def test_orders_about_extents_wait_for_one_another() -> None:
    async def scenario() -> None:
        link = _Link("node", 1)
        orders = link.orders()
        link.push(1, "sealed", FIRST)
        asked = asyncio.ensure_future(upcoming(orders))
        await asyncio.sleep(0)
        link.push(2, "sealed", SECOND)
        order = await asked
        assert (order.sequence, order.sealed.extents) == (2, extents(FIRST, SECOND))
        link.push(3, "freed", FIRST)
        order = await upcoming(orders)
        assert (order.sequence, order.freed.extents) == (3, extents(FIRST))

    asyncio.run(scenario())


def test_an_order_about_a_session_waits_for_nothing_and_stays_behind_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "GATHER_S", 3600.0)

    async def scenario() -> None:
        link = _Link("node", 1)
        orders = link.orders()
        link.push(1, "sealed", FIRST)
        link.push(2, "ended", np.array([9], np.uint64))
        assert (await upcoming(orders)).sealed.extents == extents(FIRST)
        assert (await upcoming(orders)).sessions.ended == pack_array(np.array([9], np.uint64), U64)
        link.push(3, "sealed", SECOND)
        link.close(Unavailable("over"))
        with pytest.raises(Unavailable, match="over"):
            await upcoming(orders)

    asyncio.run(scenario())
