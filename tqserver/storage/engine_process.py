"""The process of one transfer engine: it maps a node's arena, registers all of it once, and serves it to its peers.

It is a process of its own because its end is the only fence there is: the library never gives up on the body of a write
that a peer has begun, so a peer that was stopped can go on with it at any time, as long as this process lives.

On stdout it says one line of JSON: what it serves, or `{"refusal": ...}`. It ends when its stdin is
closed, and dies with the node that started it. Whatever comes on stdin tells it to populate its mapping.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from tqclient.errors import TQError, TransportUnavailable
from tqclient.wire import arena as wire
from tqclient.wire import mooncake
from tqclient.wire.addresses import join_address
from tqserver import limits
from tqserver.storage import gather
from tqserver.storage.arena import read_allocated_bytes
from tqserver.storage.populate import populate

EXIT_REFUSED: Final = 3
"""Another start would end in the same way: something has to be installed or set first."""
EXIT_FAILED: Final = 1

_PR_SET_PDEATHSIG: Final = 1
_MAP_FIXED_NOREPLACE: Final = 0x100000  # Linux 4.17; the mmap module has no name for it
_BASES: Final = range(0x1000_0000_0000, 0x7000_0000_0000, 1 << 30)
_BASE_TRIES: Final = 8


class EngineFailed(Exception):
    """Another start may go better."""


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends; ends it now when that was before."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise EngineFailed(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise EngineFailed(f"the node, process {parent}, is gone")


def open_locked(path: Path, arena: int) -> tuple[int, wire.ArenaHeader]:
    """Opens the arena file and takes the lock of an engine; returns its descriptor and header."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    wire.lock_engine(descriptor)
    header = wire.ArenaHeader.from_bytes(os.pread(descriptor, wire.HEADER_BYTES, 0))
    if header.arena != arena:
        raise EngineFailed(f"{path} holds arena {header.arena:x}, not {arena:x}")
    return descriptor, header


