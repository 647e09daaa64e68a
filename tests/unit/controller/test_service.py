"""What the shell keeps beside the core: repeats and their orphans, directories sent, links that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.model.driver import ARENA, NODE, Driver, client_id
from tqclient.errors import DuplicateKey, InternalError, InvalidArgument
from tqclient.wire.packing import I64, pack_array, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller import service
from tqserver.controller.core import Outcome, samplers, tags
from tqserver.controller.core import limits as core_limits
from tqserver.controller.core.samplers import Custom, SampleRequest
from tqserver.controller.core.view import View
from tqserver.controller.directories import Directories
from tqserver.controller.journal import SqliteJournal
from tqserver.controller.links import Links
from tqserver.controller.service import ControllerService


class Context:
    """A call without a deadline."""

    def time_remaining(self) -> float | None:
        return None


class Lane(Context):
    """A call by a way that carries previews."""

    def __init__(self) -> None:
        self.previews: list[pb.Preview] = []

    def preview(self, body: bytes) -> None:
        self.previews.append(pb.Preview.FromString(body))


class Bench:
    """A service over a core that holds one partition with one sample."""

    def __init__(self, directory: Path) -> None:
        self.driver = Driver()
        self.session = self.driver.open()
        self.part = self.driver.partition(self.session, lease_ms=60_000)
        self.driver.put(self.session, self.part, 1)
        self.requests = 1_000
        self.service = ControllerService(
            self.driver.core,
            SqliteJournal(directory),
            clock=lambda: self.driver.now,
            lost_data=lambda: None,
            accept_data_loss=False,
            snapshot_records=1_000,
            replay_budget=1_000.0,
            replayed=0.0,
        )

    def numbered(self, request: Any, *, settled_below: int = 0) -> Any:
        self.requests += 1
        request.mutation.client_id, request.mutation.request = client_id(1), self.requests
        request.mutation.session, request.mutation.settled_below = self.session, settled_below
        return request

    def claim(self, **options: Any) -> pb.ClaimRequest:
        return self.numbered(pb.ClaimRequest(partition_id=self.part, consumer="x", batch_size=1, **options))

    def commit(self, **options: Any) -> pb.CommitRequest:
        return self.numbered(self.driver.commit(self.part, 1, **options))

    async def set_version(self, version: int, *, settled_below: int = 0) -> None:
        request = pb.SetVersionRequest(partition_id=self.part, version=version)
        await self.service.SetVersion(self.numbered(request, settled_below=settled_below), Context())

    async def claim_and_leave(self) -> pb.ClaimRequest:
        """Claims, and goes away before the claim is journaled: nobody has it."""
        request = self.claim()
        call = asyncio.create_task(self.service.Claim(request, Context()))
        await asyncio.sleep(0)
        call.cancel()
        await self.set_version(1)  # journaled behind it
        assert call.cancelled()
        assert self.driver.counts(self.part) == (0, 0, 1, 0, 0)
        return request


def run(directory: Path, scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def within() -> None:
        bench = Bench(directory)
        try:
            await scenario(bench)
        finally:
            await asyncio.to_thread(bench.service.close)

    asyncio.run(within())


def test_others_go_on_while_partitions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LISTING_SLICE_S", 0.0)

    async def scenario(bench: Bench) -> None:
        names = [bench.driver.core.describe_partition(bench.part).name, *(f"q{number}" for number in range(5))]
        made = [bench.driver.partition(bench.session, name) for name in names[1:]]
        listing = asyncio.create_task(bench.service.ListPartitions(pb.ListPartitionsRequest(), Context()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not listing.done()
        deleted = pb.DeletePartitionRequest(partition_id=made.pop())
        await bench.service.DeletePartition(bench.numbered(deleted), Context())
        assert [each.name for each in (await listing).partitions] in (names, names[:-1])

    run(tmp_path, scenario)


def test_others_go_on_while_all_samples_are_first_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "CHUNK_ROWS", 1)

    async def scenario(bench: Bench) -> None:
        bench.driver.put(bench.session, bench.part, 3, tags=[{"prompt": 7}] * 3)
        request = bench.claim(where=msgpack.packb({"prompt": 7}))
        calls = [asyncio.create_task(bench.service.Claim(request, Context())) for _ in range(2)]
        await asyncio.sleep(0)
        assert not bench.service._calls.under_way
        first, second = await asyncio.gather(*calls)
        assert first.claim_id == second.claim_id
        assert bench.driver.counts(bench.part) == (0, 3, 1, 0, 0)

    run(tmp_path, scenario)


def test_a_claim_that_nobody_took_ends_when_its_client_settles_it_unseen(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        request = await bench.claim_and_leave()
        await bench.set_version(2, settled_below=request.mutation.request + 1)
        await bench.set_version(3)
        assert bench.driver.counts(bench.part) == (0, 1, 0, 0, 0)

    run(tmp_path, scenario)


def test_a_repeat_that_takes_a_claim_keeps_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        request = await bench.claim_and_leave()
        assert (await bench.service.Claim(request, Context())).claim_id == 1
        await bench.set_version(2, settled_below=request.mutation.request + 1)
        await bench.set_version(3)
        assert bench.driver.counts(bench.part) == (0, 0, 1, 0, 0)

    run(tmp_path, scenario)


def test_a_repeat_that_is_refused_takes_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        request = await bench.claim_and_leave()
        with monkeypatch.context() as patched:
            patched.setattr(core_limits, "REPLY_BYTES_PER_CLIENT_MAX", 1)
            await bench.set_version(2)
        with pytest.raises(InvalidArgument, match="was forgotten"):
            await bench.service.Claim(request, Context())
        await bench.set_version(3, settled_below=request.mutation.request + 1)
        await bench.set_version(4)
        assert bench.driver.counts(bench.part) == (0, 1, 0, 0, 0)  # nobody has the claim, so it ended

    run(tmp_path, scenario)


def test_a_request_that_is_repeated_as_another_command_is_refused(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.claim()
        claim = await bench.service.Claim(request, Context())
        settle = pb.SettleRequest(mutation=request.mutation, claim_id=claim.claim_id, verdict=pb.VERDICT_ACK)
        with pytest.raises(InvalidArgument, match="was a claim, and is now repeated as a settle"):
            await bench.service.Settle(settle, Context())
        assert bench.driver.counts(bench.part) == (0, 0, 1, 0, 0)

    run(tmp_path, scenario)


def test_a_request_that_is_under_way_and_repeated_as_another_command_is_refused(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.service.Claim(bench.claim(), Context())
        request = bench.claim(wait_ms=10_000)
        waiting = asyncio.create_task(bench.service.Claim(request, Context()))
        await asyncio.sleep(0)
        commit = bench.commit()
        permit = pb.AcquirePermitRequest(partition_id=bench.part, samples=1)
        settle = pb.SettleRequest(claim_id=1, verdict=pb.VERDICT_ACK)
        for kind, other, call in (
            ("commit", commit, bench.service.Commit),
            ("acquire_permit", permit, bench.service.AcquirePermit),
            ("settle", settle, bench.service.Settle),
        ):
            other.mutation.CopyFrom(request.mutation)
            with pytest.raises(InvalidArgument, match=f"was a claim, and is now repeated as a {kind}"):
                await call(other, Context())
        await bench.service.Commit(bench.numbered(commit), Context())
        assert (await waiting).claim_id == 2
        assert bench.driver.counts(bench.part) == (0, 0, 2, 0, 0)

    run(tmp_path, scenario)


def test_a_put_that_is_under_way_is_not_given_up_as_a_claim(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        limited = bench.driver.partition(bench.session, "limited", capacity_samples=1)
        full = bench.driver.put(bench.session, limited, 1)
        put = bench.numbered(bench.driver.commit(limited, 1))
        put.wait_ms = 10_000
        waiting = asyncio.create_task(bench.service.Commit(put, Context()))
        await asyncio.sleep(0)
        abandoned = bench.claim(abandoned=True)
        abandoned.mutation.CopyFrom(put.mutation)
        with pytest.raises(InvalidArgument, match="was a commit, and is now repeated as a claim"):
            await bench.service.Claim(abandoned, Context())
        clear = pb.ClearRequest(partition_id=limited, ids=pack_array(full, I64))
        await bench.service.Clear(bench.numbered(clear), Context())
        await waiting

    run(tmp_path, scenario)


class Picks:
    """A user's sampler: one answer after the other, and the last one again and again."""

    def __init__(self, *answers: Callable[[View], Any]) -> None:
        self._answers = iter(answers)
        self._answer = answers[-1]

    def sample(self, view: View, request: SampleRequest) -> Any:
        return next(self._answers, self._answer)(view)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *answers: monkeypatch.setitem(samplers.SAMPLERS, "mine", Custom("mine", Picks(*answers)))


