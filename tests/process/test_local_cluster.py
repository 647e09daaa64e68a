from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.storage_rig import wait_for
from tqclient.errors import InvalidArgument, Unavailable
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import controller_pb2, controller_pb2_grpc, storage_pb2, storage_pb2_grpc
from tqserver.local import LocalCluster, remove_stale


def left_behind(pid: int) -> list[str]:
    """Returns what a cluster of that process has in the places that it writes to."""
    stem = f"tq-local-{pid}-"
    return [name for place in ("/dev/shm", "/tmp") for name in os.listdir(place) if name.startswith(stem)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def nodes(cluster: LocalCluster) -> list[controller_pb2.Node]:
    with dial(cluster.address) as channel:
        reply = controller_pb2_grpc.ControllerStub(channel).DescribeCluster(
            controller_pb2.DescribeClusterRequest(), timeout=5
        )
    return sorted(reply.nodes, key=lambda node: node.name)


def describe(address: str) -> storage_pb2.DescribeNodeReply:
    with dial(address) as channel:
        return storage_pb2_grpc.StorageStub(channel).DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=5)


def test_daemons_run_restart_on_their_ports_and_leave_nothing() -> None:
    with LocalCluster(storage_nodes=2, arena="16MiB") as cluster:
        pids = [cluster.controller.pid, *(node.pid for node in cluster.storage)]
        assert [(n.name, n.attached, n.address) for n in nodes(cluster)] == [
            (f"storage-{index}", True, node.address) for index, node in enumerate(cluster.storage)
        ]
        before = describe(cluster.storage[0].address)
        assert before.arena_bytes == 16 << 20
        assert describe(cluster.storage[1].address).arena != before.arena

        address = cluster.storage[0].address
        cluster.storage[0].kill()
        assert not alive(pids[1])
        cluster.storage[0].restart()
        cluster.wait_attached()
        after = describe(address)
        assert (after.arena, after.attached) == (before.arena, True)
        assert after.incarnation != before.incarnation

        controller = cluster.address
        cluster.controller.kill()
        cluster.controller.restart()
        cluster.wait_attached()
        assert cluster.address == controller
        assert [n.attached for n in nodes(cluster)] == [True, True]
        assert cluster.storage[1].terminate() == 0
        pids += [cluster.controller.pid, cluster.storage[0].pid]
        directory = cluster.directory
        assert "attached" in cluster.storage[0].log.read_text()
    assert not any(map(alive, pids))
    assert not directory.exists()
    assert left_behind(os.getpid()) == []


def test_start_and_stop_and_start_again() -> None:
    cluster = LocalCluster(arena=8 << 20)
    with pytest.raises(Unavailable, match="not started"):
        _ = cluster.address
    for _ in range(2):
        cluster.start()
        with pytest.raises(InvalidArgument, match="running already"):
            cluster.start()
        assert len(nodes(cluster)) == 1
        cluster.stop()
        cluster.stop()
    assert left_behind(os.getpid()) == []


def test_a_data_dir_outlives_the_cluster(tmp_path: Path) -> None:
    arenas: list[Path] = []
    try:
        identities = []
        for _ in range(2):
            with LocalCluster(arena="8MiB", data_dir=tmp_path / "data") as cluster:
                reply = describe(cluster.storage[0].address)
                identities.append(reply.arena)
                arenas.append(Path(reply.arena_path))
        assert identities[0] == identities[1]
        assert (tmp_path / "data" / "controller").is_dir()
    finally:
        for arena in arenas:
            arena.unlink(missing_ok=True)


def test_a_daemon_that_does_not_start_is_told_with_its_log() -> None:
    with pytest.raises(Unavailable, match=r"(?s)storage-0 ended with status 1; its log:.*at least 4MiB"):
        LocalCluster(arena="1MiB").start()
    with pytest.raises(
        Unavailable, match=r"(?s)controller ended with status 2; its log:.*unknown argument '--no-such'"
    ):
        LocalCluster(arena="8MiB", controller_args=["--no-such"]).start()
    assert left_behind(os.getpid()) == []


def test_a_daemon_that_dies_by_itself_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def use() -> None:
        with LocalCluster(arena="8MiB") as cluster:
            os.kill(cluster.storage[0].pid, signal.SIGKILL)
            wait_for(lambda: cluster.storage[0].returncode is not None)

    with pytest.raises(Unavailable, match="storage-0 ended with status -9"):
        use()
    with pytest.raises(KeyError, match="mine"), LocalCluster(arena="8MiB"):
        raise KeyError("mine")
    assert '"event": "serving"' in capsys.readouterr().err
    assert left_behind(os.getpid()) == []


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/tq"])
def test_a_data_directory_that_cannot_be_is_called_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=f"data_dir .*{name}: .*; give a directory"):
        LocalCluster(data_dir=tmp_path / name).start()


PARENT = """
import os, signal, sys
from tqserver.local import LocalCluster, remove_stale
cluster = LocalCluster(arena="8MiB").start()
if sys.argv[1] == "kills":
    cluster.storage[0].kill()
print(os.getpid(), cluster.controller.pid, cluster.storage[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("storage", ["runs", "kills"])
def test_nothing_survives_a_parent_that_is_killed(storage: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, storage], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        parent, *daemons = map(int, process.stdout.read().split())
        wait_for(lambda: not any(map(alive, daemons)), timeout=15)
        if storage == "kills":  # it could not remove its arena
            # Nor does the cluster of a test beside this one, as long as the parent was not waited for.
            assert [name.rpartition(".")[2] for name in left_behind(parent)] == ["arena"]
        assert process.wait() == -signal.SIGKILL
    if storage == "kills":  # the next cluster does
        LocalCluster(storage_nodes=0).start().stop()
    wait_for(lambda: left_behind(parent) == [])


def test_what_lies_about_under_a_name_that_no_process_ever_had_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may write to the directory of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "tq-local-99999999999999999999-ab"
    other.touch()
    remove_stale()
    assert other.exists()


def test_daemons_do_not_inherit_settings_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_STORAGE_ARENA_BYTES", "3")
    monkeypatch.setenv("TQ_CONTROLLER", "nowhere:1")
    with LocalCluster(arena="8MiB", session_lease=1.5, environ={"TQ_STORAGE_PREFAULT": "true"}) as cluster:
        assert nodes(cluster)[0].attached


def test_daemons_import_nothing_out_of_the_directory_that_they_are_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 11):  # before, there is no way to tell Python
        for module in ("select", "queue", "secrets", "grpc"):
            (tmp_path / f"{module}.py").write_text("raise SystemExit('this is another module')\n")
    monkeypatch.chdir(tmp_path)
    with LocalCluster(arena="8MiB", prefault=False, mooncake="on") as cluster:
        assert [node.attached for node in nodes(cluster)] == [True]
        assert describe(cluster.storage[0].address).HasField("mooncake")  # its engine is a process as well
