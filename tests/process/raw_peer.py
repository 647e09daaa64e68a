"""A peer that uses the transfer engine as it is, with none of the client's precautions: python raw_peer.py COMMAND ...

read SEGMENT ADDRESS LENGTH       prints the bytes in hex
write SEGMENT ADDRESS LENGTH      prints `writing`, then fills the bytes with 1, 2, 3 ... in turn until a write fails
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from tests.harness.stdout import keep_to_python
from tqclient.wire import mooncake


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read(engine: Any, segment: str, address: int, length: int) -> None:
    target = (ctypes.c_uint8 * length)()
    engine.register_memory(ctypes.addressof(target), length)
    status = engine.transfer_sync_read(segment, ctypes.addressof(target), address, length)
    say(bytes(target).hex() if status == 0 else f"failed {status}")


def write(engine: Any, segment: str, address: int, length: int) -> None:
    source = (ctypes.c_uint8 * length)()
    engine.register_memory(ctypes.addressof(source), length)
    say("writing")
    pattern = status = 0
    while status == 0:
        pattern = pattern % 255 + 1
        ctypes.memset(source, pattern, length)
        status = engine.transfer_sync_write(segment, ctypes.addressof(source), address, length)
    say(f"failed {status}")


def main() -> None:
    keep_to_python()
    command, segment, address, length = sys.argv[1:]
    engine = mooncake.load().TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    {"read": read, "write": write}[command](engine, segment, int(address), int(length))
    os._exit(0)


if __name__ == "__main__":
    main()