def test_claims_that_wait_for_a_choice_of_a_user_s_sampler_are_given_one(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install(lambda view: view.last(1))

    async def scenario(bench: Bench) -> None:
        await bench.service.Claim(bench.claim(), Context())
        mine = [bench.claim(wait_ms=10_000, sampler=pb.Sampler(name="mine")) for _ in range(3)]
        waiting = [asyncio.create_task(bench.service.Claim(request, Context())) for request in mine]
        await asyncio.sleep(0)
        for _ in range(3):
            await bench.service.Commit(bench.commit(), Context())
        replies = await asyncio.gather(*waiting)
        assert sorted(unpack_array(reply.rows.ids, I64, what="ids").item() for reply in replies) == [2, 3, 4]

    run(tmp_path, scenario)


def test_a_claim_whose_sampler_thinks_again_keeps_its_place(tmp_path: Path, install: Callable[..., None]) -> None:
    def both(view: View) -> Any:
        return view.first(2)

    def one(view: View) -> Any:
        return view.first(1)

    install(both, one, both)  # a row is 2 long: with the second one there are more than 3, and with the first one fewer

    async def scenario(bench: Bench) -> None:
        await bench.service.Commit(bench.commit(), Context())
        request = bench.claim(wait_ms=10_000, sampler=pb.Sampler(name="mine"), max_tokens=3, token_field="a")
        request.batch_size = 0
        reply = await bench.service.Claim(request, Context())
        assert unpack_array(reply.rows.ids, I64, what="ids").tolist() == [1]

    run(tmp_path, scenario)


@pytest.mark.parametrize("look", ["choose", "countable"])  # countable: before it can stand in line
def test_a_sampler_that_is_a_bug_fails_its_own_claim_alone_and_nothing_stays_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], look: str
) -> None:
    install(lambda view: view.last(1))

    def fails(*arguments: object) -> None:
        raise OverflowError("a bug")

    async def scenario(bench: Bench) -> None:
        request = bench.claim(wait_ms=10_000, sampler=pb.Sampler(name="mine"))
        with monkeypatch.context() as patched:
            patched.setattr(bench.driver.core, look, fails)
            with pytest.raises(InternalError, match="ClaimRequest to partition 1: OverflowError"):
                await bench.service.Claim(request, Context())
        assert (await bench.service.Claim(request, Context())).claim_id == 1
        await bench.service.Commit(bench.commit(), Context())
        assert (await bench.service.Claim(bench.claim(), Context())).claim_id == 2

    run(tmp_path, scenario)


