"""Claims and commits under way: each waits for its turn, is journaled, and is answered, whoever is still listening.

Callers that repeat a request while it is under way share its answer. When the last of them is gone, a call that waits
is withdrawn. One that is on its way to the journal cannot be: a claim granted to nobody is then kept for one lease, so
that a retry of the request finds it, and is ended after that, or as soon as its client settles the request unseen.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tqclient.errors import BackpressureTimeout, ClaimTimeout, TQError
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver import logs
from tqserver.controller.core import Outcome
from tqserver.controller.core.dedup import Settled, check_kind
from tqserver.controller.lines import Waiter
from tqserver.controller.pipeline import Pipeline
from tqserver.controller.waiters import Waiters

DEADLINE_MARGIN_S: Final = 0.02
"""A call is answered this long before its gRPC deadline, so that its caller hears why."""

_log = logs.get("controller.calls")

RequestKey = tuple[bytes, int]
"""(client_id, request)."""
SendPreview = Callable[[bytes], None]
"""Sends a message ahead of a reply."""


GIVEN_UP_SECONDS: Final = 600.0
"""So long a request that its client has given up on may be on its way, and is refused when it comes."""


def _key(mutation: common_pb2.Mutation) -> RequestKey:
    return mutation.client_id, mutation.request


def _given_up(request: Any) -> TQError:
    kind = ClaimTimeout if isinstance(request, pb.ClaimRequest) else BackpressureTimeout
    return kind("the client gave up on this request before its turn came")


class _Call:
    def __init__(self, calls: Calls, command: journal_pb2.Command, request: Any, seconds: float) -> None:
        self._calls = calls
        self._command = command
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._waiter = Waiter(request, self._grant, self._refuse)
        self.key: RequestKey = _key(request.mutation)
        self.kind = command.WhichOneof("body") or ""
        self.callers: dict[asyncio.Future[Any], None] = {}
        self.given_up = False
        self.reply: Any = None

    def preview_to(self, send: SendPreview | None) -> None:
        """A caller joined, who is sent previews if that can be and was asked for; whoever came before may be gone."""
        request = self._waiter.request
        if send is not None and isinstance(request, pb.ClaimRequest) and request.preview:
            self._waiter.preview = partial(self._preview, send)

    def _preview(self, send: SendPreview, coming: pb.CommitRequest | None) -> None:
        """Tells a claim that was granted of the block that it will find, if that is all of one block and no more."""
        block = None
        if coming is None:
            try:
                block = self._calls.pipeline.core.foretell(self._waiter.request)
            except TQError:
                pass  # the reply will tell
            except Exception:
                _log.exception("a claim that was granted is not foretold")
        elif len(coming.blocks) == 1 and not coming.ids and not coming.skip:
            block = coming.blocks[0]
        if block is not None:
            send(pb.Preview(block=block).SerializeToString())

    def wait(self) -> None:
        self._calls.waiters.wait(self._waiter, self._deadline - self._loop.time())

    def _grant(self) -> None:
        try:
            self._calls.pipeline.core.choose(self._command)
            self._calls.pipeline.submit(self._command, self._applied)
        except Exception as error:
            self._calls.waiters.settled(self._waiter)
            self._refuse(self._waiter.refusal(error))
            return
        if isinstance(self._waiter.request, pb.CommitRequest):
            self._calls.waiters.coming(self._waiter.request)

    def _refuse(self, error: TQError) -> None:
        self._calls.under_way.pop(self.key, None)
        for caller in self._listening():
            caller.set_exception(error)

    def _applied(self, outcome: Outcome) -> None:
        self._calls.waiters.settled(self._waiter)
        if outcome.reply is not None:
            self._calls.under_way.pop(self.key, None)
            self.reply = outcome.reply
            for number, caller in enumerate(self._listening()):
                caller.set_result(copy.deepcopy(self.reply) if number else self.reply)  # each may fill in its own
            if not self.callers:
                self._orphan()
        elif isinstance(outcome.error, ClaimTimeout | BackpressureTimeout) and self.callers and not self.given_up:
            self.wait()  # between the look and the record, something else changed: back to its place
        elif outcome.error is not None:
            self._refuse(outcome.error)

    def _listening(self) -> list[asyncio.Future[Any]]:
        return [caller for caller in self.callers if not caller.done()]  # one may be cancelled and not know it yet

    def _orphan(self) -> None:
        if isinstance(self.reply, pb.ClaimReply):
            self._calls.orphan(self.key, self.reply)

    def give_up(self) -> None:
        """The client wants it no more; but what is on its way to the journal can't be called back."""
        self.given_up = True
        if self._calls.waiters.withdraw(self._waiter):
            self._refuse(_given_up(self._waiter.request))

    def abandon(self) -> None:
        if self._calls.waiters.withdraw(self._waiter):
            self._calls.under_way.pop(self.key, None)
        else:
            self._orphan()  # if it was answered already; what is still on its way is looked at when it is applied