def map_anywhere(descriptor: int, length: int) -> int:
    """Maps the whole file, without populating it, at an address drawn from 96 TiB; returns the address.

    Peers name the bytes of this process by their address. One that still has an older engine's addresses must not hit
    bytes of this one, should it ever reach it by the same ports.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    access = mmap.PROT_READ | mmap.PROT_WRITE
    for attempt in range(_BASE_TRIES + 1):
        # Where addresses are shorter than that, the kernel chooses.
        wanted = _BASES[secrets.randbelow(len(_BASES))] if attempt < _BASE_TRIES else 0
        flags = mmap.MAP_SHARED | (_MAP_FIXED_NOREPLACE if wanted else 0)
        base = libc.mmap(wanted, length, access, flags, descriptor, 0)
        if base not in (None, ctypes.c_void_p(-1).value):
            return int(base)
        number = ctypes.get_errno()
        if number not in (errno.EEXIST, errno.ENOMEM, errno.EINVAL):
            break
    raise EngineFailed(f"mapping {length} bytes of the arena: {os.strerror(number)}")


def start(
    options: argparse.Namespace, module: Any, base: int, length: int, allocated_bytes: int
) -> tuple[Any, dict[str, object]]:
    """Makes the engine, registers the arena with it, and proves that both ends of it can be reached.

    Args:
        options: of the command line.
        module: the library.
        base: of the mapping.
        length: of the whole file, all of which is registered: what is allocated later is served without another word.
        allocated_bytes: of the file, from its start. No page behind them may be touched: it need not be there.

    Returns:
        The engine, which lives as long as it is referred to, and what the node is told.

    Raises:
        EngineFailed: the library said no.
        TransportUnavailable: RDMA is required, and this is TCP.
    """
    host = options.host
    engine = module.TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", "rdma" if options.rdma else "tcp", options.devices)
    if status != 0:
        raise EngineFailed(f"initialize({host!r}, devices={options.devices!r}) returned {status}")
    protocol = mooncake.protocol_in_use()
    if options.rdma and protocol != "rdma":
        raise TransportUnavailable(
            f"RDMA is required, and the engine found no adapter to use (devices={options.devices!r}); see `tq doctor`"
        )
    status = engine.register_memory(base, length)
    if status != 0:
        raise EngineFailed(
            f"register_memory of {length} bytes returned {status}"
            + ("; is the limit of locked memory (memlock) unlimited?" if protocol == "rdma" else "")
        )
    segment = join_address(host, engine.get_rpc_port())
    read_last_byte(engine, segment, base + allocated_bytes - 1, protocol)
    return engine, {
        "segment": segment,
        "base": base,
        "registered_bytes": length,
        "protocol": protocol,
        "registrations": 1,
        "pid": os.getpid(),
    }


def serve_gathers(options: argparse.Namespace, base: int, header: wire.ArenaHeader) -> dict[str, object]:
    """Serves gathers of the mapping; returns what the node is told of that."""
    mapping = memoryview((ctypes.c_ubyte * header.file_bytes).from_address(base)).cast("B")
    return gather.serve(options.host, options.ports and tuple(options.ports), mapping, header.data_offset)


def read_last_byte(engine: Any, segment: str, address: int, protocol: str) -> None:
    """Reads the last byte that is there: over TCP in the way of a peer, through the engine and its host's name.

    Over RDMA the target of a transfer would have to be registered, too; there, the mapping's pages are pinned by now.
    """
    if protocol == "rdma":
        ctypes.string_at(address, 1)
        return
    target = ctypes.create_string_buffer(1)
    status = engine.transfer_sync_read(segment, ctypes.addressof(target), address, 1)
    if status != 0:
        raise EngineFailed(
            f"the last byte of the arena cannot be read from {segment}; can this host reach itself by that name? "
            "--mooncake-host sets another one"
        )


def warm(base: int, length: int) -> None:
    """Populates the mapping: a page that is touched first by a transfer slows it down to about half."""
    for start in range(0, length, limits.PREFAULT_STEP_BYTES):
        if populate(base + start, min(limits.PREFAULT_STEP_BYTES, length - start)) != 0:
            return  # the kernel cannot, or is short of memory for page tables: transfers will do it


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses what the node passes on."""
    parser = argparse.ArgumentParser(prog="tq-storage engine", description=__doc__, allow_abbrev=False)
    parser.add_argument("--arena-path", required=True, type=Path)
    parser.add_argument("--arena", required=True, type=int, help="identity that the file must have")
    parser.add_argument("--host", required=True, help="name or address that peers reach this host by")
    parser.add_argument("--devices", default="", help="adapters to use, with commas; empty: all")
    parser.add_argument("--ports", nargs=2, type=int, help="lowest and highest port to listen on")
    parser.add_argument("--gid-index", type=int)
    parser.add_argument("--rdma", action="store_true", help="end rather than run over TCP")
    parser.add_argument("--parent", required=True, type=int, help="pid of the node")
    return parser.parse_args(argv)


def pass_through(options: argparse.Namespace) -> None:
    """Hands the node's options to the library, which takes them from the environment."""
    if options.ports:
        os.environ["MC_MIN_RPC_PORT"], os.environ["MC_MAX_RPC_PORT"] = map(str, options.ports)
    if options.gid_index is not None:
        os.environ["MC_GID_INDEX"] = str(options.gid_index)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the engine until stdin is closed, and ends the process."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, while the node still finishes calls
        signal.signal(number, signal.SIG_IGN)
    # Whatever a library prints must not mix with the one line.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        die_with(options.parent)
        pass_through(options)
        module = mooncake.load(options.host)
        descriptor, header = open_locked(options.arena_path, options.arena)
        length = header.file_bytes
        base = map_anywhere(descriptor, length)
        allocated_bytes = read_allocated_bytes(descriptor, options.arena_path, header)
        _engine, facts = start(options, module, base, length, allocated_bytes)
        facts |= serve_gathers(options, base, header)
    except TransportUnavailable as error:
        _say(answer, refusal=error.message)
        _leave(EXIT_REFUSED)
    except (EngineFailed, TQError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        _leave(EXIT_FAILED)
    _say(answer, **facts)
    while os.read(0, 1):
        warm(base, length)
    _leave(0)  # the node has closed its end


def _say(answer: TextIO, **facts: object) -> None:
    answer.write(json.dumps(facts) + "\n")
    answer.flush()


def _leave(status: int) -> NoReturn:
    """Ends at once, without the library's clean-up: it may wait for peers, and there is nothing to save."""
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
