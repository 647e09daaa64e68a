"""str and bytes columns: all rows joined, their lengths in the directory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import buffers
from tqclient.codec.checksum import Checksums
from tqclient.codec.directory import BYTES, TEXT, StreamSize
from tqclient.codec.kinds.base import Encoder, stream_size
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Group, Reading, Rows, read_rows
from tqclient.errors import CorruptBlock
from tqclient.schema import Form
from tqclient.wire.texts import cut_texts

JOINED_MEAN_CHARS: Final = 192
"""Up to this mean length, several texts are joined and looked at as one."""


class BytesEncoder(Encoder):
    """A list of bytes."""

    kind = BYTES
    form = Form("list")

    def __init__(self, values: Sequence[bytes] | Sequence[str], counts: NDArray[np.int64]) -> None:
        """Args: `values`: bytes, or texts of ASCII alone; `counts`: the bytes of each."""
        self.rows = len(counts)
        self._values = values
        self._counts = counts

    def streams(self) -> list[StreamSize]:
        return [stream_size(int(self._counts.sum()), self.rows, self._counts)]

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        buffers.write_joined(self._values, self._counts, streams[0])

    def row_bytes(self) -> NDArray[np.int64]:
        return self._counts

    def slice(self, start: int, stop: int) -> BytesEncoder:
        return type(self)(self._values[start:stop], self._counts[start:stop])

    def take(self, rows: NDArray[np.int64]) -> BytesEncoder:
        return type(self)([self._values[row] for row in rows.tolist()], self._counts[rows])


class TextEncoder(BytesEncoder):
    """A list of str, as UTF-8."""

    kind = TEXT


def encode_text(values: Sequence[str]) -> TextEncoder:
    """Measures strings; those of ASCII alone are encoded when they are written.

    Raises:
        UnicodeEncodeError: one has a lone surrogate.
    """
    counts = np.fromiter(map(len, values), np.int64, len(values))
    if _all_ascii(values, counts):
        return TextEncoder(list(values), counts)
    encoded = [value.encode() for value in values]
    return TextEncoder(encoded, np.fromiter(map(len, encoded), np.int64, len(values)))


def _all_ascii(values: Sequence[str], counts: NDArray[np.int64]) -> bool:
    """A text knows that of itself. To ask a short one takes longer than to join it with others."""
    if int(counts.sum()) > JOINED_MEAN_CHARS * len(values):
        return all(map(str.isascii, values))
    return all("".join(values[low:high]).isascii() for low, high in buffers.pieces(counts))


def encode_bytes(values: Sequence[bytes]) -> BytesEncoder:
    """Measures byte strings."""
    return BytesEncoder(list(values), np.fromiter(map(len, values), np.int64, len(values)))


def read(groups: Sequence[Group], reading: Reading) -> list[str] | list[bytes]:
    """Reads columns that are all texts, or all bytes."""
    rows = read_rows(groups, 0, reading, view=False)
    if groups[0].node.kind == TEXT:
        try:
            return cut_texts(rows.data, rows.bounds)
        except UnicodeDecodeError:
            raise _not_text(rows, reading) from None
    data = rows.data.tobytes()
    return [data[start:stop] for start, stop in itertools.pairwise(rows.bounds.tolist())]


def _not_text(rows: Rows, reading: Reading) -> CorruptBlock:
    data = rows.data.tobytes()
    for row, (start, stop) in enumerate(itertools.pairwise(rows.bounds.tolist())):
        try:
            data[start:stop].decode()
        except UnicodeDecodeError as error:
            return CorruptBlock(f"field {reading.path!r}: a text is not UTF-8: {error}", rows=[row])
    raise AssertionError("each text by itself is UTF-8")
