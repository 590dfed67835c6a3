"""Kernels of codecs for accelerators in Triton's interpreter: the wires of torch. They need TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from native.kernels import assert_same_bits, by_torch, numbers
from polytempo.compression import int8, one_bit, qsgd, top_k
from polytempo.compression.encoding.coded import Coded
from polytempo.compression.kernels import on_device
from polytempo.core import ALONE, NotFinite
from polytempo.native.kernels import codes_dense

CODECS: list[Coded] = [
    *(int8(block) for block in (1, 7, 256, 5000)),
    one_bit(),
    *(qsgd(levels, bucket, 3) for levels, bucket in ((7, 128), (1, 64), (127, 100), (3, 9000), (300, 7))),
    *(top_k(ratio) for ratio in (0.001, 0.01, 0.4, 1.0)),
]
SHAPES = [(1,), (31,), (33,), (5, 1), (1, 1024), (3, 1027), (40, 64), (2, 3, 5), (9000,)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.facts.name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that ran: tensors of the CPU are as on a device, and the native core is away."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"
    names: list[str] = []
    run = on_device._run

    def noted(name: str, *arguments: Any, **constants: Any) -> None:
        names.append(name)
        run(name, *arguments, **constants)

    monkeypatch.setattr(on_device, "_run", noted)
    monkeypatch.setattr(on_device, "_driven", lambda: "cpu")
    monkeypatch.setattr(codes_dense, "available", lambda: False)
    return names


@every_codec
def test_kernels_and_torch_agree(started: list[str], codec: Coded) -> None:
    def everything(codec: Coded, shape: tuple[int, ...]) -> list[Tensor]:
        x, residual, out = numbers(shape, 1), numbers(shape, 2) / 3, numbers(shape, 3)
        room = torch.zeros(codec.wire_bytes(x) + 8, dtype=torch.uint8)
        fed, _ = codec.encode_(x, residual, out=room)
        codec.add_(fed, out)
        return [codec.encode(x)[0], fed.clone(), residual, out, codec.decode(fed, x)]

    for shape in SHAPES:
        begun = len(started)
        found = everything(codec, shape)
        assert len(started) > begun + 2, "torch did it"
        for ours, torchs in zip(found, everything(by_torch(codec), shape), strict=True):
            assert_same_bits(ours + 0, torchs + 0)  # of zeros either sign will do


@every_codec
def test_the_first_that_is_no_number_is_named_and_nothing_has_changed(started: list[str], codec: Coded) -> None:
    for index, bad in ((3 * 1027 - 1, math.nan), (2000, math.inf), (0, -math.inf)):
        x, left = numbers((3, 1027), 1), numbers((3, 1027), 2)
        x.view(-1)[index] = bad
        residual = left.clone()
        with pytest.raises(NotFinite) as caught:
            codec.encode_(x, residual)
        assert caught.value.index == index
        assert_same_bits(residual, left)
    assert started


def test_a_tensor_of_another_device_or_dtype_is_left_to_torch(started: list[str]) -> None:
    x = numbers((100,), 1).double()
    wire, _ = int8().encode(x)
    int8().add_(wire, torch.zeros_like(x), ALONE)
    assert not started
    assert not on_device.fits(torch.empty(4, device="meta"))
