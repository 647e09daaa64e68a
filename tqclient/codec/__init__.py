"""The packed buffer, format 1: what a put writes and a get reads. docs/decisions/0001-block-format.md tells why.

    columns = normalise(values)
    plan = measure(columns)
    directory = plan.write(target)                      # uint8 [plan.size_bytes]
    layout = Layout.parse(directory)
    column = read_column("tokens", [Part(layout, rows, fetch)], copy=True, allocate=allocate)

A tensor that requires grad is carried detached. A namedtuple is carried as a tuple, an `nn.Parameter` as a tensor, an
array in any memory order as a C-contiguous one. All else comes back as it was, or is refused.
"""

from tqclient.codec.buffers import allocate
from tqclient.codec.clips import Clip
from tqclient.codec.header import ALIGN, FORMAT
from tqclient.codec.kinds.base import Column
from tqclient.codec.kinds.ragged import load_jagged, make_jagged, share_offsets
from tqclient.codec.layout import Layout
from tqclient.codec.normalise import Records, Shared, normalise
from tqclient.codec.plan import Plan, measure
from tqclient.codec.reading import Gathered, Part, gather, read_column
from tqclient.codec.skeleton import NESTING_MAX
from tqclient.codec.values import dumps, loads, same_rows

__all__ = [
    "ALIGN",
    "FORMAT",
    "NESTING_MAX",
    "Clip",
    "Column",
    "Gathered",
    "Layout",
    "Part",
    "Plan",
    "Records",
    "Shared",
    "allocate",
    "dumps",
    "gather",
    "load_jagged",
    "loads",
    "make_jagged",
    "measure",
    "normalise",
    "read_column",
    "same_rows",
    "share_offsets",
]
