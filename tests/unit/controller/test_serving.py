"""The server that both daemons are made of: typed errors, tokens, TLS that follows its files, and an orderly end."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tqclient import limits
from tqclient.errors import InternalError, InvalidArgument, SampleNotFound, TQError, Unauthenticated, Unavailable
from tqclient.wire.dialing import dial_aio
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import controller_pb2_grpc
from tqserver.security import RECHECK_S, Security, TokenFile
from tqserver.serving import DaemonServer
from tqserver.storage.link import CHANNEL_OPTIONS

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
BEARER = (("authorization", "Bearer one"),)


class Servicer(controller_pb2_grpc.ControllerServicer):
    """Does as the request's number says."""

    def __init__(self) -> None:
        self.called = 0
        self.waits = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        self.called += 1
        if request.session == 1:
            raise SampleNotFound("sample 4 is gone", ids=[4])
        if request.session == 2:
            raise RuntimeError("a bug")
        if request.session == 3:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return pb.HeartbeatReply(epoch=5)

    async def GetDirectories(self, request: Any, context: Any) -> pb.GetDirectoriesReply:  # noqa: N802
        reply = pb.GetDirectoriesReply()
        reply.directories.data = bytes(limits.MESSAGE_BYTES_MAX)
        return reply

    async def Attach(self, reports: AsyncIterator[pb.NodeReport], context: Any) -> AsyncIterator[pb.NodeOrder]:  # noqa: N802
        async for report in reports:
            sync = pb.NodeSync(extents=bytes(report.usage.used_bytes))
            yield pb.NodeOrder(sequence=report.hello.seen_sequence, sync=sync)


Scenario = Callable[[Servicer, DaemonServer, str], Awaitable[None]]


def serve(scenario: Scenario, security: Security | None = None) -> None:
    """Runs a scenario against a server."""

    async def run() -> None:
        secured = security or Security()
        server = DaemonServer(secured)
        servicer = Servicer()
        controller_pb2_grpc.add_ControllerServicer_to_server(servicer, server.grpc)
        address = server.bind("127.0.0.1:0")
        await server.start(["tq.v1.Controller"])
        try:
            await scenario(servicer, server, address)
        finally:
            await server.drain(0)

    asyncio.run(run())


async def beat(channel: grpc.aio.Channel, session: int = 9, **options: Any) -> pb.HeartbeatReply:
    try:
        stub = controller_pb2_grpc.ControllerStub(channel)
        return await stub.Heartbeat(pb.HeartbeatRequest(session=session), **options)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer="server") from error


async def health(channel: grpc.aio.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service="tq.v1.Controller")
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


@pytest.mark.parametrize(
    ("session", "error", "text"),
    [(1, SampleNotFound, "sample 4 is gone"), (2, InternalError, "Heartbeat: RuntimeError")],
)
def test_what_a_handler_raises_arrives_as_its_class(
    session: int, error: type[TQError], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            with pytest.raises(error, match=text) as caught:
                await beat(channel, session)
            assert caught.value.ids == ((4,) if session == 1 else ())

    with caplog.at_level(logging.ERROR):
        serve(scenario)
    assert ("a bug" in caplog.text) == (session == 2)


def test_bytes_that_do_not_parse_are_an_invalid_argument_in_calls_and_streams() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/tq.v1.Controller/Heartbeat")(b"\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            stream = channel.stream_stream("/tq.v1.Controller/Attach")()
            await stream.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/tq.v1.Controller/Nothing")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (servicer.called, (await beat(channel)).epoch) == (0, 5)

    serve(scenario)


def test_a_reply_that_is_too_large_says_so() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=f"at most {limits.MESSAGE_BYTES_MAX}") as caught:
                await stub.GetDirectories(pb.GetDirectoriesRequest())
            assert isinstance(from_rpc_error(caught.value, peer=""), InvalidArgument)

    serve(scenario)


