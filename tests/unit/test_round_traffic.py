"""Bytes of named tensors as a file, against the library that writes one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

import polytempo as pt
from polytempo import federated as fed
from polytempo.spec.explanation import file_bytes, round_traffic

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64]


@pytest.mark.parametrize(
    "tensors",
    [
        {"one": torch.zeros(1)},
        {"b": torch.zeros(3, 70), "a": torch.zeros(()), "ü": torch.zeros(0, 4), 'quoted"': torch.zeros(2)},
        {str(dtype): torch.zeros(37 * i + 1, dtype=dtype) for i, dtype in enumerate(DTYPES)},
        {f"layers.{i}.weight": torch.zeros(100 + i, dtype=torch.float64) for i in range(30)},
    ],
    ids=["one", "names", "dtypes", "many"],
)
def test_the_bytes_of_a_file(tensors: dict[str, Tensor]) -> None:
    assert file_bytes({name: each.to("meta") for name, each in tensors.items()}) == len(save(tensors))


def test_what_a_client_keeps_does_not_come_back() -> None:
    """The server's first values of a head go to a client that has none."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    whole, kept = round_traffic(fed.fed_avg(), model), round_traffic(fed.fed_rep(), model)
    assert whole is not None
    assert kept is not None
    assert kept.down_bytes == whole.down_bytes
    assert kept.up_bytes < whole.up_bytes
    assert round_traffic(fed.fed_rep(), dict(model.named_parameters())) is None
    for unserved in (pt.strategies.sync_sgd(), fed.secure(fed.fed_buff()), fed.fed_buff(lost=0.1)):
        assert round_traffic(unserved, model) is None
    assert pt.explain(fed.private(fed.fed_avg(cohort=7)), parameters=model).round == whole._replace(clients=7)


def test_a_secure_sum_is_of_the_tensors_that_travel() -> None:
    """Keys and shares go both ways beside the model and the masked words."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    plain, masked = round_traffic(fed.fed_rep(10), model), round_traffic(fed.secure(fed.fed_rep(10), 64), model)
    assert plain is not None
    assert masked is not None
    assert masked.numel == 4 * 5 + 5
    assert masked.plain_bytes == 4 * masked.numel
    assert masked.up_bytes == fed.secure_bytes(10, masked.numel, 64)
    assert masked.down_bytes == plain.down_bytes + 10 * 96 + 9 * 82
