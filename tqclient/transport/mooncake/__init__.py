"""mooncake: one-sided transfers between this process and the engine of a storage node, over RDMA or TCP."""

from tqclient.transport.mooncake.transport import MooncakeTransport, open_mooncake

__all__ = ["MooncakeTransport", "open_mooncake"]
