"""The ROLL adapter has the methods and parameters that ROLL publishes."""

from __future__ import annotations

import inspect
import sys

import pytest

from tqclient.integrations.roll import TransferBackend

# `put`, `get`, `delete`, and those of `TransferQueueClient`, of roll/distributed/scheduler/transfer_backend.py,
# github.com/alibaba/ROLL: v0.3.0, 7f9d4d3873a87679c8d070085a4bd3bdeea7e589; the same in
# 8eb27cc2dc34c4d1310b169d9b86d339004d811a of 2026-08-19. None of the parameters has a default.
PUBLISHED = {
    "put": ["partition", "row_ids", "fields", "batch_size"],
    "get": ["partition", "keys", "fields"],
    "delete": ["partition", "keys", "fields"],
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_method_has_the_parameters_that_are_published(method: str) -> None:
    parameters = list(inspect.signature(getattr(TransferBackend, method)).parameters.values())[1:]
    assert [each.name for each in parameters] == PUBLISHED[method]
    assert {(each.kind, each.default) for each in parameters} == {
        (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)
    }


def test_tensordict_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"roll takes and returns TensorDicts: pip install 'tq-dataplane\[tensordict"):
        TransferBackend("127.0.0.1:1", remote_batch=dict)
