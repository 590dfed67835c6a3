"""Agreement between ranks before the first step: comparisons, and one rank's model for the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import polytempo
from polytempo.collectives import tree
from polytempo.core import Bundle, Mismatch, Port, Strategy
from polytempo.core.bundle import by_kind
from polytempo.spec.text.plain_values import written
from polytempo.training.model.parted_parameters import own_parameters
from polytempo.training.model.ports import Ports, mesh_of
from polytempo.worlds import ProcessWorld

_NOTHING = "nothing"
_SHARE_CHANNEL = 1021
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


async def share_of(port: Port, weight: float) -> float:
    """This rank's part of all ranks' weights; 0 where all are 0. Cost: 8 bytes up and down a tree."""
    total = float(await tree(port.on_channel(_SHARE_CHANNEL), torch.tensor([weight], dtype=torch.float64)))
    return weight / total if total else 0.0


def next_series(world: ProcessWorld) -> int:
    """The number of one more model that is trained in a world, the same on all ranks, which all call it."""
    number: int = max(world.drive(gather_json(world.port, world.num_series)))
    world.num_series = number + 1
    return number


async def agree(port: Port, facts: Mapping[str, Any]) -> None:
    """Compare JSON-able `facts` between all ranks; on any difference every rank raises `Mismatch`.

    The error names the ranks, the fact and both values. A dictionary is compared key by key, a list place by
    place, unless all that it holds are numbers.
    """
    described = await gather_json(port, dict(facts))
    for rank, theirs in enumerate(described):
        _refuse(port, rank, described[0], theirs)


def _refuse(port: Port, rank: int, first: Any, theirs: Any) -> None:
    difference = _first_difference("", first, theirs)
    if difference:
        name, value, other = difference
        a, b = port.members[0], port.members[rank]
        raise Mismatch(f"ranks disagree about {name}: rank {a} has {value!r}, rank {b} has {other!r}")


def _first_difference(name: str, a: Any, b: Any) -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in list(a) + [key for key in b if key not in a]:
            path = f"{name}.{key}" if name else str(key)
            found = _first_difference(path, a.get(key, _NOTHING), b.get(key, _NOTHING))
            if found:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list) and any(isinstance(part, str | list | dict) for part in [*a, *b]):
        for i, (mine, theirs) in enumerate(zip_longest(a, b, fillvalue=_NOTHING)):
            found = _first_difference(f"{name}[{i}]", mine, theirs)
            if found:
                return found
        return None
    return None if a == b else (name, a, b)


async def agree_to_train(
    ports: Ports, model: nn.Module, optimizer: Optimizer, strategy: Strategy, asked: Mapping[str, Any]
) -> None:
    """Compare the ranks' models, optimizers and strategies, and the options `asked` of `attach`.

    All ranks have the same mesh, strategy and options; ranks along "data" the same model and optimizer, too.

    Parameters and buffers are compared by name, place, shape and dtype; optimizers by class, and each of their groups
    by its options and the names of its parameters. If rank 0's optimizer has state and another rank's has none (one
    rank has loaded a checkpoint), options are not compared between these two: they come from rank 0 with the state.
    """
    software = {"polytempo": polytempo.__version__, "torch": torch.__version__}
    of_all = {"mesh": str(mesh_of(ports.whole)), **software, "strategy": str(strategy), **asked}
    of_part = {**_of_model(model), **_of_optimizer(model, optimizer)}
    if ports.model.size == 1:
        await _agree_on_part(ports.whole, of_all | of_part)
    else:
        await agree(ports.whole, of_all)
        await _agree_on_part(ports.data, of_part)


async def _agree_on_part(port: Port, facts: Mapping[str, Any]) -> None:
    described = await gather_json(port, dict(facts))
    first = described[0]
    for rank, theirs in enumerate(described):
        loaded = first.get("optimizer has state") and not theirs.get("optimizer has state")
        left_out = {"optimizer has state"} | ({"optimizer options"} if loaded else set())
        _refuse(port, rank, *({key: facts[key] for key in facts if key not in left_out} for facts in (first, theirs)))


def _of_model(model: nn.Module) -> dict[str, Any]:
    """Names are compared as keys first, which shows missing names, and then by place."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    own = own_parameters(model)  # ranks have parts of other shapes
    shapes = {name: None if name in own else list(p.shape) for name, p in parameters.items()}
    return {
        "model": {n: json.dumps([shapes[n], str(p.dtype), p.requires_grad]) for n, p in parameters.items()},
        "model's buffers": {name: json.dumps([list(b.shape), str(b.dtype)]) for name, b in buffers.items()},
        "model's order of parameters": list(parameters),
        "model's order of buffers": list(buffers),
    }


def _of_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "optimizer groups": [[names.get(id(p), f"{list(p.shape)} of no module") for p in g["params"]] for g in groups],
        "optimizer has state": any(optimizer.state.values()),
        "optimizer options": [
            {key: written(value) for key, value in group.items() if key != "params"} for group in groups
        ],
    }


async def broadcast_model(
    port: Port,
    model: nn.Module,
    shared: frozenset[str] = frozenset(),
    *,
    source: int = 0,
    into: frozenset[int] | None = None,
) -> None:
    """Give the parameters and buffers of `source` to the ranks in `into` (None: to all); not parameters in `shared`."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if name not in shared}
    everything = parameters | dict(model.named_buffers())
    for group in by_kind(everything).values():
        bundle = Bundle(group)
        flat = await port.broadcast(bundle.flat, source)
        if port.rank != source and (into is None or port.rank in into):
            torch._foreach_copy_(list(group.values()), list(bundle.with_flat(flat).views.values()))
