"""Reading ahead: what a claim makes of a preview, right or wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.client.fake_transport import FakeFetched
from tests.unit.client.fakes import FakeService
from tests.unit.client.test_get_and_claim import ROWS, consumer, flip_a_payload_byte
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.errors import ClaimTimeout, CorruptBlock
from tqclient.info import PartitionRef
from tqclient.operations.claims import ClaimHandle, claim, settle
from tqclient.operations.effects import Call
from tqclient.operations.put import put
from tqclient.operations.read import Delivery
from tqclient.samplers import Lifo
from tqclient.topology import Topology
from tqclient.wire.v1 import controller_pb2 as pb

BLOCK, OTHER = 100, 101
"""The blocks of the samples 1 to 3, and 4 to 6."""


class Previewing(FakeService):
    """Sends what is in `previews` ahead of the reply to the next claim that takes it."""

    def __init__(self, *paths: str) -> None:
        super().__init__(*paths)
        self.previews: list[bytes] = []

    def perform(self, effect: Any) -> Any:
        while self.previews and isinstance(effect, Call) and effect.preview is not None:
            effect.preview(self.previews.pop(0))
        return super().perform(effect)

    def preview(self, block: int) -> None:
        self.previews.append(pb.Preview(block=self.blocks[block]).SerializeToString())


@pytest.fixture
def service() -> Previewing:
    return Previewing()


@pytest.fixture
def filled(service: Previewing, ref: PartitionRef) -> Previewing:
    for _ in range(2):
        service.run(put(service.state, ref, ROWS, RowArguments(), None))
    return service


def do_claim(service: Previewing, ref: PartitionRef, size: int = 3, **options: Any) -> tuple[ClaimHandle, Delivery]:
    options = {"copy": True, "timeout": 5.0, **options}
    who = options.pop("who", consumer(ref))
    return service.run(claim(service.state, who, size, options.pop("copy"), options.pop("timeout"), **options))


def reads(service: FakeService) -> list[FakeFetched]:
    return service.first.transport.fetched


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("fields", [(), ("tokens",), ("name", "tokens")])
def test_what_was_read_ahead_is_handed_out_once_the_reply_names_it(
    filled: Previewing, ref: PartitionRef, copy: bool, fields: tuple[str, ...]
) -> None:
    filled.preview(BLOCK)
    handle, delivery = do_claim(filled, ref, copy=copy, who=consumer(ref, fields))
    assert len(reads(filled)) == 1
    assert delivery.rows.ids.tolist() == [1, 2, 3]
    assert list(delivery.columns) == list(fields or ROWS)
    batch = BatchData(filled.state, delivery)
    assert [row.tolist() for row in batch.list("tokens")] == [row.tolist() for row in ROWS["tokens"]]  # type: ignore[attr-defined]
    assert reads(filled)[0].closed == copy
    batch.verify()
    batch.close()
    assert reads(filled)[0].closed
    filled.run(settle(filled.state, handle, "released"))
    do_claim(filled, ref, who=consumer(ref, fields))
    assert filled.count("GetDirectories") == 0  # it is known


def test_the_last_of_several_previews_counts(filled: Previewing, ref: PartitionRef) -> None:
    filled.preview(OTHER)
    filled.preview(BLOCK)
    _, delivery = do_claim(filled, ref, copy=False)
    assert delivery.rows.ids.tolist() == [1, 2, 3]
    assert [each.closed for each in reads(filled)] == [True, False]
    delivery.holdings.close()


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_rows_of_another_block_or_not_all_of_it_are_read_anew(
    filled: Previewing, ref: PartitionRef, copy: bool, size: int
) -> None:
    filled.preview(BLOCK)
    _, delivery = do_claim(filled, ref, size, copy=copy)
    assert delivery.rows.ids.tolist() == list(range(1, size + 1))
    assert delivery.columns["name"].list() == ["a", "b", "c", "a", "b", "c"][:size]
    assert reads(filled)[0].closed
    assert len(reads(filled)) > 1
    delivery.holdings.close()


def test_the_same_rows_of_another_block_are_read_anew(filled: Previewing, ref: PartitionRef) -> None:
    filled.preview(OTHER)
    _, delivery = do_claim(filled, ref, copy=False)
    assert delivery.rows.ids.tolist() == [1, 2, 3]
    assert [each.closed for each in reads(filled)] == [True, False]
    delivery.holdings.close()


def test_a_field_whose_form_was_not_known_is_read_anew(service: Previewing, ref: PartitionRef) -> None:
    """Its partition holds it as ragged rows, of which this dense block may be some."""
    ragged = {"x": [torch.arange(3), torch.arange(2)]}
    service.run(put(service.state, ref, {"x": torch.arange(6).view(2, 3)}, RowArguments(), None))
    block = next(iter(service.blocks))
    service.forms.clear()
    service.run(put(service.state, PartitionRef(1, "train", {}), ragged, RowArguments(), None))
    service.preview(block)
    _, delivery = do_claim(service, PartitionRef(1, "train", {}), 2)
    assert delivery.columns["x"].form.kind == "ragged"
    assert len(reads(service)) == 2


@pytest.mark.parametrize("copy", [True, False])
def test_damage_is_found_as_without_a_preview(filled: Previewing, ref: PartitionRef, copy: bool) -> None:
    flip_a_payload_byte(filled)
    filled.preview(BLOCK)
    with pytest.raises(CorruptBlock, match="field 'name', row 0, sample 1: ") as caught:
        do_claim(filled, ref, copy=copy)  # texts are copied in any case
    assert list(caught.value.ids) == [1]
    assert all(each.closed for each in reads(filled))
    assert len(filled.state.lost_claims) == 1


def test_damage_in_views_that_were_read_ahead_names_their_samples(filled: Previewing, ref: PartitionRef) -> None:
    filled.preview(BLOCK)
    _, delivery = do_claim(filled, ref, copy=False)
    batch = BatchData(filled.state, delivery)
    batch.list("tokens")[1][2] += 1
    with pytest.raises(CorruptBlock, match="field 'tokens', row 0, sample 1: "):  # the unit's first row
        batch.verify(["tokens"])
    batch.close()


@pytest.mark.parametrize("body", [b"\xff\xff", b"", pb.Preview(block=pb.BlockWrite(rows=3)).SerializeToString()])
def test_a_preview_that_makes_no_sense_changes_nothing(filled: Previewing, ref: PartitionRef, body: bytes) -> None:
    filled.previews.append(body)
    _, delivery = do_claim(filled, ref)
    assert delivery.columns["name"].list() == ["a", "b", "c"]
    assert len(reads(filled)) == 1


def test_a_claim_that_is_not_granted_lets_go(filled: Previewing, ref: PartitionRef) -> None:
    filled.preview(BLOCK)
    with pytest.raises(ClaimTimeout):
        do_claim(filled, ref, 7, copy=False, timeout=1.0)
    assert [each.closed for each in reads(filled)] == [True]


def test_only_memory_that_is_mapped_is_read_ahead(ref: PartitionRef) -> None:
    service = Previewing("grpc")
    service.run(put(service.state, ref, ROWS, RowArguments(), None))
    service.preview(BLOCK)
    _, delivery = do_claim(service, ref)
    assert delivery.columns["name"].list() == ["a", "b", "c"]
    assert len(reads(service)) == 1


def test_claims_that_may_be_given_rows_in_another_order_or_in_parts_take_no_previews(
    filled: Previewing, ref: PartitionRef
) -> None:
    plain = consumer(ref)
    do_claim(filled, ref, 1)
    do_claim(filled, ref, 1, who=replace(plain, sampler=Lifo()))
    do_claim(filled, ref, 1, who=replace(plain, topology=Topology(dp=1, rank=0)))
    do_claim(filled, ref, 1, max_tokens=100, who=replace(plain, token_field="tokens"))
    do_claim(filled, ref, 1, ranges={"tokens": (0, 1)})
    asked = [request.preview for method, request in filled.calls if method == "Claim"]
    assert asked == [True, False, False, False, False]
