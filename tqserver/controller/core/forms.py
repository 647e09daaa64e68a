"""Which fields lie within the form of one, and have lengths."""

from __future__ import annotations

from collections.abc import Iterator

from tqclient.schema import Form


def ragged_paths(path: str, form: Form) -> Iterator[str]:
    """Names the ragged fields in a form: itself, or children of structs (`images.pixels`)."""
    if form.kind == "ragged":
        yield path
    for key, child in form.children:
        yield from ragged_paths(f"{path}.{key}", child)


def dense_lengths(path: str, form: Form) -> Iterator[tuple[str, int]]:
    """Names the dense fields in a form whose rows have a leading dimension, likewise, each with that."""
    if form.row_length is not None:
        yield path, form.row_length
    for key, child in form.children:
        yield from dense_lengths(f"{path}.{key}", child)
