"""What a worker process of the loader does before it fetches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tqclient.errors import Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.consumers import ConsumerRef
from tqclient.samplers import Fifo
from tqclient.schema import Form
from tqclient.torch import workers
from tqclient.torch.dataset import Options, Reach

FORMS = {"tokens": Form("ragged", "torch", "int64"), "text": Form("list"), "reward": Form("dense", "torch", "float32")}


@pytest.mark.parametrize(
    ("fields", "known"),
    [((), list(FORMS.values())), (("reward", "tokens"), [FORMS["reward"], FORMS["tokens"]]), (("unknown",), [])],
)
def test_a_worker_loads_what_takes_long_before_its_session_begins(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...], known: list[Form]
) -> None:
    done: list[Any] = []
    refusal = Unavailable("nobody is there")

    def connect(reach: Reach) -> None:
        done.append("connect")
        raise refusal

    class Pipe:
        def send(self, message: Any) -> None:
            done.append(message)

    monkeypatch.setattr(torch, "set_num_threads", done.append)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(workers, "load_jagged", lambda forms: done.append(list(forms)))
    monkeypatch.setattr(Reach, "connect", connect)
    consumer = ConsumerRef(PartitionRef(1, "p", FORMS), "c", fields, Fifo())
    pipe: Any = Pipe()
    workers.work(pipe, Reach("host:1", "auto", None, None, 1.0, "p", consumer), Options(4))
    assert done == [1, known, "connect", ("ended", refusal)]
