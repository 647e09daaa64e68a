"""How bytes get to a storage node and back: one small interface, and the paths behind it."""

from tqclient.transport.base import Fetched, NodeTransport, Place, Read
from tqclient.transport.pool import BufferPool, PoolStats
from tqclient.transport.select import check_name, open_transport

__all__ = ["BufferPool", "Fetched", "NodeTransport", "Place", "PoolStats", "Read", "check_name", "open_transport"]
