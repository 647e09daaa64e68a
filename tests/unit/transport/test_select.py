from __future__ import annotations

import logging
import re

import pytest

from tests.unit.transport.fake_node import ARENA, FakeNode, Opener, make_arena
from tqclient.errors import InvalidArgument, TransportUnavailable, Unavailable
from tqclient.limits import MIB
from tqclient.transport import check_name
from tqclient.wire.v1 import storage_pb2


def test_auto_takes_shm_on_the_same_host(opener: Opener, fake_node: FakeNode) -> None:
    transport = opener("auto")
    assert transport.name == "shm"
    assert transport.reason.startswith(
        f"same host: {fake_node.path} holds the arena a1b2c3d4e5f60718 of storage node 'n0'"
    )
    assert "127.0.0.1" not in transport.reason  # it may move


def break_path(node: FakeNode) -> str:
    node.path.unlink()
    return "cannot open .*: No such file"


def break_identity(node: FakeNode) -> str:
    node.path.unlink()
    make_arena(node.path, arena=1)
    return "is arena 0000000000000001, but the node's is a1b2c3d4e5f60718: another host"


def break_header(node: FakeNode) -> str:
    with node.path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    return "damaged"


def break_length(node: FakeNode) -> str:
    node.path.unlink()
    make_arena(node.path, cut_bytes=1)
    return r"file has 16777215 bytes, its header says 16777216"


def break_description(node: FakeNode) -> str:
    node.path.unlink()
    make_arena(node.path, file_bytes=1 << 20)
    return "has 1048576 bytes, but the node says 16777216"


def break_type(node: FakeNode) -> str:
    node.path.unlink()
    node.path.mkdir()
    return "cannot open .*: Is a directory"


def break_link(node: FakeNode) -> str:
    target = node.path.rename(node.path.with_name("elsewhere"))
    node.path.symlink_to(target)
    return "cannot open .*: Too many levels of symbolic links"


BREAKS = [break_path, break_identity, break_header, break_length, break_description, break_type, break_link]


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_what_is_no_proof_of_the_same_host_falls_back_loudly(
    opener: Opener, fake_node: FakeNode, breaks, caplog: pytest.LogCaptureFixture
) -> None:
    expected = breaks(fake_node)
    transport = opener("auto")
    assert transport.name == "grpc"
    assert re.search(f"; no shm: .*{expected}", transport.reason)
    assert "; no mooncake: the node has no transfer engine" in transport.reason
    assert transport.better_after is None
    warning = next(record for record in caplog.records if record.levelno == logging.WARNING)
    assert transport.reason in warning.getMessage()


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_a_required_transport_is_refused_with_the_reason(opener: Opener, fake_node: FakeNode, breaks) -> None:
    expected = breaks(fake_node)
    with pytest.raises(TransportUnavailable, match=f"transport='shm' to storage node 'n0'.*no shm: .*{expected}"):
        opener("shm")


@pytest.mark.parametrize("name", ["mooncake", "rdma"])
def test_mooncake_is_refused(opener: Opener, name: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"transport='{name}'.*no mooncake: the node has no transfer engine"):
        opener(name)


def test_an_engine_that_is_being_started_is_waited_for(opener: Opener, fake_node: FakeNode) -> None:
    break_path(fake_node)
    fake_node.mooncake = {"mooncake_refusal": "the engine is being started", "mooncake_expected": True}
    transport = opener("auto")
    assert (transport.name, transport.better_after) == ("grpc", 10.0)
    assert "; no mooncake: the engine is being started" in transport.reason
    with pytest.raises(Unavailable, match="the engine is being started"):
        opener("mooncake")


ENDPOINT = storage_pb2.MooncakeEndpoint(segment="127.0.0.1:9", registered_bytes=16 * MIB, protocol="tcp")


@pytest.mark.parametrize(
    ("prefer", "changes", "expected"),
    [
        ("mooncake", {"registered_bytes": 16 * MIB - 1}, "the node registered 16777215 bytes of 16777216"),
        ("rdma", {}, "RDMA is required, and the node's engine runs over tcp"),
    ],
)
def test_an_engine_that_does_not_serve_is_refused(
    opener: Opener, fake_node: FakeNode, prefer: str, changes: dict[str, int], expected: str
) -> None:
    endpoint = storage_pb2.MooncakeEndpoint()
    endpoint.CopyFrom(ENDPOINT)
    for name, value in changes.items():
        setattr(endpoint, name, value)
    fake_node.mooncake = {"mooncake": endpoint}
    with pytest.raises(TransportUnavailable, match=f"transport='{prefer}'.*no mooncake: {expected}"):
        opener(prefer)


@pytest.mark.parametrize("staging", ["1000", "1GiB"])
def test_staging_out_of_bounds_is_refused(
    opener: Opener, fake_node: FakeNode, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_node.mooncake = {"mooncake": ENDPOINT}
    monkeypatch.setenv("TQ_MOONCAKE_STAGING", staging)
    with pytest.raises(
        TransportUnavailable, match=r"TQ_MOONCAKE_STAGING is [0-9]+ bytes: expected 1048576 to 268435456"
    ):
        opener("mooncake")


def test_grpc_may_be_required_and_is_then_no_fall_back(opener: Opener, caplog: pytest.LogCaptureFixture) -> None:
    transport = opener("grpc")
    assert (transport.name, "no shm" in transport.reason) == ("grpc", False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["", "SHM", "tcp"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgument, match="choose from auto, shm, mooncake, grpc, rdma"):
        check_name(name)


def test_known_names_are_accepted() -> None:
    assert [check_name(name) for name in ("auto", "shm", "mooncake", "grpc", "rdma")] == [
        "auto",
        "shm",
        "mooncake",
        "grpc",
        "rdma",
    ]


def test_another_arena_than_the_controller_knows_is_unavailable(opener: Opener) -> None:
    with pytest.raises(Unavailable, match="serves arena a1b2c3d4e5f60718, but the controller knows a1b2c3d4e5f60719"):
        opener("auto", arena=ARENA + 1)


def test_a_node_that_is_away_is_unavailable(opener: Opener) -> None:
    opener.stop_node()
    with pytest.raises(Unavailable, match="storage node 'n0'"):
        opener("auto")
