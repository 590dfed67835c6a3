"""Before the first step: do all ranks run the same thing?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import polytempo
from polytempo.core import Mismatch, Port, Strategy

_MAX_BYTES = 64 * 2**20


async def gather_json(port: Port, value: Any) -> list[Any]:
    """Every rank's JSON-able `value`, in the order of ranks."""
    if port.size == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value, sort_keys=True).encode()), dtype=torch.uint8)
    lengths = [int(n) for n in await port.all_gather(torch.tensor([mine.numel()]))]
    if max(lengths) > _MAX_BYTES:
        raise ValueError(f"a text of {max(lengths)} bytes is too long to exchange (at most {_MAX_BYTES})")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    texts = await port.all_gather(padded)
    return [json.loads(bytes(text[:n].numpy())) for text, n in zip(texts, lengths, strict=True)]


async def agree(port: Port, facts: Mapping[str, Any]) -> None:
    """Compare JSON-able `facts` between all ranks; on any difference every rank raises `Mismatch`.

    The error names the ranks, the fact and both values. A fact that is a dictionary is compared key by key.
    """
    described = await gather_json(port, dict(facts))
    for rank, theirs in enumerate(described):
        difference = _first_difference("", described[0], theirs)
        if difference:
            name, value, other = difference
            raise Mismatch(f"ranks disagree about {name}: rank 0 has {value!r}, rank {rank} has {other!r}")


def _first_difference(name: str, a: Any, b: Any) -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in list(a) + [key for key in b if key not in a]:
            path = f"{name}.{key}" if name else str(key)
            found = _first_difference(path, a.get(key, "nothing"), b.get(key, "nothing"))
            if found:
                return found
        return None
    return None if a == b else (name, a, b)


def facts(model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> dict[str, Any]:
    """What all ranks must have in common before they train together."""
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return {
        "polytempo": polytempo.__version__,
        "torch": torch.__version__,
        "strategy": str(strategy),
        "optimizer": f"{type(optimizer).__name__} over groups of {groups} parameters",
        "model": {
            name: json.dumps([list(p.shape), str(p.dtype), p.requires_grad]) for name, p in model.named_parameters()
        },
    }
