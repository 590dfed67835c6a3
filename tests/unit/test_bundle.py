"""Bundles: one flat buffer, and windows into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polytempo.core import Bundle


def three() -> dict[str, Tensor]:
    """A matrix, a scalar and an empty tensor: 0 1 2 3 4 5 | 6 | ."""
    return {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(6.0), "none": torch.empty(0, 4)}


def test_flat_holds_all_values_in_the_order_of_names() -> None:
    assert Bundle(three()).names == ["w", "b", "none"]
    assert Bundle(three()).flat.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_nothing_is_packed_before_flat_is_asked_for() -> None:
    bundle = Bundle(three())
    assert not bundle.packed
    assert bundle.flat is bundle.flat
    assert bundle.packed


def test_packing_copies_and_leaves_the_tensors_alone() -> None:
    tensors = three()
    Bundle(tensors).flat.fill_(9)
    assert tensors["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_views_are_windows_into_flat() -> None:
    bundle = Bundle(three())
    assert {name: tuple(view.shape) for name, view in bundle.views.items()} == {"w": (2, 3), "b": (), "none": (0, 4)}
    bundle.flat[4] = 40
    bundle.views["b"].fill_(60)
    assert bundle.views["w"].tolist() == [[0, 1, 2], [3, 40, 5]]
    assert bundle.flat.tolist() == [0, 1, 2, 3, 40, 5, 60]


def test_tensors_that_are_not_contiguous_are_packed_in_their_own_order() -> None:
    assert Bundle({"t": torch.arange(6.0).view(2, 3).t()}).flat.tolist() == [0, 3, 1, 4, 2, 5]


def test_with_flat_keeps_names_shapes_and_share() -> None:
    other = Bundle(three(), share=0.25).with_flat(torch.ones(7))
    assert other.names == ["w", "b", "none"]
    assert other.share == 0.25
    assert other.views["w"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_map_and_copy_have_memory_of_their_own() -> None:
    bundle = Bundle(three(), share=0.5)
    doubled, copied = bundle.map(lambda flat: flat * 2), bundle.copy()
    bundle.flat.zero_()
    assert doubled.flat.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert copied.flat.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert (doubled.share, copied.share) == (0.5, 0.5)


def test_memory_that_is_lent_is_packed_into() -> None:
    memory = Bundle(three()).copy()
    place = memory.flat.data_ptr()
    packed = Bundle({name: tensor + 1 for name, tensor in three().items()}, into=memory)
    assert packed.flat.data_ptr() == place
    assert packed.views["w"].data_ptr() == place
    assert packed.flat.tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("already_packed", [False, True])
def test_scaled_multiplies_in_place_wherever_the_values_lie(lend: bool, already_packed: bool) -> None:
    memory = Bundle(three()).copy() if lend else None
    bundle = Bundle(three(), into=memory)
    assert not already_packed or bundle.flat is bundle.flat
    scaled = bundle.scaled(0.5)
    assert scaled.tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert bundle.flat is scaled
    assert bundle.views["w"].tolist() == [[0, 0.5, 1], [1.5, 2, 2.5]]


def test_select_takes_the_named_part_of_what_is_there_now() -> None:
    bundle = Bundle(three(), share=0.5)
    assert bundle.select(["b"]).flat.tolist() == [6]
    bundle.flat.neg_()
    assert bundle.select(["b", "w"]).flat.tolist() == [-6, 0, -1, -2, -3, -4, -5]
    assert bundle.select(["b"]).share == 0.5


def test_an_empty_bundle_is_empty() -> None:
    assert Bundle({}).flat.shape == (0,)
    assert Bundle({}).views == {}


def test_meta_tensors_have_a_flat_buffer_without_values() -> None:
    flat = Bundle({"w": torch.empty(3, 5, device="meta"), "b": torch.empty(7, device="meta")}).flat
    assert (flat.device.type, tuple(flat.shape)) == ("meta", (22,))


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5)


@given(shapes)
def test_views_return_what_was_packed(all_shapes: list[tuple[int, ...]]) -> None:
    tensors = {str(i): torch.randn(shape) for i, shape in enumerate(all_shapes)}
    bundle = Bundle(tensors)
    assert bundle.flat.numel() == sum(t.numel() for t in tensors.values())
    assert all(torch.equal(bundle.views[name], tensor) for name, tensor in tensors.items())
