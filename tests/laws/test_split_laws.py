"""Every way to split a layer: output, loss and all gradients are one process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polytempo.core import Port
from polytempo.partition.tensor import Rules, column, row
from split_models import (
    RULES,
    SEQUENCE_RULES,
    VOCABULARY,
    Pass,
    Transformer,
    assert_equal,
    on_ranks,
    split_pass,
    whole_pass,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
RANKS = [1, 2, 3, 4]


def check(
    model: Callable[[], nn.Module],
    rules: Rules,
    inputs: Any,
    num_ranks: int,
    dtype: torch.dtype = torch.float64,
    *,
    sequence: bool = False,
) -> None:
    """All ranks against one process."""
    expected = whole_pass(model, inputs, dtype)

    def work(port: Port) -> Pass:
        return split_pass(model, rules, inputs, dtype, sequence=sequence, port=port)

    for found in on_ranks(num_ranks, work):
        assert_equal(found, expected, TOLERANCE[dtype])


def features(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def perceptron(bias: bool) -> Callable[[], nn.Module]:
    """Ten hidden features: 5 and 5, or 4, 3 and 3, or 3, 3, 2 and 2."""
    return lambda: nn.Sequential(nn.Linear(5, 10, bias=bias), nn.GELU(), nn.Linear(10, 6, bias=bias))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_linear_layers(num_ranks: int, bias: bool, dtype: torch.dtype) -> None:
    inputs = features(3, 5, dtype=dtype)
    check(perceptron(bias), {"0": "column", "2": "row"}, inputs, num_ranks, dtype)
    check(perceptron(bias), {"0": column(gather=True), "2": column(gather=True)}, inputs, num_ranks, dtype)
    check(perceptron(bias), {"0": "row", "2": "row"}, inputs, num_ranks, dtype)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(num_ranks: int, bias: bool) -> None:
    """Five channels between; a row layer behind a flattening takes whole channels, of nine places each."""

    def model() -> nn.Module:
        first = nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=bias)
        second = nn.Conv2d(5, 4, (3, 1), padding="same", dilation=1, bias=bias)
        return nn.Sequential(first, nn.ReLU(), second, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))

    images = features(2, 2, 5, 5)
    check(model, {"0": "column", "2": "row"}, images, num_ranks)
    check(model, {"0": column(gather=True), "2": "row"}, images, num_ranks)
    check(model, {"2": "column", "5": row(heads=4)}, images, num_ranks)
    check(lambda: nn.Sequential(nn.Conv1d(4, 6, 2, bias=bias)), {"0": "row"}, features(2, 4, 5), num_ranks)
    check(lambda: nn.Sequential(nn.Conv3d(4, 6, 2)), {"0": column(gather=True)}, features(1, 4, 2, 3, 2), num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("way", ["embedding", "column", "vocabulary"])
def test_embeddings(num_ranks: int, way: str) -> None:
    indices = torch.randint(0, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    rules: Rules = {"0": way} if way != "vocabulary" else {"0": "embedding"}

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 5, padding_idx=2), nn.Tanh(), nn.Linear(5, 3))

    check(model, rules, indices, num_ranks)


class Attention(nn.Module):
    """Attention with a mask, between features of two kinds where `cross`."""

    def __init__(self, *, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(12, 4, **options, **({"kdim": 5, "vdim": 7} if cross else {}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (x[..., :5], x[..., 5:]) if self.cross else (x, x)
        seen, batch = (x.shape[1], x.shape[0]) if self.attention.batch_first else (x.shape[0], x.shape[1])
        mask = torch.ones(batch * 4, seen, seen, dtype=torch.bool).triu(1)
        hidden = torch.zeros(batch, seen, dtype=torch.bool)
        hidden[0, -1] = True
        output, weights = self.attention(x, key, value, attn_mask=mask, key_padding_mask=hidden)
        _, each = self.attention(x, key, value, attn_mask=mask[0], average_attn_weights=False)
        plain, _ = self.attention(x, key, value, need_weights=False)
        return torch.cat([part.flatten() for part in (output, weights, each, plain)])


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("options", [{}, {"bias": False, "batch_first": True}, {"cross": True}], ids=str)
def test_attention(num_ranks: int, options: dict[str, Any]) -> None:
    check(lambda: Attention(**options), {"attention": "heads"}, features(3, 5, 12), num_ranks)


def test_attention_without_a_batch() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output, weights = self.attention(x, x, x)
            return torch.cat([output.flatten(), weights.flatten()])

    check(Single, {"attention": "heads"}, features(5, 12), 3)


@pytest.mark.parametrize("norm", ["norm_first", "dropout"])
def test_torch_transformer_layers(norm: str) -> None:
    rules: Rules = {"*.self_attn": "heads", "*.linear1": "column", "*.dropout": "column", "*.linear2": "row"}

    def model() -> nn.Module:
        options: dict[str, Any] = {"dropout": 0.3} if norm == "dropout" else {"dropout": 0.0, "norm_first": True}
        layer = nn.TransformerEncoderLayer(12, 4, 10, batch_first=True, **options)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    check(model, rules, features(3, 5, 12), 3)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_of_all_of_them_with_tied_weights(num_ranks: int, dropout: float, sequence: bool) -> None:
    indices = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    rules = SEQUENCE_RULES if sequence else RULES
    check(lambda: Transformer(dropout), rules, indices, num_ranks, sequence=sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_in_float32(sequence: bool) -> None:
    indices = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    rules = SEQUENCE_RULES if sequence else RULES
    check(lambda: Transformer(0.1), rules, indices, 3, torch.float32, sequence=sequence)


def test_row_takes_the_heads_of_the_column_before_it() -> None:
    rules: Rules = {"0": column(heads=3), "2": row(heads=3)}
    model = lambda: nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 6))  # noqa: E731
    check(model, rules, features(3, 5), 2)