def test_a_node_is_sent_its_extents_however_many_they_are() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        size_bytes = limits.MESSAGE_BYTES_MAX + 1
        async with dial_aio(address, options=CHANNEL_OPTIONS) as channel:
            call = controller_pb2_grpc.ControllerStub(channel).Attach()
            await call.write(pb.NodeReport(usage=pb.NodeUsage(used_bytes=size_bytes)))
            order = await call.read()
            assert len(order.sync.extents) == size_bytes
            call.cancel()

    serve(scenario)


def test_the_handler_of_a_caller_that_left_is_cancelled() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            with pytest.raises(TQError):
                await beat(channel, 3, timeout=0.1)
            await asyncio.wait_for(servicer.cancelled.wait(), 5)

    serve(scenario)


def test_draining_says_not_serving_first_and_cuts_off_what_does_not_end() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        seen = []
        async with dial_aio(address) as channel:
            assert await health(channel) == SERVING
            request = health_pb2.HealthCheckRequest(service="tq.v1.Controller")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request)
            seen.append((await watch.read()).status)
            stuck = asyncio.create_task(beat(channel, 3))
            await asyncio.wait_for(servicer.waits.wait(), 5)
            await server.drain(0.2, lambda: seen.append(-1))
            seen.append((await watch.read()).status)
            assert seen == [SERVING, -1, NOT_SERVING]
            with pytest.raises(TQError):
                await stuck

    serve(scenario)


def test_tokens_are_asked_for_everywhere_but_for_health_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokens").write_text("one\n\ntwo\n")

    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            assert await health(channel) == SERVING
            for metadata in ((), (("authorization", "Bearer on"),), (("authorization", "one"),)):
                with pytest.raises(Unauthenticated):
                    await beat(channel, metadata=metadata)
            attach = controller_pb2_grpc.ControllerStub(channel).Attach()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attach.read()  # refused although nothing was sent
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert servicer.called == 0
            for token in ("one", "two"):
                assert (await beat(channel, metadata=(("authorization", f"Bearer {token}"),))).epoch == 5

    with caplog.at_level(logging.DEBUG):
        serve(scenario, Security(token_file=tmp_path / "tokens"))
    assert "Bearer" not in caplog.text


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old")
    now = [0.0]
    tokens = TokenFile(path, clock=lambda: now[0])
    path.write_text("old\nnewer")
    now[0] += RECHECK_S
    assert tokens.accepts(b"newer")
    path.write_text("newest")
    assert tokens.accepts(b"old")  # not looked at again yet
    now[0] += RECHECK_S
    assert [tokens.accepts(token) for token in (b"old", b"newest")] == [False, True]
    path.write_text("\n")  # a broken file leaves the former tokens in force
    now[0] += RECHECK_S
    assert tokens.accepts(b"newest")
    path.unlink()
    now[0] += RECHECK_S
    assert tokens.accepts(b"newest")


@pytest.mark.parametrize(
    "fields", [{"tls_cert": Path("c")}, {"tls_key": Path("k")}, {"tls_client_ca": Path("ca")}], ids=str
)
def test_half_a_tls_configuration_is_an_error(fields: dict[str, Path]) -> None:
    with pytest.raises(InvalidArgument):
        Security(**fields)


@pytest.mark.parametrize("line", ["tökén".encode(), b"\xff\xfe", b"two\x01words", b"tab\tbed", b"\xef\xbb\xbfmarked"])
def test_what_no_call_can_carry_is_no_token(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"one\n" + line + b"\n")
    with pytest.raises(InvalidArgument, match=rf"^token_file {path}: line 2 is no token: expected printable ASCII$"):
        TokenFile(path)
    path.write_bytes(b"one\n")
    now = [0.0]
    tokens = TokenFile(path, clock=lambda: now[0])
    path.write_bytes(line)
    now[0] += 2
    assert tokens.accepts(b"one")  # a broken file leaves the former tokens in force


