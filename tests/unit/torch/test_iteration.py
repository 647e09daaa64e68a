"""What a loader's iteration does by itself, beside a feed that always has a batch."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from tqclient.torch.feed import Fetched, Held
from tqclient.torch.loader import _Stream


def stream() -> _Stream:
    state = SimpleNamespace(check_process=lambda: None, forked=False)
    loader: Any = SimpleNamespace(dataset=SimpleNamespace(consumer=SimpleNamespace(_state=state)), _acked=lambda: None)
    feed: Any = SimpleNamespace(
        take=lambda: Fetched(Held(1), "a batch", lambda: None),
        settle=lambda held, verdict: None,
        close=lambda last: None,
    )
    return _Stream(loader, feed)


def test_an_interrupt_where_no_batch_is_lost_does_not_end_the_iteration() -> None:
    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code is _Stream._next.__code__:
            raise AssertionError("there was no line between")
        if event == "line" and frame.f_code is _Stream.__next__.__code__:
            lines.append(frame.f_lineno)
            if len(lines) == 2:  # it is about to ask the feed
                raise KeyboardInterrupt
        return interrupt

    lines: list[int] = []
    taken = stream()
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(taken)
    finally:
        sys.settrace(before)
    assert next(taken) == "a batch"
    taken.close()
