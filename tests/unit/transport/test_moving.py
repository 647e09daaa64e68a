"""Pages that are moved away and back: whatever interrupts it, the file's pages end up in the file's mapping."""

from __future__ import annotations

import ctypes
import dis
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from tqclient.memory import Memory
from tqclient.transport import moving
from tqclient.transport.moving import MovedPages

LENGTH = 1 << 20
START, STOP = 10_000, 500_000


class File:
    """A file in memory, and the mapping of it that pages are moved from."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("pages")
        os.posix_fallocate(self.descriptor, 0, LENGTH)
        self.memory = Memory(LENGTH, descriptor=self.descriptor, inherited=False)
        self.home = self.memory.array()[START:STOP]

    def lend(self) -> MovedPages:
        return MovedPages(self.memory, START, STOP)

    def bytes(self) -> bytes:
        return os.pread(self.descriptor, STOP - START, START)

    def check_back(self, lent: MovedPages, expected: int) -> None:
        """The mapping shows what is in the file, and reaches it; the lent address does not."""
        assert set(self.bytes()) == {expected}
        assert (self.home == expected).all()
        lent.array.fill(99)
        assert (self.home == expected).all()
        self.home.fill(expected + 1)
        assert set(self.bytes()) == {expected + 1}
        assert (lent.array == 99).all()


@pytest.fixture
def file() -> Iterator[File]:
    file = File()
    yield file
    os.close(file.descriptor)


def test_they_come_back_once(file: File) -> None:
    lent = file.lend()
    lent.array.fill(5)
    for _ in range(3):
        lent.take_back()
    file.check_back(lent, 5)
    lent.take_back()
    assert (lent.array == 99).all()


class Interrupter:
    """Raises KeyboardInterrupt at the n-th of the points where the interpreter looks for signals: after each call."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != moving.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code)):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _after_calls(code: CodeType) -> set[int]:
    instructions = pairwise(dis.get_instructions(code))
    return {after.offset for call, after in instructions if call.opname.startswith(("CALL", "RESUME"))}


def test_an_interrupt_between_any_two_steps_leaves_them_to_be_taken_back_again(file: File) -> None:
    points = 0
    while True:
        lent = file.lend()
        lent.array.fill(points + 1)
        interrupter = Interrupter(points + 1)
        before = sys.gettrace()
        sys.settrace(interrupter)
        try:
            lent.take_back()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupter.left > 0:
            break
        lent.take_back()
        file.check_back(lent, points + 1)
        points += 1
    assert points > 8  # each system call, and what is around them


def test_an_interrupt_during_a_system_call(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal runs when the call returns, which has done what it was to do."""
    for name in ("mremap", "mmap"):
        lent = file.lend()
        lent.array.fill(7)
        with monkeypatch.context() as patch:
            patch.setattr(moving, "libc", _Interrupted(moving.libc, name))
            with pytest.raises(KeyboardInterrupt):
                lent.take_back()
        lent.take_back()
        file.check_back(lent, 7)


class _Interrupted:
    def __init__(self, libc: Any, name: str) -> None:
        self._libc = libc
        self._name = name

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            getattr(self._libc, name)(*arguments)
            raise KeyboardInterrupt

        return call if name == self._name else getattr(self._libc, name)


def test_two_threads_take_back_at_once(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = file.lend()
    lent.array.fill(3)
    move, inside, go_on = moving._move, threading.Event(), threading.Event()

    def slow(source: int, target: int, length: int) -> None:
        inside.set()
        go_on.wait(10)
        move(source, target, length)

    monkeypatch.setattr(moving, "_move", slow)
    threads = [threading.Thread(target=lent.take_back) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join()
    file.check_back(lent, 3)


def test_no_address_space_leaves_them_where_they_were(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = file.lend()
    lent.array.fill(4)
    with monkeypatch.context() as patch:
        patch.setattr(moving, "MAP_FAILED", lent._address)
        patch.setattr(moving, "libc", _Failing(moving.libc))
        with pytest.raises(OSError, match="cannot take back"):
            lent.take_back()
    assert (lent.array == 4).all()
    lent.array.fill(6)
    lent.take_back()
    file.check_back(lent, 6)


class _Failing:
    def __init__(self, libc: Any) -> None:
        self._libc = libc

    def __getattr__(self, name: str) -> Any:
        return (lambda address, *_: address) if name == "mmap" else getattr(self._libc, name)


def test_a_forked_child_takes_nothing_back(file: File) -> None:
    """There the address is free: what the child maps may come to lie at it."""
    lent = file.lend()
    lent.array.fill(8)
    child = os.fork()
    if child == 0:
        try:
            own = mmap.mmap(-1, lent._length)
            moving.libc.mremap(  # where the loan lies in the parent
                np.frombuffer(own, np.uint8).ctypes.data, lent._length, lent._length, 3, lent._address
            )
            there = np.frombuffer((ctypes.c_uint8 * lent._length).from_address(lent._address), np.uint8)
            there[:] = 7
            lent.take_back()
            os._exit(0 if (there == 7).all() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    lent.take_back()
    file.check_back(lent, 8)
