"""The token and TLS, against a gRPC server in this process."""

from __future__ import annotations

import asyncio
import datetime
import gc
import ipaddress
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tqclient.channel import FORMER_SECONDS, TLS, Access, Channels
from tqclient.driver import run_async, run_sync
from tqclient.errors import InvalidArgument, Unavailable
from tqclient.operations.effects import CONTROLLER, Call, Deadline, Operation, call
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import controller_pb2_grpc, storage_pb2, storage_pb2_grpc


class Service(controller_pb2_grpc.ControllerServicer, storage_pb2_grpc.StorageServicer):
    """Notes what its callers show."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def _note(self, context: Any) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))

    def DescribeCluster(self, request: Any, context: Any) -> pb.DescribeClusterReply:  # noqa: N802
        self._note(context)
        return pb.DescribeClusterReply(epoch=5)

    def Read(self, request: Any, context: Any) -> Iterator[storage_pb2.ReadChunk]:  # noqa: N802
        self._note(context)
        yield storage_pb2.ReadChunk(data=b"bytes")

    def Write(self, request: Any, context: Any) -> storage_pb2.WriteReply:  # noqa: N802
        self._note(context)
        assert len(list(request)) == 2
        return storage_pb2.WriteReply()


def certificate(folder: Path) -> tuple[Path, Path]:
    """Makes a certificate for the loopback address that is its own root; returns it and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tq test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain_file, key_file = folder / "chain.pem", folder / "key.pem"
    chain_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain_file, key_file


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture(params=["plain", "tls"])
def access(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Access]:
    server = grpc.server(ThreadPoolExecutor(4))
    controller_pb2_grpc.add_ControllerServicer_to_server(service, server)
    storage_pb2_grpc.add_StorageServicer_to_server(service, server)
    tls = None
    if request.param == "tls":
        chain, key = certificate(tmp_path)
        # The server asks for the client's certificate, too; the same one serves.
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), chain.read_bytes())], chain.read_bytes(), require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
        tls = TLS(ca=chain, cert=chain, key=key)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Access(f"127.0.0.1:{port}", "secret", tls)
    server.stop(None).wait()


def describe() -> Operation[pb.DescribeClusterReply]:
    return (yield Call(CONTROLLER, "DescribeCluster", pb.DescribeClusterRequest(), 10.0))


def test_every_kind_of_call_carries_the_token(access: Access, service: Service) -> None:
    channels = Channels(access.address, access.channel)
    assert run_sync(describe(), channels).epoch == 5
    stub = channels.stub(access.address)
    assert [chunk.data for chunk in stub.Read(storage_pb2.ReadRequest(), timeout=10)] == [b"bytes"]
    stub.Write(iter([storage_pb2.WriteChunk()] * 2), timeout=10)
    assert service.tokens == ["Bearer secret"] * 3
    for channel in channels.take_all():
        channel.close()


def test_calls_of_an_asyncio_client_carry_the_token(access: Access, service: Service) -> None:
    async def main() -> None:
        channels = Channels(access.address, access.aio_channel)
        assert (await run_async(describe(), channels)).epoch == 5
        for channel in channels.take_all():
            await channel.close()

    asyncio.run(main())
    assert service.tokens == ["Bearer secret"]


def test_plain_text_does_not_reach_a_server_that_speaks_tls(access: Access, service: Service) -> None:
    other = Access(access.address, access.token, None if access.tls else TLS())
    channels = Channels(other.address, other.channel)
    why = "speak TLS, or want a certificate" if access.tls else "does not speak TLS"
    with pytest.raises(Unavailable, match=rf"\(whoever listens there .*{why}"):
        run_sync(describe(), channels)
    assert service.tokens == []
    for channel in channels.take_all():
        channel.close()


class Way:
    """A channel, or a lane."""

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        return None

    unary_stream = stream_unary = stream_stream = unary_unary


def test_ways_to_where_nodes_were_before_are_given_up() -> None:
    now = [0.0]
    opened: dict[str, list[Way]] = {"controller": [], "a": [], "b": []}

    def open_channel(address: str) -> Way:
        opened[address].append(Way())
        return opened[address][-1]

    lanes: dict[Any, Way] = {}

    def lane(channel: Any) -> Any:
        return lanes.setdefault(channel, Way())

    def former(*addresses: str) -> list[Any]:
        now[0] += FORMER_SECONDS
        return channels.take_former([pb.Node(address=address) for address in addresses])

    channels = Channels("controller", open_channel, lane=lane, clock=lambda: now[0])
    stubs = {target: channels.stub(target) for target in (CONTROLLER, "a", "b")}
    assert former("a", "b") == []
    assert former("a") == []  # calls to it may be under way
    now[0] += FORMER_SECONDS / 2
    assert channels.take_former([]) == []
    (channel,) = opened["b"]
    assert former("a") == [lanes[channel], channel]
    assert former("a") == former("a") == []
    assert channels.stub("a") is stubs["a"]
    assert channels.stub("b") is not stubs["b"]  # a node is there again
    assert former("a") == former("a", "b") == former("a") == []  # it was away in between
    assert [len(each) for each in opened.values()] == [1, 1, 2]
    (known,) = opened["a"]
    assert channels.take_all().count(known) == 1


