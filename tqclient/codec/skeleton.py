"""One Python value as msgpack, its tensors and arrays out of line.

What msgpack cannot say, or would say less exactly, is an extension type. Tensors and arrays (`leaves`) are written
elsewhere; the skeleton holds their dtype, shape and place. Nothing here imports a name or runs code that the bytes
choose, except for `PICKLE`, which both sides must have allowed.

Types are exact: a subclass of a builtin is refused, but for namedtuples, which become tuples.
"""

from __future__ import annotations

import datetime as dt
import enum
import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import buffers, dtypes
from tqclient.codec.header import aligned
from tqclient.codec.refusal import Refused, check_array, check_nested, check_tensor, step
from tqclient.errors import CorruptBlock, UnsupportedValue
from tqclient.schema import DEPTH_MAX

NESTING_MAX: Final = DEPTH_MAX - 1
"""Containers within containers, in one sample's value."""
_LEAF_NESTING: Final = 2
"""What the deepest container holds may be a NestedTensor, an extension around those of its rows."""
SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes, complex})

TUPLE, SET, FROZENSET, INTEGER, COMPLEX, SCALAR, NUMPY_STR, NUMPY_BYTES = range(1, 9)
DATETIME, DATE, TIME, TIMEDELTA, LEAF, NESTED, PICKLE = range(9, 16)

_COMPLEX: Final = struct.Struct("<dd")
_TIMES: Final = frozenset({dt.datetime, dt.date, dt.time, dt.timedelta})
_PACKED_OTHERWISE: Final = (bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp)
"""msgpack takes these as something else before it asks: they are refused even where pickling is allowed."""
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset, dict})


class Checker:
    """Tells whether values come back as they are.

    Args:
        allow_pickle: accept what `pickle` accepts.
        texts: look for lone surrogates too. The encoder meets those by itself, but cannot say where.
    """

    def __init__(self, *, allow_pickle: bool, texts: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._plain = SCALARS - {str} if texts else SCALARS

    def check(self, value: Any, depth: int) -> None:
        """Checks one value.

        Args:
            value: any.
            depth: containers around it.

        Raises:
            Refused: with the steps that lead to the offender.
        """
        kind = type(value)
        if kind in self._plain:
            return
        if kind is str:
            _check_text(value)
        elif kind in _CONTAINERS or _is_namedtuple(value):
            if depth >= NESTING_MAX:
                raise Refused(f"containers nest deeper than {NESTING_MAX}; flatten the value")
            if kind is dict:
                self._check_dict(value, depth)
            elif not self._plain.issuperset(map(type, value)):
                self._check_items(value, kind, depth)
        elif not _is_leaf(value, kind):
            if not self._allow_pickle or isinstance(value, _PACKED_OTHERWISE):
                raise Refused(_reason(value))
            pickled(value)

    def plain(self, values: Sequence[Any], depth: int) -> bool:
        """Whether values, `depth` containers deep, are scalars or lists of scalars: then there is nothing to check."""
        kinds = set(map(type, values))
        if kinds == {list} and depth < NESTING_MAX:
            kinds = set(map(type, itertools.chain.from_iterable(values)))
        return kinds <= self._plain

    def _check_items(self, value: Any, kind: type, depth: int) -> None:
        for index, item in enumerate(value):
            try:
                self.check(item, depth + 1)
            except Refused as refused:
                raise refused.within(f"[{index}]" if kind not in (set, frozenset) else "{...}") from None

    def _check_dict(self, value: dict[Any, Any], depth: int) -> None:
        if not self._plain.issuperset(map(type, value)):
            for key in value:
                try:
                    self.check(key, depth + 1)
                except Refused as refused:
                    raise refused.within(f" (key {key!r:.80})") from None
        if self._plain.issuperset(map(type, value.values())):
            return
        for key, item in value.items():
            try:
                self.check(item, depth + 1)
            except Refused as refused:
                raise refused.within(step(key)) from None


def _check_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"a text has a lone surrogate: {error}") from None