class Calls:
    """All claims and commits under way.

    Args:
        pipeline: that journals and applies them.
        waiters: the lines that they stand in.
        clock: that of the leases.
    """

    def __init__(self, pipeline: Pipeline, waiters: Waiters, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pipeline = pipeline
        self.waiters = waiters
        self.under_way: dict[RequestKey, _Call] = {}
        self._orphans: dict[bytes, dict[int, tuple[int, asyncio.TimerHandle]]] = {}
        self._given_up: set[RequestKey] = set()

    async def result(
        self, command: journal_pb2.Command, request: Any, seconds: float, preview: SendPreview | None = None
    ) -> Any:
        """Waits for a claim's or commit's turn and for its reply.

        Args:
            command: the request, as it will be journaled.
            request: a ClaimRequest, CommitRequest or AcquirePermitRequest; `check_kind` let it pass.
            seconds: how long it may wait for its turn.
            preview: sends a `Preview` to the caller of a claim that takes one; None: there is no way to.

        Raises:
            ClaimTimeout, BackpressureTimeout: its turn did not come.
            TQError: whatever applying it came to.
        """
        key = _key(request.mutation)
        if key in self._given_up:  # it was overtaken on its way
            raise _given_up(request)
        call = self.under_way.get(key)
        if call is not None:
            call.preview_to(preview)
            return await self._join(call)
        call = self.under_way[key] = _Call(self, command, request, seconds)
        call.preview_to(preview)
        return await self._join(call, call.wait)

    async def abandoned(self, request: pb.ClaimRequest | pb.CommitRequest) -> Any:
        """Ends a claim or commit that its client has given up on.

        Returns:
            The reply, when it was on its way to the journal already.

        Raises:
            ClaimTimeout, BackpressureTimeout: it was not granted or applied, and will not be.
        """
        key = _key(request.mutation)
        self._given_up.add(key)
        asyncio.get_running_loop().call_later(GIVEN_UP_SECONDS, self._given_up.discard, key)
        call = self.under_way.get(key)
        if call is None:
            raise _given_up(request)
        return await self._join(call, call.give_up)

    def check_kind(self, mutation: common_pb2.Mutation, kind: str) -> None:
        """Raises InvalidArgument when a request is under way as another kind of command than it is repeated as."""
        call = self.under_way.get(_key(mutation))
        if call is not None:
            check_kind(mutation.request, call.kind, kind)

    async def _join(self, call: _Call, begin: Callable[[], None] = lambda: None) -> Any:
        caller = asyncio.get_running_loop().create_future()
        call.callers[caller] = None
        begin()
        try:
            return await caller
        except asyncio.CancelledError:
            del call.callers[caller]
            if not call.callers:
                call.abandon()
            raise

    def orphan(self, key: RequestKey, reply: pb.ClaimReply) -> None:
        """Keeps a claim that was granted to nobody for one lease."""
        self._keep_orphan(key, reply.claim_id, self._clock() + reply.lease_ms / 1000)

    def _keep_orphan(self, key: RequestKey, claim_id: int, until: float) -> None:
        """Ends an orphan when the clock of the leases says so, which a stop of this process stops as well."""
        client_id, request = key
        seconds = until - self._clock()
        if seconds > 0:
            timer = asyncio.get_running_loop().call_later(seconds, self._keep_orphan, key, claim_id, until)
            self._orphans.setdefault(client_id, {})[request] = (claim_id, timer)
        else:
            self._end_orphan(client_id, request)

    def seen(self, mutation: common_pb2.Mutation) -> None:
        """A client asks: for an orphan (it is one no longer), or for something after giving up on one."""
        orphans = self._orphans.get(mutation.client_id)
        if orphans is None:
            return
        if mutation.request in orphans:
            orphans.pop(mutation.request)[1].cancel()
        settled = Settled.of(mutation)
        for request in [request for request in orphans if request in settled]:
            orphans[request][1].cancel()
            self._end_orphan(mutation.client_id, request)
        if not orphans:
            self._orphans.pop(mutation.client_id, None)

    def _end_orphan(self, client_id: bytes, request: int) -> None:
        orphans = self._orphans[client_id]
        claim_id, _ = orphans.pop(request)
        if not orphans:
            del self._orphans[client_id]
        command = journal_pb2.Command(expire_claim=journal_pb2.ExpireClaim(claim_id=claim_id))

        def ended(outcome: Outcome) -> None:
            if outcome.error is not None:
                _log.warning("a claim that nobody took stays until its session ends", error=str(outcome.error))

        try:
            self.pipeline.submit(command, ended)
        except TQError as error:
            ended(Outcome(None, error, ()))