class ClosesMeanwhile(Channels):
    """Another thread closes the client when a stub was taken and not yet called."""

    def stub(self, target: str) -> Any:
        stub = super().stub(target)
        self.taken = self.take_all()
        return stub


def test_a_call_whose_channel_is_closed_under_it_says_that_the_client_is_closed() -> None:
    call = Call(CONTROLLER, "DescribeCluster", pb.DescribeClusterRequest(), 5.0)

    def operation() -> Operation[Any]:
        return (yield call)

    access = Access("127.0.0.1:1", None, TLS())

    class Blocking(ClosesMeanwhile):
        def take_all(self) -> list[Any]:
            channels = super().take_all()
            for channel in channels:
                channel.close()
            return channels

    with pytest.raises(InvalidArgument, match=r"^this client is closed; call tq\.connect\(\) again$"):
        run_sync(operation(), Blocking(access.address, access.channel))

    async def close_under_it() -> None:
        channel = access.aio_channel("127.0.0.1:1")
        await channel.close()
        await run_async(operation(), ClosesMeanwhile(access.address, lambda _: channel))

    with pytest.raises(InvalidArgument, match=r"^this client is closed; call tq\.connect\(\) again$"):
        asyncio.run(close_under_it())


def serving(service: Service, folder: Path, address: str) -> tuple[grpc.Server, str]:
    """A server with a certificate of its own in that folder, which is the one that it trusts as well."""
    chain, key = certificate(folder)
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    controller_pb2_grpc.add_ControllerServicer_to_server(service, server)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), chain.read_bytes())], chain.read_bytes(), require_client_auth=True
    )
    port = server.add_secure_port(address, credentials)
    server.start()
    return server, f"127.0.0.1:{port}"


def test_a_client_outlives_its_certificates_and_those_of_the_daemons(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqclient.renewal.RECHECK_SECONDS", 0.0)
    server, address = serving(service, tmp_path, "127.0.0.1:0")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    access = Access(address, "secret", TLS(ca=chain, cert=chain, key=key))

    def again() -> Operation[int]:
        request = pb.DescribeClusterRequest()
        return (yield from call(CONTROLLER, "DescribeCluster", request, Deadline(5.0, time.monotonic), Random(1))).epoch

    async def main() -> None:
        nonlocal server
        channels = Channels(address, access.channel)
        aio_channels = Channels(address, access.aio_channel)
        for _ in range(3):
            assert await asyncio.to_thread(run_sync, again(), channels) == 5
            assert await run_async(again(), aio_channels) == 5
            server.stop(None).wait()
            server, _ = serving(service, tmp_path, address)
        for channel in channels.take_all():
            channel.close()
        for channel in aio_channels.take_all():
            await channel.close()

    asyncio.run(main())
    server.stop(None).wait()
    assert service.tokens == ["Bearer secret"] * 6


class Slow(grpc.GenericRpcHandler):
    """Answers nothing for as long as anybody waits, but `/quick`."""

    def service(self, details: Any) -> Any:
        if details.method == "/quick":
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"done")
        if details.method == "/stream":
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([wait_for_end(context)]))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: wait_for_end(context))


def wait_for_end(context: grpc.ServicerContext) -> bytes:
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(30)
    return b""


def test_calls_of_an_asyncio_client_outlast_every_change_of_its_files_and_end_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqclient.renewal.RECHECK_SECONDS", 0.0)
    chain, key = certificate(tmp_path)
    server = grpc.server(ThreadPoolExecutor(16), handlers=[Slow()])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())]))
    server.start()

    async def main() -> None:
        channel = Access(f"127.0.0.1:{port}", "secret", TLS(ca=chain)).aio_channel(f"127.0.0.1:{port}")
        quick, slow, stream = (
            channel.unary_unary("/quick"),
            channel.unary_unary("/slow"),
            channel.unary_stream("/stream"),
        )

        async def read() -> None:
            async for _ in stream(b"", timeout=30):
                pass

        async def wait() -> None:
            await slow(b"", timeout=30)

        waiting = []
        for change in range(3):
            waiting += [asyncio.create_task(wait()), asyncio.create_task(read())]
            await asyncio.sleep(0)
            os.utime(chain, (change, change))
            assert await quick(b"", timeout=10) == b"done"
            gc.collect()
        assert not any(task.done() for task in waiting)
        await channel.close()
        assert len((await asyncio.wait(waiting, timeout=10))[0]) == 6

    asyncio.run(main())
    server.stop(None).wait()
