"""Samples by key: what the key-value functions and the client's `kv_` methods stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tqclient.compat.transfer_queue import lookup, tags
from tqclient.compat.transfer_queue.batch_meta import BatchMeta
from tqclient.compat.transfer_queue.columns import MARKER, TURNED, describe, marked, select_rows, to_tensordict
from tqclient.compat.transfer_queue.config import names
from tqclient.compat.transfer_queue.connection import Connection, twin
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError
from tqclient.compat.transfer_queue.lookup import Rows
from tqclient.compat.transfer_queue.taking import Ledger
from tqclient.errors import InvalidArgument, SampleNotFound
from tqclient.partition import Partition
from tqclient.schema import Form


class Keys(Connection):
    """A connection that finds samples by key."""

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Finds samples by key.

        Args:
            keys: one or several.
            partition_id: where.
            create: make samples, without fields, for keys that have none.

        Returns:
            Their metadata, with the fields that all of them have. They are ready when there is one.

        Raises:
            StorageKeyNotFoundError: keys have no sample, and are not to be made; names all of them.
        """
        wanted = checked_keys(keys)
        if create:
            self.upsert(wanted, partition_id, {}, None)
        rows, fields = self.described(wanted, partition_id)
        status = np.full(len(rows.ids), bool(fields), np.int8)
        return self.found(partition_id, lambda part: meta_of(part, rows, fields, status))

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str | None]:
        """Returns the keys of samples; None for one that has none.

        Raises:
            StorageKeyNotFoundError: a sample does not exist.
        """
        ids = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        if not ids:
            raise InvalidArgument("global_indexes: give one at least")
        return self.found(partition_id, lambda part: lookup.locate(part, [MARKER], ids=ids)).keys

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Lists keys with their tags, by partition: one, or all. A partition that does not exist is not in it."""
        listed: dict[str, dict[str, Any]] = {}
        for name in names(self.service) if partition_id is None else [partition_id]:
            try:
                rows = self.on(name, lambda part, _: lookup.listing(part))
            except StorageKeyNotFoundError:
                continue
            listed[name] = {
                key: tags.decode(each) for key, each in zip(rows.keys, rows.tags, strict=True) if key is not None
            }
        return listed

    def upsert(
        self, keys: list[str], partition_id: str, columns: Mapping[str, Any], given: list[dict[str, Any]] | None
    ) -> None:
        """Puts fields and tags under keys, those of new samples and of samples that exist, all at once."""
        complete = marked(columns, len(keys))
        encoded = None if given is None else [tags.encode(each) for each in given]
        size = self.settings.sampler.group_size

        def put(part: Partition, _: Ledger) -> None:
            if size == 1:
                part.put(complete, keys=keys, tags=encoded, upsert=True)
                return
            known = self._known(part, keys)
            fresh = [row for row, key in enumerate(keys) if key not in known]
            with_tags = [dict[str, Any]() for _ in keys] if encoded is None else encoded
            if fresh:
                self.put_grouped(
                    part,
                    len(fresh),
                    size,
                    lambda groups: part.put(
                        select_rows(complete, fresh),
                        keys=[keys[row] for row in fresh],
                        tags=[with_tags[row] for row in fresh],
                        groups=groups,
                        upsert=True,
                    ),
                )
            older = [row for row, key in enumerate(keys) if key in known]
            if older:
                part.put(
                    select_rows(complete, older),
                    keys=[keys[row] for row in older],
                    tags=[with_tags[row] for row in older],
                    upsert=True,
                )

        self.on(partition_id, put, create=True)

    @staticmethod
    def _known(part: Partition, keys: Sequence[str]) -> set[str]:
        left = list(keys)
        while left:
            try:
                lookup.locate(part, [MARKER], keys=left)
                break
            except SampleNotFound as error:
                if not error.rows or error.ids:  # no field yet, so no sample
                    return set()
                gone = set(error.rows)
                left = [key for row, key in enumerate(left) if row not in gone]
        return set(left)

    def described(self, keys: list[str], partition_id: str) -> tuple[Rows, list[str]]:
        """Returns samples by key, and the fields that all of them have.

        Raises:
            StorageKeyNotFoundError: keys have no sample; names all of them.
        """

        def look(part: Partition) -> tuple[Rows, list[str]]:
            every = [field for field in part._ref.fields if field != MARKER]
            try:
                return lookup.locate(part, [*every, MARKER], keys=keys), every
            except SampleNotFound as error:
                if not error.ids:
                    raise
            rows = lookup.locate(part, [MARKER], keys=keys)
            info = part.describe()
            return rows, [
                name
                for name, field in info.fields.items()
                if name != MARKER
                and (field.written == info.samples or (field.written and _all_have(part, name, rows.ids)))
            ]

        return self.found(partition_id, look)

    def read(self, keys: list[str], partition_id: str, fields: list[str] | None) -> Any:
        """Reads samples by key.

        Args:
            keys: of the samples.
            partition_id: where.
            fields: one named twice is read once. None: those that all of the samples have. An empty list: none, which
                is an empty TensorDict.

        Raises:
            StorageKeyNotFoundError: a key has no sample, or a sample lacks a field; names all of them.
        """
        wanted = list(dict.fromkeys(fields or ()))
        if not wanted:
            _, known = self.described(keys, partition_id)
            if not known:
                raise StorageKeyNotFoundError(f"partition {partition_id!r}: the samples have no field in common")
            if fields is not None:
                return to_tensordict({}, 0)
            wanted = known
        batch = self.found(partition_id, lambda part: part.get(keys=keys, fields=wanted))
        return to_tensordict(dict(batch.items()), len(keys))

    async_kv_retrieve_meta = twin(kv_retrieve_meta)
    async_kv_retrieve_keys = twin(kv_retrieve_keys)
    async_kv_list = twin(kv_list)


def checked_keys(keys: list[str] | str) -> list[str]:
    """Returns one or several keys as a list.

    Raises:
        InvalidArgument: there is none, or one is no string.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not wanted or not all(isinstance(key, str) for key in wanted):
        raise InvalidArgument(f"keys={keys!r:.200}: expected a str, or a list of at least one")
    return wanted


def meta_of(part: Partition, rows: Rows, fields: Sequence[str], status: Any) -> BatchMeta:
    """Returns the metadata of samples."""
    schema = {name: _entry(part._ref.form(name)) for name in fields}
    custom = [tags.decode(each) for each in rows.tags]
    return BatchMeta(rows.ids, [part.name] * len(rows.ids), schema, status, custom_meta=custom)


def _all_have(part: Partition, field: str, ids: Sequence[int]) -> bool:
    try:
        lookup.locate(part, [field], ids=ids)
    except SampleNotFound:
        return False
    return True


def _entry(form: Form | None) -> dict[str, Any]:
    if form is not None and form.kind == "struct" and TURNED in dict(form.children):
        return _entry(dict(form.children)[TURNED])
    if form is None or form.kind in ("list", "struct") or form.container == "numpy":
        return describe(None, None)
    dtype = getattr(torch, form.dtype)
    return describe(dtype, None, nested=True) if form.kind == "ragged" else describe(dtype, tuple(form.shape))
