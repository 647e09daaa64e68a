"""NeMo-RL's `DataPlaneClient` over this service.

    plane = DataPlane("tq-controller:7700", batch_meta=KVBatchMeta)  # NeMo-RL's, of nemo_rl.data_plane.interfaces
    plane.register_partition("train", ["input_ids", "advantages"], num_samples=512, consumer_tasks=["train"])
    plane.put_samples(sample_ids, "train", fields=TensorDict({...}, batch_size=[512]))
    meta = plane.claim_meta("train", "train", ["input_ids", "advantages"], batch_size=64)
    data = plane.get_data(meta)

The interface is that of `nemo_rl/data_plane/interfaces.py`, NeMo-RL 0.7.0 (commit 81aa43d; `DataPlaneClient` is
unchanged in 7ea279a of 2026-08-22). Nothing of NeMo-RL is imported; `DataPlaneClient.register(DataPlane)` makes this
class one of its virtual subclasses.
"""

from __future__ import annotations

from tqclient.integrations.nemo_rl.data_plane import BatchMeta, DataPlane

__all__ = ["BatchMeta", "DataPlane"]