@pytest.mark.parametrize("option", ["token_file", "tls_cert", "tls_key", "tls_client_ca"])
def test_a_file_that_is_not_there_is_called_by_its_option(tmp_path: Path, option: str) -> None:
    key, certificate = Authority("one").issue("server")
    paths = {name: tmp_path / name for name in ("token_file", "tls_cert", "tls_key", "tls_client_ca")}
    for name, content in (("token_file", b"one"), ("tls_cert", certificate), ("tls_key", key)):
        paths[name].write_bytes(content)
    paths["tls_client_ca"].write_bytes(certificate)
    Security(**paths).credentials()
    paths[option].unlink()
    with pytest.raises(InvalidArgument, match=f"{option} {paths[option]}: No such file"):
        _ = Security(**paths).interceptors(), Security(**paths).credentials()


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("127.0.0.1:{port}", "the port is in use; give another one with --listen"),
        ("localhost:{port}", "the port is in use"),
        ("0.0.0.0:{port}", "the port is in use"),
        ("192.0.2.1:0", "Cannot assign requested address; give an address of this host with --listen"),
        ("tq.invalid:0", "no host is called 'tq.invalid' here"),
    ],
)
def test_an_address_that_cannot_be_bound_is_refused_with_its_reason(
    listen: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            DaemonServer(Security()).bind(listen.format(port=taken.getsockname()[1]))

    with pytest.raises(Unavailable, match=f"cannot listen on {listen.partition(':')[0]}:\\d+: {reason}"):
        asyncio.run(start())
    assert "add_port" not in capfd.readouterr().err  # gRPC was not even asked


class Authority:
    """Signs certificates."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = self._sign(self._name, self._key.public_key(), is_authority=True)

    def _sign(self, subject: x509.Name, key: Any, *, is_authority: bool = False) -> bytes:
        today = datetime.datetime.now(datetime.timezone.utc)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """Returns (key, certificate) as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return pem, self._sign(subject, key.public_key())


def test_tls_refuses_strangers_and_follows_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqserver.security.RECHECK_S", 0.0)
    old, new = Authority("old"), Authority("new")
    paths = {name: tmp_path / name for name in ("cert", "key", "ca")}

    def install(authority: Authority, client_roots: bytes) -> None:
        key, certificate = authority.issue("server")
        paths["key"].write_bytes(key)
        paths["cert"].write_bytes(certificate)
        paths["ca"].write_bytes(client_roots)

    async def calls(address: str, roots: bytes, client: tuple[bytes, bytes] | None) -> bool:
        credentials = grpc.ssl_channel_credentials(roots, *(client or (None, None)))
        async with dial_aio(address, credentials) as channel:
            try:
                return (await beat(channel, timeout=5)).epoch == 5
            except TQError:
                return False

    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        mine = old.issue("client")
        assert await calls(address, old.pem, mine)
        assert not await calls(address, old.pem, None)
        assert not await calls(address, old.pem, new.issue("foreign"))
        paths["key"].write_bytes(new.issue("server")[0])  # its certificate comes later: until then, the former pair
        assert await calls(address, old.pem, mine)
        install(new, old.pem + new.pem)
        assert await calls(address, new.pem, mine)
        assert await calls(address, new.pem, new.issue("client"))
        assert not await calls(address, old.pem, mine)

    install(old, old.pem)
    serve(scenario, Security(tls_cert=paths["cert"], tls_key=paths["key"], tls_client_ca=paths["ca"]))


def test_a_watch_says_what_follows_and_ends_with_the_daemon_instead_of_holding_it_up() -> None:
    async def scenario(servicer: Servicer, server: DaemonServer, address: str) -> None:
        async with dial_aio(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = {
                name: stub.Watch(health_pb2.HealthCheckRequest(service=name))
                for name in ("", "tq.v1.Controller", "none")
            }
            first = {name: (await watch.read()).status for name, watch in watches.items()}
            assert first == {"": SERVING, "tq.v1.Controller": SERVING, "none": SERVICE_UNKNOWN}
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.Check(health_pb2.HealthCheckRequest(service="none"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            await asyncio.wait_for(server.drain(60), 10)
            for name, watch in watches.items():
                if name != "none":
                    assert (await watch.read()).status == NOT_SERVING
                assert await watch.read() is grpc.aio.EOF

    serve(scenario)
