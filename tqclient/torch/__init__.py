"""Samples for a PyTorch training loop: `tq.torch.StreamingLoader`."""

from tqclient.torch.batch import LoadedBatch
from tqclient.torch.dataset import StreamingDataset
from tqclient.torch.loader import StreamingLoader

__all__ = ["LoadedBatch", "StreamingDataset", "StreamingLoader"]
