"""Bandwidth of codecs on the device, beside a copy of the same tensor: bytes of the tensor by seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training import crewed, median_s

from polytempo import compression as c
from polytempo.bench.rank import BenchRank
from polytempo.core import Codec, EncodeContext

CODECS: dict[str, Codec] = {
    "fp16()": c.fp16(),
    "bf16()": c.bf16(),
    "int8()": c.int8(),
    "dynamic8()": c.dynamic8(),
    "one_bit()": c.one_bit(),
    "sign()": c.sign(),
    "threshold(density=0.01)": c.threshold(density=0.01),
    "top_k(0.01)": c.top_k(0.01),
    "random_k(0.01)": c.random_k(0.01),
    "qsgd()": c.qsgd(),
    "terngrad()": c.terngrad(),
    "natural()": c.natural(),
}


def codecs(device: str, num_values: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each codec, or its error."""

    def work(crew: BenchRank) -> list[dict[str, Any]]:
        card = torch.device(device, torch.accelerator.current_device_index())
        x = torch.randn(num_values).to(card)
        target = torch.empty_like(x)
        copy_s = median_s(lambda: target.copy_(x), card, repeats)
        copied = {"num_values": num_values, "copy_gb_per_s": 4e-9 * num_values / copy_s}
        return [{"codec": name, **copied, **_row(codec, x, repeats)} for name, codec in CODECS.items()]

    rows: list[dict[str, Any]] = crewed(work, 1)[0]
    return rows


def _row(codec: Codec, x: Tensor, repeats: int) -> dict[str, Any]:
    when, state = EncodeContext(), codec.init(x)
    try:
        wire, _ = codec.encode(x, state, when)
        encode_s = median_s(lambda: codec.encode(x, state, when), x.device, repeats)
        decode_s = median_s(lambda: codec.decode(wire, x, when), x.device, repeats)
    except Exception as error:  # the other codecs are measured
        return {"error": f"{type(error).__name__}: {error}"}
    num_bytes = 4e-9 * x.numel()
    ratio = x.numel() * 4 / (wire.numel() * wire.element_size())
    return {"ratio": ratio, "encode_gb_per_s": num_bytes / encode_s, "decode_gb_per_s": num_bytes / decode_s}