def test_a_claim_that_cannot_be_foretold_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(request: pb.ClaimRequest) -> None:
        raise OverflowError("a bug")

    async def scenario(bench: Bench) -> None:
        monkeypatch.setattr(bench.driver.core, "foretell", fails)
        caller = Lane()
        assert (await bench.service.Claim(bench.claim(preview=True), caller)).claim_id == 1
        assert caller.previews == []

    run(tmp_path, scenario)


@pytest.mark.parametrize("bad", [False, True], ids=["whole", "a key exists"])
def test_a_claim_that_waits_is_journaled_with_the_put_that_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    groups: list[list[str | None]] = []
    append = SqliteJournal.append

    def seen(journal: SqliteJournal, records: Sequence[bytes]) -> int:
        groups.append([journal_pb2.Command.FromString(record).WhichOneof("body") for record in records])
        return append(journal, records)

    monkeypatch.setattr(SqliteJournal, "append", seen)

    async def scenario(bench: Bench) -> None:
        bench.driver.put(bench.session, bench.part, 1, keys=["known"])
        await bench.service.Claim(bench.claim(), Context())
        await bench.service.Claim(bench.claim(), Context())
        waiting = asyncio.create_task(bench.service.Claim(bench.claim(wait_ms=10_000), Context()))
        await asyncio.sleep(0)
        groups.clear()
        keys = ["known"] if bad else ["new"]
        put = asyncio.create_task(bench.service.Commit(bench.commit(keys=keys), Context()))
        if bad:
            with pytest.raises(DuplicateKey):
                await put
            assert not waiting.done()
            await bench.service.Commit(bench.commit(keys=["new"]), Context())
        else:
            await put
        claimed = await waiting
        assert unpack_array(claimed.rows.ids, I64, what="ids").tolist() == [3]
        assert groups == ([["commit", "claim"], ["commit"], ["claim"]] if bad else [["commit", "claim"]])

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("claim", "commit", "previewed"),
    [
        ({"preview": True}, {}, True),
        ({}, {}, False),  # its caller did not ask
        ({"preview": True}, {"keys": ["new"]}, True),
        ({"preview": True}, {"keys": ["known"], "skip": [1]}, False),  # nothing of the block may come of it
        ({"preview": True, "fields": ["b"]}, {"fields": ["b"], "ids": [1]}, False),  # other fields may lie elsewhere
    ],
)
def test_the_caller_of_a_claim_is_given_a_preview_of_the_put_that_meets_it(
    tmp_path: Path, claim: dict[str, Any], commit: dict[str, Any], previewed: bool
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.driver.put(bench.session, bench.part, 1, keys=["known"])
        for _ in range(2):
            await bench.service.Claim(bench.claim(), Context())
        request = bench.claim(wait_ms=10_000, **claim)
        gone, there, by_grpc = Lane(), Lane(), Context()
        waiting = [asyncio.create_task(bench.service.Claim(request, caller)) for caller in (gone, there, by_grpc)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        put = bench.commit(**commit)
        await bench.service.Commit(put, Context())
        assert (gone.previews, there.previews) == ([], [pb.Preview(block=put.blocks[0])] if previewed else [])
        waiting[1].cancel()
        waiting[2].cancel()
        await asyncio.wait(waiting)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("rows", "batch", "previewed"),
    [
        ([4], 4, True),
        ([4, 4], 4, True),
        ([4], 2, False),  # half of it
        ([2, 2], 4, False),  # two blocks
    ],
)
def test_the_caller_of_a_claim_is_given_a_preview_of_a_block_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int], batch: int, previewed: bool
) -> None:
    monkeypatch.setattr("tqserver.controller.core.limits.FORETOLD_BYTES_MIN", 1)

    async def scenario(bench: Bench) -> None:
        await bench.service.Claim(bench.claim(), Context())  # the one that is there
        puts = [bench.driver.commit(bench.part, count) for count in rows]
        for put in puts:
            bench.driver.ok("commit", put, session=bench.session)
        caller = Lane()
        request = bench.claim(preview=True)
        request.batch_size = batch
        reply = await bench.service.Claim(request, caller)
        assert len(unpack_array(reply.rows.ids, I64, what="ids")) == batch
        assert caller.previews == ([pb.Preview(block=puts[0].blocks[0])] if previewed else [])
        again = Lane()
        assert (await bench.service.Claim(request, again)).claim_id == reply.claim_id
        assert again.previews == []

    run(tmp_path, scenario)


