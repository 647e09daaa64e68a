"""What a column is: the part of a block's description that every put to a partition must agree on.

The controller keeps one `Form` per field and refuses a put that does not join it; the codec derives it from the values.
Free of torch: the controller imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import msgpack

from tqclient.errors import InvalidArgument, SchemaMismatch
from tqclient.limits import ROW_LENGTH_MAX

Kind = Literal["dense", "ragged", "struct", "list"]
KINDS: Final = ("dense", "ragged", "struct", "list")
DEPTH_MAX: Final = 64
"""Structs within structs."""
DIMENSION_MAX: Final = (1 << 63) - 1
_REMEMBERED_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one column.

    Attributes:
        kind: `dense`: one array for all rows. `ragged`: rows of one dtype and trailing shape, of any length.
            `struct`: dicts with the same keys. `list`: anything else, read back as a list.
        container: what reading gives: `torch`, `numpy`, `nested` (a strided NestedTensor); empty for struct and list.
        dtype: of dense and ragged: torch's name without `torch.` (`bfloat16`), or numpy's `dtype.str` (`<U7`) or descr.
        shape: of dense: that of one row; of ragged: that of one row less its leading dimension.
        children: of struct: (key, form), in the order of the keys.
    """

    kind: Kind
    container: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    children: tuple[tuple[str, Form], ...] = ()

    @property
    def row_length(self) -> int | None:
        """The leading dimension of each row of a dense column; None: it has none, or a longer one than counts."""
        return self.shape[0] if self.kind == "dense" and self.shape and self.shape[0] <= ROW_LENGTH_MAX else None

    def to_bytes(self) -> bytes:
        """Encodes the form; equal forms have equal bytes."""
        return bytes(msgpack.packb(self._to_tree()))

    def _to_tree(self) -> list[Any]:
        children = [[key, child._to_tree()] for key, child in self.children]
        return [self.kind, self.container, self.dtype, list(self.shape), children]

    @classmethod
    def from_bytes(cls, data: bytes) -> Form:
        """Decodes what `to_bytes` made.

        Raises:
            InvalidArgument: the bytes are no form.
        """
        return _remembered(data) if len(data) <= _REMEMBERED_BYTES_MAX else cls._parse(data)

    @classmethod
    def _parse(cls, data: bytes) -> Form:
        try:
            return cls._from_tree(msgpack.unpackb(data), DEPTH_MAX)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
            raise InvalidArgument(f"not the form of a column: {error}") from None

    @classmethod
    def _from_tree(cls, tree: Any, depth: int) -> Form:
        kind, container, dtype, shape, children = tree
        if kind not in KINDS or depth == 0:
            raise ValueError(f"kind {kind!r} at depth {DEPTH_MAX - depth}")
        if not (isinstance(container, str) and isinstance(dtype, str) and all(type(size) is int for size in shape)):
            raise ValueError("container, dtype or shape is of the wrong type")
        least = -1 if kind == "ragged" else 0  # a dimension that varies
        if not all(least <= size <= DIMENSION_MAX for size in shape):
            raise ValueError(f"shape {shape}: dimensions from {least} to {DIMENSION_MAX}")
        if not all(isinstance(key, str) for key, _ in children):
            raise ValueError("a key is not a string")
        return cls(kind, container, dtype, tuple(shape), tuple((k, cls._from_tree(c, depth - 1)) for k, c in children))

    def __str__(self) -> str:
        if self.kind == "struct":
            return "{" + ", ".join(f"{key}: {child}" for key, child in self.children) + "}"
        if self.kind == "list":
            return "list"
        dimensions = ["rows"] + (["*"] if self.kind == "ragged" else []) + [str(size) for size in self.shape]
        return f"{self.container} {self.kind} {self.dtype}[{', '.join(dimensions)}]"


def join(path: str, known: Form, new: Form) -> None:
    """Checks that a put's column fits the column that the partition has.

    Args:
        path: of the column, for the error: `mm.pixel_values`.
        known: what the first put fixed.
        new: what this put brings.

    Raises:
        SchemaMismatch: with the path, both forms and the remedy.
    """
    if known == new or (known.kind == "list" and new.kind == "list"):
        return
    if known.kind == new.kind == "struct":
        known_children, new_children = dict(known.children), dict(new.children)
        if known_children.keys() == new_children.keys():
            for key, child in known_children.items():
                join(f"{path}.{key}", child, new_children[key])
            return
    # Rows of one tensor may join a jagged column: [rows, length, *shape] holds rows of [length, *shape].
    rows_fit = known.kind == "ragged" and new.kind == "dense" and new.shape[:1] != () and new.shape[1:] == known.shape
    if rows_fit and known.dtype == new.dtype and known.container in (new.container, "nested"):
        return
    raise SchemaMismatch(
        f"field {path!r} is {known}, but this put brings {new}; "
        "convert the values, use another field, or wrap them in tq.Records(...) from the first put on"
    )


@lru_cache(maxsize=4096)
def _remembered(data: bytes) -> Form:
    """A partition's puts say the same few forms over and over."""
    return Form._parse(data)
