"""`tq doctor --rdma` refuses where there is no adapter, and its proof works where the protocol is the one required."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tqclient.cli.main import main
from tqclient.cli.prove import NotProved, prove_loopback, sent_bytes


def test_doctor_fails_without_an_adapter(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CONTROLLER", raising=False)
    assert not list(Path("/sys/class/infiniband").glob("*")), "this test is for machines without RDMA"
    assert main(["doctor", "--rdma", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (bad,) = [finding for finding in report["findings"] if finding["verdict"] == "bad"]
    assert bad["subject"] == "RDMA here"
    assert bad["detail"].startswith("no RDMA adapter: /sys/class/infiniband lists none")


def test_tcp_is_no_rdma_even_where_an_adapter_is_listed(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(NotProved, match="the engines run over tcp, not over rdma"):
        prove_loopback(adapters=tmp_path)


def test_a_block_is_written_read_back_verified_and_timed(tmp_path: Path) -> None:
    found = prove_loopback("tcp", adapters=tmp_path)
    assert re.fullmatch(r"16.0 MiB over tcp: written at [\d.]+ GB/s, read back at [\d.]+ GB/s; no port counters", found)


def test_ports_count_words(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("25\n")
    assert sent_bytes(tmp_path) == {"mlx5_0/1": 100}
