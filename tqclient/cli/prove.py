"""`tq doctor --rdma`: proves that bytes go over RDMA from here, by moving some, and by what the engines did for it."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from tqclient.cli.report import size_text
from tqclient.errors import TQError
from tqclient.limits import MIB
from tqclient.transport.mooncake.engine import Engine
from tqclient.transport.mooncake.flow import Flow
from tqclient.transport.mooncake.options import Options
from tqclient.transport.mooncake.staging import Staging
from tqclient.wire import mooncake

BLOCK_BYTES: Final = 16 * MIB
ROUNDS: Final = 8
PROOF_SECONDS: Final = 30.0
ADAPTERS: Final = Path("/sys/class/infiniband")
_COUNTED_BYTES: Final = 4  # the counters of a port count words


class NotProved(Exception):
    """Says in one line what is missing."""


def library_text() -> str:
    """Says which library there is.

    Raises:
        TransportUnavailable: it cannot be loaded; the message says what to install.
    """
    mooncake.load()
    names = [each.name for each in metadata.distributions() if each.name.startswith("mooncake-transfer-engine")]
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) or "of unknown origin"


def sent_bytes(adapters: Path = ADAPTERS) -> dict[str, int]:
    """Returns what each port of each adapter has sent, by `adapter/port`; empty where there are no counters."""
    files = sorted(adapters.glob("*/ports/*/counters/port_xmit_data"))
    return {f"{file.parts[-5]}/{file.parts[-3]}": int(file.read_text()) * _COUNTED_BYTES for file in files}


def prove_loopback(required: str = "rdma", *, adapters: Path = ADAPTERS) -> str:
    """Writes a block from one engine of this process to another, reads it back, verifies and times it.

    Args:
        required: protocol that both engines must have been seen to use.
        adapters: where the kernel lists them.

    Returns:
        What was measured.

    Raises:
        NotProved: another protocol was used, or other bytes came back.
        TQError: no engine could be made, or a transfer failed.
    """
    if required == "rdma" and not list(adapters.glob("*")):
        raise NotProved(f"no RDMA adapter: {adapters} lists none (drivers, ibverbs-providers, container's devices)")
    options = Options.from_environment()
    host = options.host or "127.0.0.1"
    node = Engine(host, "", BLOCK_BYTES, devices=options.devices)
    try:
        client = Engine(host, node.address, BLOCK_BYTES, devices=options.devices)
        try:
            if client.protocol != required:
                raise NotProved(f"the engines run over {client.protocol}, not over {required}")
            before = sent_bytes(adapters)
            write_seconds, read_seconds = _move(node, client)
            sent = {port: count - before.get(port, 0) for port, count in sent_bytes(adapters).items()}
        finally:
            client.release()
    finally:
        node.release()
    rates = (f"{BLOCK_BYTES / seconds / 1e9:.2f} GB/s" for seconds in (write_seconds, read_seconds))
    ports = ", ".join(f"{port} sent {size_text(count)}" for port, count in sent.items()) or "no port counters"
    return f"{size_text(BLOCK_BYTES)} over {required}: written at {next(rates)}, read back at {next(rates)}; {ports}"


def _move(node: Engine, client: Engine) -> tuple[float, float]:
    """Returns the best times of a write and a read."""
    area = Staging(0, BLOCK_BYTES)
    source = np.random.default_rng().integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    best = [PROOF_SECONDS, PROOF_SECONDS]
    for _ in range(ROUNDS):
        np.copyto(client.memory, source)
        for index, writes in enumerate((True, False)):
            started = time.perf_counter()
            with Flow(client, f"the engine {node.address}", PROOF_SECONDS) as flow:
                slot = flow.take(area, BLOCK_BYTES)
                flow.start(slot, client.memory, node.memory.ctypes.data, writes=writes)
                flow.finish()
            best[index] = min(best[index], time.perf_counter() - started)
            if writes:
                client.memory.fill(0)
        if not (np.array_equal(client.memory, source) and np.array_equal(node.memory, source)):
            raise NotProved("other bytes came back: report this as a bug, with the logs")
    return best[0], best[1]


def proof_of(required: str = "rdma") -> tuple[bool, str]:
    """Returns whether the proof succeeded, and what it found or what is missing."""
    try:
        return True, prove_loopback(required)
    except NotProved as error:
        return False, str(error)
    except TQError as error:
        return False, error.message
