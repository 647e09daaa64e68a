"""Names of torch and numpy dtypes, as they stand in a form and in a directory.

torch: the name without `torch.`. numpy: `dtype.str`, or for a structured dtype a JSON description that keeps names,
offsets, padding and sub-arrays.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Final

import numpy as np
import torch

_TORCH_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
)

_PLAIN: Final = re.compile(r"[<>|][biufcmMSUV][0-9]{1,18}(\[[0-9A-Za-z/]{1,32}\])?")

TORCH: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _TORCH_NAMES if hasattr(torch, name)}
TORCH_NAME: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH.items()}


class UnknownDtype(ValueError):
    """A dtype that cannot be carried, or a name that is none."""


def torch_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`.

    Raises:
        UnknownDtype: quantised and sub-byte dtypes.
    """
    try:
        return TORCH_NAME[dtype]
    except KeyError:
        raise UnknownDtype(f"dtype {dtype} is not supported") from None


def torch_dtype(name: str) -> torch.dtype:
    """The reverse of `torch_name`.

    Raises:
        UnknownDtype: this torch has no dtype of that name.
    """
    try:
        return TORCH[name]
    except KeyError:
        raise UnknownDtype(f"torch {torch.__version__} has no dtype {name!r}") from None


@functools.lru_cache(maxsize=1024)
def numpy_name(dtype: np.dtype[Any]) -> str:
    """The name that `numpy_dtype` turns into an equal dtype.

    Raises:
        UnknownDtype: dtypes that hold objects, or that an extension module brought.
    """
    if dtype.names is None and dtype.subdtype is None:
        _check_plain(dtype)
        return dtype.str
    return json.dumps(_describe(dtype), separators=(",", ":"))


def _check_plain(dtype: np.dtype[Any]) -> None:
    # Strings of variable width and objects hold pointers; an extension's dtype has no name of its own.
    if dtype.hasobject or dtype.kind not in "?biufcmMSUV" or np.dtype(dtype.str) != dtype:
        raise UnknownDtype(f"dtype {dtype} is not supported")


def _describe(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is None:
        _check_plain(dtype)
        return dtype.str
    fields: Any = dtype.fields
    return {
        "names": list(dtype.names),
        "formats": [_describe(fields[name][0]) for name in dtype.names],
        "offsets": [fields[name][1] for name in dtype.names],
        "titles": [fields[name][2] if len(fields[name]) > 2 else None for name in dtype.names],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


@functools.lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The reverse of `numpy_name`.

    Raises:
        UnknownDtype: the name is none, or it describes a dtype that holds objects.
    """
    try:
        dtype = _rebuild(json.loads(name) if name[:1] == "{" else name)
        supported = not dtype.hasobject and numpy_name(dtype) == name
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        SyntaxError,
        OverflowError,
        MemoryError,
    ) as error:
        raise UnknownDtype(f"{name!r:.200} is no dtype: {error!s:.200}") from None
    if not supported:
        raise UnknownDtype(f"{name!r:.200} is no dtype that is supported")
    return dtype


def loses(dtype: np.dtype[Any]) -> str:
    """What of a dtype its name does not say, so that it would not come back; empty if nothing."""
    if dtype.metadata:
        return "its metadata"
    if dtype.type is np.record:
        return "its record type"
    parts = [dtype.subdtype[0]] if dtype.subdtype else [field[0] for field in (dtype.fields or {}).values()]
    return next(filter(None, map(loses, parts)), "")


def _rebuild(tree: Any) -> np.dtype[Any]:
    if isinstance(tree, str):
        if not _PLAIN.fullmatch(tree):  # np.dtype understands more, and some of it with a warning
            raise ValueError(f"{tree!r} is no plain dtype")
        return np.dtype(tree)
    if "base" in tree:
        return np.dtype((_rebuild(tree["base"]), tuple(tree["shape"])))
    description: Any = {
        "names": tree["names"],
        "formats": [_rebuild(field) for field in tree["formats"]],
        "offsets": tree["offsets"],
        "itemsize": tree["itemsize"],
    }
    if any(tree["titles"]):
        description["titles"] = tree["titles"]
    dtype: np.dtype[Any] = np.dtype(description, align=bool(tree["aligned"]))
    return dtype


def torch_itemsize(name: str) -> int:
    """Bytes of one element."""
    return torch_dtype(name).itemsize


def itemsize(container: str, name: str) -> int:
    """Bytes of one element of a dense or ragged form.

    Raises:
        UnknownDtype: the name is none.
    """
    return numpy_dtype(name).itemsize if container == "numpy" else torch_itemsize(name)