def _is_namedtuple(value: Any) -> bool:
    # msgpack's own ExtType is one as well, and would be taken for an extension of ours.
    return isinstance(value, tuple) and type(value) not in (tuple, msgpack.ExtType) and hasattr(value, "_fields")


def _is_leaf(value: Any, kind: type) -> bool:
    if isinstance(value, torch.Tensor):
        check = check_nested if value.is_nested else check_tensor
        check(value)
        return True
    if isinstance(value, np.ndarray):
        check_array(value)
        return True
    if isinstance(value, np.generic):
        return kind in (np.str_, np.bytes_) or (_names_dtype(value.dtype) and not dtypes.loses(value.dtype))
    if kind in (dt.datetime, dt.time):
        return value.tzinfo is None or type(value.tzinfo) is dt.timezone
    return kind in _TIMES


def pickled(value: Any) -> bytes:
    """A value that nothing else can carry.

    Raises:
        Refused: it cannot be pickled either.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever a user's __reduce__ raises
        raise Refused(f"pickling a {type(value).__qualname__} failed: {error!r}") from error


def _names_dtype(dtype: np.dtype[Any]) -> bool:
    try:
        dtypes.numpy_name(dtype)
    except dtypes.UnknownDtype:
        return False
    return True


def _reason(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        return f"an enum member ({value}) cannot be carried; put its .value or .name"
    if isinstance(value, (bytearray, memoryview)):
        return f"a {name} cannot be carried; convert it to bytes"
    if isinstance(value, (dt.datetime, dt.time)) and kind in _TIMES:
        return f"a time zone of type {type(value.tzinfo).__name__} cannot be carried; convert to datetime.timezone"
    for base in (bool, int, float, str, bytes, dict, list, tuple, set, frozenset):
        if isinstance(value, base):
            return f"a {name} would come back as a plain {base.__name__}; convert it, or allow pickling"
    return f"a {name} cannot be carried; convert it, or allow pickling by name on both sides"


class SkeletonWriter:
    """Encodes values that a `Checker` accepted, one after another.

    Attributes:
        leaves: (tensor or array, offset within the value's leaves) of the last value.
        leaf_bytes: what they take, a multiple of 64.
        pickled: whether any value so far was pickled.
    """

    def __init__(self) -> None:
        self.leaves: list[tuple[torch.Tensor | NDArray[Any], int]] = []
        self.leaf_bytes = 0
        self.pickled = False
        self._packer = self._new_packer()

    def _new_packer(self) -> Any:
        return msgpack.Packer(default=self._extension, strict_types=True)

    def encode(self, value: Any) -> bytes:
        """The skeleton of a value.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """
        self.leaves, self.leaf_bytes = [], 0
        return bytes(self._packer.pack(value))

    def encode_all(self, values: Sequence[Any]) -> list[bytes]:
        """The skeletons of values; of no use where `leaves` says afterwards that one of them has some.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """
        self.leaves, self.leaf_bytes = [], 0
        return list(map(self._packer.pack, values))

    def _pack(self, value: Any) -> bytes:
        return bytes(msgpack.packb(value, default=self._extension, strict_types=True))

    def _extension(self, value: Any) -> msgpack.ExtType:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._nested(value) if value.is_nested else self._leaf("torch", value)
        if isinstance(value, np.ndarray):
            return self._leaf("numpy", value)
        if kind in _ENCODERS:
            code, encode = _ENCODERS[kind]
            return msgpack.ExtType(code, encode(value))
        if kind is tuple or _is_namedtuple(value):
            return msgpack.ExtType(TUPLE, self._pack(list(value)))
        if kind in (set, frozenset):
            # Iteration order differs between processes; equal sets shall have equal bytes.
            items = b"".join(sorted(map(self._pack, value)))
            header = msgpack.Packer().pack_array_header(len(value))
            return msgpack.ExtType(SET if kind is set else FROZENSET, header + items)
        if isinstance(value, np.generic) and _names_dtype(value.dtype):
            return msgpack.ExtType(SCALAR, self._pack([dtypes.numpy_name(value.dtype), value.tobytes()]))
        self.pickled = True
        return msgpack.ExtType(PICKLE, pickled(value))

    def _leaf(self, container: str, value: Any) -> msgpack.ExtType:
        name = dtypes.torch_name(value.dtype) if container == "torch" else dtypes.numpy_name(value.dtype)
        offset = self.leaf_bytes
        self.leaves.append((value, offset))
        self.leaf_bytes = aligned(offset + value.nbytes)
        return msgpack.ExtType(LEAF, self._pack([container, name, list(value.shape), offset]))

    def _nested(self, value: torch.Tensor) -> msgpack.ExtType:
        layout = "jagged" if value.layout == torch.jagged else "strided"
        rows = list(value.unbind())
        # Without a row, nothing else says what the rows would be.
        empty = [] if rows else [dtypes.torch_name(value.dtype), list(value.shape[2:]) if layout == "jagged" else []]
        return msgpack.ExtType(NESTED, self._pack([layout, rows, *empty]))


def _timezone(zone: dt.tzinfo | None) -> list[Any] | None:
    if zone is None:
        return None
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [_microseconds(offset), *name]


def _microseconds(delta: dt.timedelta) -> list[int]:
    return [delta.days, delta.seconds, delta.microseconds]


def _of_datetime(value: dt.datetime) -> bytes:
    date = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.fold]
    return bytes(msgpack.packb([*date, _timezone(value.tzinfo)]))


def _of_time(value: dt.time) -> bytes:
    time = [value.hour, value.minute, value.second, value.microsecond, value.fold, _timezone(value.tzinfo)]
    return bytes(msgpack.packb(time))


_ENCODERS: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    int: (INTEGER, lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)),
    complex: (COMPLEX, lambda value: _COMPLEX.pack(value.real, value.imag)),
    np.str_: (NUMPY_STR, str.encode),
    np.bytes_: (NUMPY_BYTES, lambda value: b"".join((value,))),
    dt.datetime: (DATETIME, _of_datetime),
    dt.time: (TIME, _of_time),
    dt.date: (DATE, lambda value: msgpack.packb([value.year, value.month, value.day])),
    dt.timedelta: (TIMEDELTA, lambda value: msgpack.packb(_microseconds(value))),
}


class SkeletonReader:
    """Decodes the skeletons of consecutive values."""

    def __init__(self, data: bytes, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._leaves: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._depth = 0
        self._options: dict[str, Any] = {"ext_hook": self._extension, "strict_map_key": False}
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), **self._options)
        self._unpacker.feed(data)

    def next(self, stop: int, leaves: NDArray[np.uint8]) -> Any:
        """The next value.

        Args:
            stop: where its skeleton ends.
            leaves: uint8, the bytes of its tensors and arrays, which they will share.

        Raises:
            CorruptBlock: these are not the bytes of a value.
            UnsupportedValue: it was pickled, and pickling is not allowed here.
        """
        self._leaves = leaves
        try:
            value = self._unpacker.unpack()
        except UnsupportedValue:
            raise
        # A hostile skeleton reaches any constructor with any argument: whatever those raise means the same.
        except Exception as error:
            raise CorruptBlock(f"not a value: {error!r:.200}") from None
        if self._unpacker.tell() != stop:
            raise CorruptBlock("a value does not end where the directory says")
        return value

    def all(self, stops: Sequence[int]) -> list[Any] | None:
        """All values, which have no tensors and arrays, up to where each ends; None: `next` can tell what is wrong."""
        tell = self._unpacker.tell
        try:
            values = [value for stop, value in zip(stops, self._unpacker, strict=False) if tell() == stop]
        except Exception:  # a hostile skeleton reaches any constructor with any argument
            return None
        return values if len(values) == len(stops) else None

    def _unpack(self, data: bytes) -> Any:
        return msgpack.unpackb(data, **self._options)

    def _extension(self, code: int, data: bytes) -> Any:
        if code not in _DECODERS:
            raise CorruptBlock(f"extension type {code} does not exist")
        self._depth += 1
        if self._depth > NESTING_MAX + _LEAF_NESTING:
            raise CorruptBlock(f"extensions nest deeper than {NESTING_MAX + _LEAF_NESTING}")
        value = _DECODERS[code](self, data)
        self._depth -= 1
        return value

    def _leaf(self, data: bytes) -> Any:
        container, name, shape, offset = self._unpack(data)
        dtype: Any = dtypes.numpy_dtype(name) if container == "numpy" else dtypes.torch_dtype(name)
        size = dtype.itemsize
        for length in shape:
            size *= length
        if any(length < 0 for length in shape) or offset % 64 or not 0 <= offset <= self._leaves.size - size:
            raise CorruptBlock(
                f"a tensor of {size} bytes at {offset} lies outside of the {self._leaves.size} of its row"
            )
        part = self._leaves[offset : offset + size]
        if container == "numpy":
            return buffers.as_array(part, dtype, shape)
        return buffers.as_tensor(part, dtype, shape)

    def _nested(self, data: bytes) -> torch.Tensor:
        layout, rows, *empty = self._unpack(data)
        if rows:
            return nested_tensor(rows, layout)
        name, trailing = empty
        dtype = dtypes.torch_dtype(name)
        if layout == "jagged":
            return torch.nested.nested_tensor_from_jagged(
                torch.empty(0, *trailing, dtype=dtype), torch.zeros(1, dtype=torch.int64)
            )
        return torch.nested.nested_tensor([], dtype=dtype, layout=torch.strided)

    def _scalar(self, data: bytes) -> Any:
        name, raw = self._unpack(data)
        dtype = numpy_dtype_of_size(name, len(raw))
        scalar: Any = np.frombuffer(raw, dtype)[0] if raw else np.zeros((), dtype)[()]
        return scalar

    def _pickle(self, data: bytes) -> Any:
        if not self._allow_pickle:
            raise UnsupportedValue(
                "a value was pickled; reading it needs allow_pickle=True, which runs the writer's code"
            )
        return pickle.loads(data)

    def _datetime(self, data: bytes) -> dt.datetime:
        *date, fold, zone = self._unpack(data)
        return dt.datetime(*date, fold=fold).replace(tzinfo=_zone(zone))

    def _time(self, data: bytes) -> dt.time:
        *time, fold, zone = self._unpack(data)
        return dt.time(*time, fold=fold).replace(tzinfo=_zone(zone))


def numpy_dtype_of_size(name: str, size: int) -> np.dtype[Any]:
    """A dtype whose elements have `size` bytes.

    Raises:
        UnknownDtype: the name is none, or is of another size.
    """
    dtype = dtypes.numpy_dtype(name)
    if dtype.itemsize != size:
        raise dtypes.UnknownDtype(f"{name!r} does not have {size} bytes")
    return dtype


def nested_tensor(rows: Sequence[torch.Tensor], layout: str) -> torch.Tensor:
    """A NestedTensor of the given rows; copies them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged if layout == "jagged" else torch.strided)


