"""The Controller service: every RPC of `controller.proto`, over the pipeline and the core."""

# The methods carry the names and the specification of controller.proto.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from tqclient import limits
from tqclient.errors import LeaseExpired, Unavailable
from tqclient.wire.v1 import common_pb2, controller_pb2_grpc, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.calls import DEADLINE_MARGIN_S, Calls
from tqserver.controller.core import Core, Effect, PartitionGone, ReadinessChanged, RoomChanged, SessionEnded, validate
from tqserver.controller.core.effects import Changed
from tqserver.controller.directories import Directories
from tqserver.controller.journal import Journal
from tqserver.controller.links import Links
from tqserver.controller.pipeline import Pipeline
from tqserver.controller.waiters import Waiters
from tqserver.controller.watches import Watches

SERVICE_NAME = "tq.v1.Controller"
LISTING_SLICE_S: Final = 0.0005
"""How long partitions are described at one time: a call of others takes several turns of the event loop."""


class ControllerService(controller_pb2_grpc.ControllerServicer):
    """Answers the RPCs, and owns everything behind them.

    Args:
        core: as `pipeline.recover` returned it.
        journal: handed over.
        clock: monotonic seconds.
        lost_data: called when a storage node has seen more than this controller knows.
        accept_data_loss: let such a node in all the same.
        snapshot_records, replay_budget, replayed: see `Pipeline`.
    """

    def __init__(
        self,
        core: Core,
        journal: Journal,
        *,
        clock: Callable[[], float],
        lost_data: Callable[[], None],
        accept_data_loss: bool,
        snapshot_records: int,
        replay_budget: float,
        replayed: float,
    ) -> None:
        self._core = core
        self._clock = clock
        loop = asyncio.get_running_loop()
        self._waiters = Waiters(core, lambda seconds, callback: loop.call_later(seconds, callback).cancel)
        self._directories = Directories(core)
        self._watches = Watches(core)
        self._pipeline = Pipeline(
            core,
            journal,
            clock=clock,
            effect=self._effect,
            settled=self._waiters.serve,
            snapshot_records=snapshot_records,
            replay_budget=replay_budget,
            replayed=replayed,
        )
        self._calls = Calls(self._pipeline, self._waiters, clock)
        self._links = Links(self._pipeline, lost_data, clock=clock, accept_data_loss=accept_data_loss)
        self._closing = False

    async def start(self) -> None:
        """Counts this start in the journal; every lease begins anew.

        Raises:
            StorageFull: the journal has no room for it.
        """
        outcome = await self._pipeline.execute(journal_pb2.Command(start=journal_pb2.Start()))
        if outcome.error is not None:
            raise outcome.error

    def release(self) -> None:
        """Ends what would wait for long: blocked calls and links. Their callers are told to come back."""
        self._closing = True
        self._waiters.close(Unavailable("the controller is shutting down"))
        self._watches.close(Unavailable("the controller is shutting down"))
        self._links.close()

    def close(self) -> None:
        """Makes durable what is under way and closes the journal; blocks."""
        self._pipeline.close()

    def _effect(self, effect: Effect) -> None:
        if isinstance(effect, ReadinessChanged):
            self._waiters.readiness_changed(effect.partition_id, by_count=effect.by_count)
        elif isinstance(effect, RoomChanged):
            self._waiters.room_changed(effect.partition_id)
        elif isinstance(effect, Changed):
            self._watches.wake(effect.partition_id)
        elif isinstance(effect, PartitionGone):
            self._waiters.gone(effect.partition_id, effect.name)
            self._watches.wake(effect.partition_id)
        else:
            self._links.effect(effect)
            if isinstance(effect, SessionEnded):
                self._waiters.session_ended()
                self._directories.session_ended(effect.session)

    # Mutations.

    def _checked(self, kind: str, request: Any) -> journal_pb2.Command:
        command = journal_pb2.Command(**{kind: request})
        self._core.check(command)
        return command

    def _recorded(self, kind: str, mutation: common_pb2.Mutation) -> Any:
        """Returns the reply of a request that was applied before, if it was; refuses one that was of another kind."""
        recorded = self._core.recorded(mutation, kind)
        self._calls.check_kind(mutation, kind)
        self._calls.seen(mutation)  # not before: one that is refused here takes over nothing
        return recorded

    async def _mutate(self, kind: str, request: Any) -> Any:
        command = self._checked(kind, request)
        if isinstance(request, pb.ClearRequest):
            await self._looked(request)
        recorded = self._recorded(kind, request.mutation)
        if recorded is not None:
            return recorded
        outcome = await self._pipeline.execute(command)
        if outcome.error is not None:
            raise outcome.error
        return outcome.reply

    async def _looked(self, request: pb.ClaimRequest | pb.ClearRequest) -> None:
        """Has the first look that a request needs taken, while others go on."""
        for _ in self._core.first_look(request):
            await asyncio.sleep(0)

    async def _wait(self, kind: str, request: Any, context: Any) -> Any:
        if isinstance(request, pb.ClaimRequest | pb.CommitRequest) and request.abandoned:
            return await self._abandoned(kind, request)
        command = self._checked(kind, request)
        if isinstance(request, pb.ClaimRequest):
            await self._looked(request)
        recorded = self._recorded(kind, request.mutation)
        if recorded is not None:
            return recorded
        if self._closing:
            raise Unavailable("the controller is shutting down")
        if isinstance(request, pb.CommitRequest):
            self._links.check_reachable(request)
        seconds = min(request.wait_ms, limits.WAIT_MAX_MS) / 1000
        remaining = context.time_remaining()
        if remaining is not None:
            seconds = min(seconds, remaining - DEADLINE_MARGIN_S)
        return await self._calls.result(command, request, seconds, getattr(context, "preview", None))

    async def _abandoned(self, kind: str, request: pb.ClaimRequest | pb.CommitRequest) -> Any:
        validate.mutation(request.mutation)  # nothing else of it is read
        recorded = self._recorded(kind, request.mutation)
        if recorded is not None:
            return recorded
        if self._closing:
            raise Unavailable("the controller is shutting down")
        return await self._calls.abandoned(request)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionReply:
        reply: pb.OpenSessionReply = await self._mutate("open_session", request)
        self._links.fill_in(reply.nodes)
        return reply

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> Any:
        return await self._mutate("close_session", request)

    async def CreatePartition(self, request: pb.CreatePartitionRequest, context: Any) -> Any:
        return await self._mutate("create_partition", request)

    async def SealPartition(self, request: pb.SealPartitionRequest, context: Any) -> Any:
        return await self._mutate("seal_partition", request)

    async def DeletePartition(self, request: pb.DeletePartitionRequest, context: Any) -> Any:
        return await self._mutate("delete_partition", request)

    async def SetMetadata(self, request: pb.SetMetadataRequest, context: Any) -> Any:
        return await self._mutate("set_metadata", request)

    async def SetVersion(self, request: pb.SetVersionRequest, context: Any) -> Any:
        return await self._mutate("set_version", request)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> Any:
        return await self._wait("commit", request, context)

    async def AcquirePermit(self, request: pb.AcquirePermitRequest, context: Any) -> Any:
        return await self._wait("acquire_permit", request, context)

    async def ReturnPermit(self, request: pb.ReturnPermitRequest, context: Any) -> Any:
        return await self._mutate("return_permit", request)

    async def RegisterProducer(self, request: pb.RegisterProducerRequest, context: Any) -> Any:
        return await self._mutate("register_producer", request)

    async def UnregisterProducer(self, request: pb.UnregisterProducerRequest, context: Any) -> Any:
        return await self._mutate("unregister_producer", request)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> Any:
        return await self._mutate("clear", request)

    async def SetTags(self, request: pb.SetTagsRequest, context: Any) -> Any:
        return await self._mutate("set_tags", request)

    async def Claim(self, request: pb.ClaimRequest, context: Any) -> pb.ClaimReply:
        reply: pb.ClaimReply = await self._wait("claim", request, context)
        self._directories.fill_in(request.mutation.session, reply.rows)
        if reply.ByteSize() > limits.MESSAGE_BYTES_MAX:  # it will be refused: nobody will hold this claim
            self._calls.orphan((request.mutation.client_id, request.mutation.request), reply)
        return reply

    async def RegisterRank(self, request: pb.RegisterRankRequest, context: Any) -> Any:
        return await self._mutate("register_rank", request)

    async def Settle(self, request: pb.SettleRequest, context: Any) -> Any:
        return await self._mutate("settle", request)

    async def ResetConsumer(self, request: pb.ResetConsumerRequest, context: Any) -> Any:
        return await self._mutate("reset_consumer", request)

    async def Requeue(self, request: pb.RequeueRequest, context: Any) -> Any:
        return await self._mutate("requeue", request)

    # Leases.

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        pins = validate.dropped_pins(request.dropped_pins)
        self._core.hold_pins(request.session, request.held_pins)
        lease_ms, effects = self._core.heartbeat(request.session, pins, self._clock())
        self._pipeline.dispatch(effects)
        return pb.HeartbeatReply(
            epoch=self._core.epoch, lease_ms=lease_ms, topology_version=self._links.topology_version
        )

    async def RenewClaim(self, request: pb.RenewClaimRequest, context: Any) -> pb.RenewClaimReply:
        return pb.RenewClaimReply(lease_ms=self._core.renew_claim(request.session, request.claim_id, self._clock()))

    # Reads.

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateReply:
        now = self._clock()
        pins = validate.dropped_pins(request.dropped_pins)
        # A repeat takes the pin of the try before it, whose reply nobody got.
        self._pipeline.dispatch(self._core.drop_pins(request.session, [*pins, request.pin], now))
        reply = self._core.locate(request, now)
        self._directories.fill_in(request.session, reply.rows)
        return reply

    async def GetDirectories(self, request: pb.GetDirectoriesRequest, context: Any) -> pb.GetDirectoriesReply:
        return pb.GetDirectoriesReply(directories=self._directories.get(request.session, request.block_ids))

    async def DescribePartition(self, request: pb.DescribePartitionRequest, context: Any) -> pb.PartitionReply:
        return pb.PartitionReply(partition=self._core.describe_partition(request.partition_id, request.name))

    async def ListPartitions(self, request: pb.ListPartitionsRequest, context: Any) -> pb.ListPartitionsReply:
        reply = pb.ListPartitionsReply()
        until = time.perf_counter() + LISTING_SLICE_S
        for partition in self._core.list_partitions(request.prefix):
            reply.partitions.append(partition)
            if time.perf_counter() >= until:  # there may be thousands: others go on in between
                await asyncio.sleep(0)
                until = time.perf_counter() + LISTING_SLICE_S
        return reply

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Change]:
        if not self._core.is_live(request.session):
            raise LeaseExpired(f"session {request.session} has ended: open another one")
        if self._closing:
            raise Unavailable("the controller is shutting down")
        async for change in self._watches.watch(request.partition_id, request.from_sequence):
            yield change

    async def ListDead(self, request: pb.ListDeadRequest, context: Any) -> pb.ListDeadReply:
        return self._core.list_dead(request.partition_id, request.consumer)

    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Any) -> pb.DescribeClusterReply:
        reply = self._core.describe()
        self._links.fill_in(reply.nodes)
        reply.topology_version = self._links.topology_version
        reply.waiting_claims = self._waiters.claims
        return reply

    async def Attach(self, request_iterator: AsyncIterator[pb.NodeReport], context: Any) -> AsyncIterator[pb.NodeOrder]:
        async for order in self._links.attach(request_iterator):
            yield order
