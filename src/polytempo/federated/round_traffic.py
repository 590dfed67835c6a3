"""`round_traffic`: bytes of the tensors between a server of rounds and one client, as `polytempo serve` sends them.

down   the model, or its codes; buffers and frozen tensors; the server's control variate        a file of named tensors
up     the movement, or its codes; the change of the client's control variate                   a file of named tensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polytempo.compression.exchange.packing import EXACT_BELOW
from polytempo.core import Codec, Strategy
from polytempo.federated.rounds import CONTROL

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Safetensors' names, in its order: a file begins with the last ones."""
_ALIGNMENT = 8


class RoundTraffic(NamedTuple):
    """A round of clients on machines of their own. A message has some 100 bytes beside its tensors."""

    clients: int
    """Clients of a round; with `private` the expected number."""
    down_bytes: int
    """Bytes to one client."""
    up_bytes: int
    """Bytes from one client."""
    exact: bool
    """False where a code's bytes depend on the values: then these are the most."""


def round_traffic(strategy: Strategy, parameters: nn.Module | Mapping[str, Tensor]) -> RoundTraffic | None:
    """The bytes of a round of `strategy`; None where it has no rounds, or none of real clients.

    `parameters`: a model, also on the meta device, or its trained tensors by name. A strategy that keeps some at the
    client needs the model: without it the answer is None, too.
    """
    rounds = strategy.rounds
    if rounds is None or rounds.secure is not None:
        return None
    if rounds.local.keeps is not None and not isinstance(parameters, nn.Module):
        return None
    whole: dict[str, Tensor]
    trained: dict[str, Tensor]
    if isinstance(parameters, nn.Module):
        whole = {**dict(parameters.named_parameters()), **dict(parameters.named_buffers())}
        kept = rounds.local.kept(parameters)
        trained = {n: p for n, p in parameters.named_parameters() if p.requires_grad and n not in kept}
    else:
        whole, trained = dict(parameters), dict(parameters)
    controls = {f"{CONTROL}{n}": each for n, each in trained.items() if rounds.local.controls}
    down = whole | {n: _wire(each, rounds.pull_codec) for n, each in trained.items()} | controls
    up = {n: _wire(each, rounds.codec) for n, each in trained.items()} | controls
    codecs = [each for each in (rounds.codec, rounds.pull_codec) if each is not None]
    return RoundTraffic(
        rounds.number if rounds.privacy is None else rounds.privacy.cohort,
        file_bytes(down),
        file_bytes(up),
        all(each.facts.fixed for each in codecs),
    )


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of named tensors as a safetensors file."""
    order = list(_NAMES)
    header, begin = dict[str, object](), 0
    for name in sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name)):
        each = tensors[name]
        end = begin + each.numel() * each.element_size()
        header[name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return _ALIGNMENT + -(-len(text) // _ALIGNMENT) * _ALIGNMENT + begin


def _wire(tensor: Tensor, codec: Codec | None) -> Tensor:
    """A tensor like the code, where there is one."""
    if codec is None or tensor.numel() < EXACT_BELOW:
        return tensor
    dtype = codec.wire_dtype(tensor)
    return torch.empty(codec.wire_bytes(tensor) // dtype.itemsize, dtype=dtype, device="meta")
