"""The node link: one stream to the controller, opened again for as long as the node lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

import grpc

from tqclient.errors import TQError, Unavailable
from tqclient.limits import BACKOFF_FIRST, MESSAGE_BYTES_MAX
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import controller_pb2_grpc
from tqserver import limits, logs
from tqserver.storage.node import Node

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # a NodeSync is as long as the arena has extents
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

_log = logs.get("storage.link")


class Link:
    """Keeps the node attached to its controller.

    Args:
        node: carries out the orders.
        address: of this node's Storage service, as clients reach it.
        controller: host:port.
        open_channel: makes a channel to the controller, with CHANNEL_OPTIONS.
        metadata: sent with the call: the token.
    """

    def __init__(
        self,
        node: Node,
        *,
        address: str,
        controller: str,
        open_channel: Callable[[], grpc.aio.Channel],
        metadata: Callable[[], tuple[tuple[str, str], ...]] = tuple,
    ) -> None:
        self._node = node
        self._address = address
        self._controller = controller
        self._open_channel = open_channel
        self._metadata = metadata
        self._complaint = ""
        self._call: Any = None

    async def run(self) -> None:
        """Keeps attaching and reporting until it is cancelled."""
        await asyncio.gather(self._attach_forever(), self._report_forever())

    async def _attach_forever(self) -> None:
        """Attaches, and attaches again after every break, with back-off and jitter."""
        pause = BACKOFF_FIRST
        while True:
            why: Exception
            try:
                await self._attach_once()
                why = Unavailable("the controller closed the link")
            except grpc.aio.AioRpcError as error:
                why = from_rpc_error(error, peer=f"controller {self._controller}")
            except (
                TQError,
                OSError,
            ) as error:  # an order that does not parse; a token or certificate that is not there
                why = error
            was_attached = self._node.attached
            self._node.detached()
            if was_attached:
                pause = BACKOFF_FIRST
            if was_attached or str(why) != self._complaint:  # said once, not twice a second
                self._complaint = str(why)
                _log.warning("not attached; trying on", controller=self._controller, reason=self._complaint)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, limits.LINK_BACKOFF_MAX)

    async def _attach_once(self) -> None:
        async with self._open_channel() as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
            call = stub.Attach(metadata=self._metadata())
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already: reading says why
                await call.write(pb.NodeReport(hello=self._hello()))
                await call.write(pb.NodeReport(usage=self._usage()))
            self._call = call
            try:
                while (order := await call.read()) is not grpc.aio.EOF:
                    await self._node.apply(order)
                    if order.HasField("sync"):
                        self._complaint = ""
                        _log.info("attached", controller=self._controller, sequence=order.sequence)
                status = await call.code()
                if status is not grpc.StatusCode.OK:
                    raise grpc.aio.AioRpcError(
                        status, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                    )
            finally:
                self._call = None
                call.cancel()

    def _hello(self) -> pb.NodeHello:
        header = self._node.arena.header
        return pb.NodeHello(
            node=pb.Node(
                name=header.node,
                address=self._address,
                arena=header.arena,
                incarnation=self._node.incarnation,
                capacity_bytes=self._node.capacity_bytes,
            ),
            seen_sequence=self._node.arena.controller_sequence,
        )

    def _usage(self) -> pb.NodeUsage:
        usage = self._node.usage()
        return pb.NodeUsage(used_bytes=usage.used, capacity_bytes=usage.capacity)

    async def _report_forever(self) -> None:
        """Looks after the writers, attached or not, and tells the controller of those that are gone and of usage."""
        told_call, told_usage, told_at = None, pb.NodeUsage(), 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.WRITER_POLL)
            reports = []
            for session in self._node.look_at_writers():
                _log.info("writer is gone", session=session)
                reports.append(pb.NodeReport(writer_gone=pb.WriterGone(session=session)))
            usage, call = self._usage(), self._call
            if call is None or not self._node.attached:
                continue
            changed = call is not told_call or usage != told_usage
            if changed and loop.time() >= told_at + limits.USAGE_INTERVAL:
                reports.append(pb.NodeReport(usage=usage))
                told_call, told_usage, told_at = call, usage, loop.time()
            try:
                for report in reports:
                    await call.write(report)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                told_call = None  # the link broke; whoever reads from it says why, and the next one is told again
