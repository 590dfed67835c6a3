"""An optimizer's state as tensors and plain numbers, to send and to save without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from polytempo.core import Port
from polytempo.core.state import Saved


def optimizer_saved(optimizer: Optimizer, path: str = "optimizer") -> Saved:
    """The state's tensors as `path/<parameter>/<key>`, and everything else as one JSON text at `path`."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        numbers[str(index)] = {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{path}/{index}/{key}"] = value
            else:
                numbers[str(index)][key] = value
    groups = [{k: _plain(v) for k, v in group.items()} for group in state["param_groups"]]
    return Saved(tensors, {path: json.dumps({"groups": groups, "numbers": numbers})})


def optimizer_restore(optimizer: Optimizer, source: Saved, path: str = "optimizer") -> None:
    """Load what `optimizer_saved` returned. Settings that are tuples stay tuples."""
    text = source.scalars.get(path)
    if not isinstance(text, str):
        raise ValueError(f"no optimizer state under {path!r}")
    described = json.loads(text)
    now = optimizer.state_dict()
    if [len(g["params"]) for g in described["groups"]] != [len(g["params"]) for g in now["param_groups"]]:
        raise ValueError("the saved optimizer has other parameter groups than this one")
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in described["numbers"].items()}
    for name, tensor in source.tensors.items():
        if name.startswith(f"{path}/"):
            _, index, key = name.rsplit("/", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = [
        {key: tuple(value) if isinstance(old.get(key), tuple) else value for key, value in group.items()}
        for group, old in zip(described["groups"], now["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


async def broadcast_optimizer(port: Port, optimizer: Optimizer) -> None:
    """Give rank 0's optimizer state to all ranks; they may not have any yet. Hyper-parameters too."""
    mine = optimizer_saved(optimizer)
    layout = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in mine.tensors.items()}
    about = json.dumps({"text": mine.scalars["optimizer"], "layout": layout}).encode()
    length = int(await port.broadcast(torch.tensor([len(about)])))
    text = torch.zeros(length, dtype=torch.uint8)
    if port.rank == 0:
        text = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    described = json.loads(bytes((await port.broadcast(text)).tolist()))
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in described["layout"].items():
        given = (
            mine.tensors[name].detach().clone() if port.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        )
        tensors[name] = await port.broadcast(given)
    if port.rank:
        optimizer_restore(optimizer, Saved(tensors, {"optimizer": described["text"]}))


def _plain(value: Any) -> Any:
    """A hyper-parameter as JSON can hold it; a learning rate may be a tensor."""
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