def test_directories_are_sent_once_to_a_session_and_nothing_is_kept_of_one_that_has_ended() -> None:
    driver = Driver()
    session, other = driver.open(), driver.open(2)
    p = driver.partition(session)
    driver.put(session, p, 1)
    reply = driver.claim(session, p, 1)
    directories = Directories(driver.core)

    def sent(to: int) -> list[bytes]:
        again = pb.ClaimReply()
        again.CopyFrom(reply)
        directories.fill_in(to, again.rows)
        return [block.directory for block in again.rows.blocks]

    assert [sent(session), sent(session), sent(other)] == [[b"directory"], [b""], [b"directory"]]
    driver.ok("close_session", pb.CloseSessionRequest(), session=session)
    directories.session_ended(session)
    assert [sent(session), sent(session), sent(99)] == [[b"directory"]] * 3  # a recorded reply is repeated all the same
    assert list(directories._sent) == [other]


def test_directories_of_blocks_that_are_gone_are_forgotten() -> None:
    driver = Driver()
    session = driver.open()
    p = driver.partition(session, keep=True)
    directories = Directories(driver.core)
    kept = driver.put(session, p, 1)
    for _ in range(20):
        ids = driver.put(session, p, 1)
        reply = driver.claim(session, p, 1)
        directories.fill_in(session, reply.rows)
        driver.settle(session, reply.claim_id)
        gone = [each for each in ids if each not in kept]
        driver.ok("clear", pb.ClearRequest(partition_id=p, ids=pack_array(gone, I64)), session=session)
    assert len(directories._sent[session]) <= 2  # the one that is there, and the last


class LatePipeline:
    """Applies what is submitted at the loop's next turn, and cuts the caller off right then."""

    def __init__(self, driver: Driver) -> None:
        self.core = driver.core
        self.driver = driver
        self.caller: asyncio.Task[Any] | None = None

    def submit(self, command: journal_pb2.Command, done: Callable[[Outcome], None]) -> None:
        def apply() -> None:
            done(self.driver.journal(command))
            if self.caller is not None:
                self.caller.cancel()

        asyncio.get_running_loop().call_soon(apply)


@pytest.mark.parametrize("cut_off", [True, False])
def test_a_link_that_is_cut_off_while_it_opens_is_not_attached(cut_off: bool) -> None:
    async def reports() -> AsyncIterator[pb.NodeReport]:
        node = pb.Node(name=NODE, address="127.0.0.1:1", arena=ARENA)
        yield pb.NodeReport(hello=pb.NodeHello(node=node))
        await asyncio.Event().wait()

    async def scenario() -> None:
        pipeline = LatePipeline(Driver())
        links = Links(pipeline, lambda: None, clock=float, accept_data_loss=False)  # type: ignore[arg-type]
        orders = links.attach(reports())

        async def first() -> pb.NodeOrder:
            return await anext(orders)

        call = asyncio.create_task(first())
        pipeline.caller = call if cut_off else None
        node = pb.Node(name=NODE)
        if cut_off:
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert (await call).HasField("sync")
            links.fill_in([node])
            assert node.attached
            await orders.aclose()
        links.fill_in([node])
        assert not node.attached

    asyncio.run(scenario())
