"""TransferQueue with Mooncake Store below it. Each of its clients lends memory, as that backend has it."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.peers import host, mooncake_master, transfer_queue_simple
from benchmarks.peers.daemons import HOST

MASTER_OPTIONS: Final = (
    "-client_ttl=30",
    "-default_kv_lease_ttl=999999",
    "-default_kv_soft_pin_ttl=999999",
    "--allow_evict_soft_pinned_objects=false",
    "--eviction_high_watermark_ratio=1.0",
    "--eviction_ratio=0.0",
)
"""With which it would start the master itself; it would first end every other master on the machine."""
SPARE_BYTES: Final = 512 << 20

Source = transfer_queue_simple.Source
Target = transfer_queue_simple.Target


class Storage(transfer_queue_simple.Storage):
    """Ray, its controller on it, and a master."""

    def __init__(self, setup: host.Setup) -> None:
        self._master, self._master_address = mooncake_master.start(setup.directory, MASTER_OPTIONS)
        try:
            super().__init__(setup)
        except BaseException:
            self._master.stop()
            raise

    def configuration(self, setup: host.Setup) -> dict[str, Any]:
        """Returns what differs from its defaults."""
        store = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self._master_address,
            "local_hostname": HOST,
            "protocol": "tcp",
            "global_segment_size": 2 * setup.size_bytes + SPARE_BYTES,
            "local_buffer_size": setup.size_bytes + SPARE_BYTES,
        }
        return {"backend": {"storage_backend": "MooncakeStore", "MooncakeStore": store}}

    def close(self) -> None:
        """Stops all."""
        super().close()
        self._master.stop()
