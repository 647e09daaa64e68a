"""What clients and storage nodes share about the Mooncake Transfer Engine: its settings, its loading, its protocol.

The library reads its settings from the environment, once, while it is loaded.
"""

from __future__ import annotations

import glob
import importlib
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, Final

from tqclient.errors import TransportUnavailable
from tqclient.limits import MIB

SETTINGS: Final = {
    # Without a pool each transfer opens a connection of its own.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    # The transport's timers have to fire before that of the whole transfer: after that one, buffers are still in use.
    "MC_TCP_STATUS_TIMEOUT_SEC": "8",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "8",
    "MC_TRANSFER_TIMEOUT": "30",
    "MC_TCP_SLICE_SIZE": str(1 * MIB),
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",  # overrides the one before once the library is loaded
}
"""Set before the library is loaded, each unless the user has set it."""

# Variable → (values that are refused, None for any; why).
_REFUSED: Final[dict[str, tuple[tuple[str, ...] | None, str]]] = {
    "MC_TCP_PROTO": (("1",), "it reports writes as done before they are"),
    "MC_TCP_ENABLE_CONNECTION_POOL": (("0",), "it opens a connection for each transfer"),
    "MC_USE_TENT": (None, "it is another engine, with other promises"),
    "MC_USE_TEV1": (None, "it is another engine, with other promises"),
}
_IPV6: Final = "MC_USE_IPV6"
_LOADED: Final = "mooncake.engine"
_SYSTEM_LIBRARIES: Final = ("libibverbs", "libnuma", "libcurl")
_CUDA_LIBRARIES: Final = ("libcuda", "libcudart", "libmlx5")
_VERBS: Final = "/dev/infiniband/uverbs"


def configure(environ: MutableMapping[str, str]) -> None:
    """Sets what the library is to be loaded with, as far as the user has not.

    Raises:
        TransportUnavailable: a variable is set to what would break a promise of this project.
    """
    for name, (values, why) in _REFUSED.items():
        found = environ.get(name)
        if found is not None and (values is None or found in values):
            raise TransportUnavailable(f"{name}={found} is set, and {why}; unset it to use mooncake")
    for name, value in SETTINGS.items():
        environ.setdefault(name, value)


def load(host: str = "") -> Any:
    """Configures this process and returns the module `mooncake.engine`. Repeatable.

    Args:
        host: under which engines are to be reached. One process speaks IPv4 or IPv6, whichever it began with.

    Raises:
        TransportUnavailable: it cannot be loaded; the message says in one line what to install. Or it was loaded for
            the other family of addresses.
    """
    configure(os.environ)
    if ":" in host and _LOADED not in sys.modules:
        os.environ.setdefault(_IPV6, "1")
    if ":" in host and _IPV6 not in os.environ:
        raise TransportUnavailable(f"mooncake speaks IPv4 in this process, and {host} is IPv6: set {_IPV6}=1 for it")
    try:
        return importlib.import_module(_LOADED)
    except ImportError as error:
        raise TransportUnavailable(explain(error)) from None


def explain(error: ImportError) -> str:
    """Says in one line why the library cannot be loaded, and what to do."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        return "the mooncake library is not installed: pip install 'tq-dataplane[mooncake]'"
    if any(name in text for name in _SYSTEM_LIBRARIES):
        return f"mooncake needs system libraries: apt-get install libibverbs1 libnuma1 libcurl4 ({text})"
    if any(name in text for name in _CUDA_LIBRARIES):
        return (
            f"this build of mooncake needs CUDA, which is not here: pip uninstall mooncake-transfer-engine, then "
            f"pip install 'tq-dataplane[mooncake]' ({text})"
        )
    return f"the mooncake library cannot be loaded: {text}"


def may_use_rdma() -> bool:
    """Returns whether an engine may find an adapter here; `protocol_in_use` tells once it has started."""
    return "MC_FORCE_TCP" not in os.environ and bool(glob.glob(f"{_VERBS}*"))


def protocol_in_use() -> str:
    """Returns `rdma` when an engine of this process has opened an adapter, and `tcp` otherwise.

    What was asked for says nothing: the library falls back to TCP in silence.
    """
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists the folder is gone by now
            if os.readlink(f"/proc/self/fd/{number}").startswith(_VERBS):
                return "rdma"
    return "tcp"