def _zone(tree: list[Any] | None) -> dt.timezone | None:
    if tree is None:
        return None
    offset, *name = tree
    return dt.timezone(dt.timedelta(*offset), *name)


_DECODERS: Final[dict[int, Callable[[SkeletonReader, bytes], Any]]] = {
    TUPLE: lambda reader, data: tuple(reader._unpack(data)),
    SET: lambda reader, data: set(reader._unpack(data)),
    FROZENSET: lambda reader, data: frozenset(reader._unpack(data)),
    INTEGER: lambda reader, data: int.from_bytes(data, "little", signed=True),
    COMPLEX: lambda reader, data: complex(*_COMPLEX.unpack(data)),
    SCALAR: SkeletonReader._scalar,
    NUMPY_STR: lambda reader, data: np.str_(data.decode()),
    NUMPY_BYTES: lambda reader, data: np.bytes_(data),
    DATETIME: SkeletonReader._datetime,
    DATE: lambda reader, data: dt.date(*reader._unpack(data)),
    TIME: SkeletonReader._time,
    TIMEDELTA: lambda reader, data: dt.timedelta(*reader._unpack(data)),
    LEAF: SkeletonReader._leaf,
    NESTED: SkeletonReader._nested,
    PICKLE: SkeletonReader._pickle,
}
