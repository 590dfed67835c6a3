"""The state of an optimizer by its parameters' names, as checkpoints have it whose models were cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from polytempo.spec.text.plain_values import typed
from polytempo.training.checkpoint.checkpoint_files import ForeignCheckpoint
from polytempo.training.checkpoint.optimizer_state import load_exactly

NAMES = "optimizer parameters"
"""The scalar that has the names of the optimizer's parameters, in its order."""


def optimizer_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The model's names of the optimizer's parameters, in the order in which its state counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def load_by_names(
    optimizer: Optimizer, names: list[str], state: Mapping[str, Any], groups: list[dict[str, Any]]
) -> None:
    """The optimizer's state by its parameters' names, and its groups' numbers by their order."""
    now = optimizer.state_dict()
    if len(groups) != len(now["param_groups"]):
        raise ForeignCheckpoint(
            f"the optimizer has {len(now['param_groups'])} parameter groups in this stage, and the saved one had "
            f"{len(groups)}; resume with as many stages as saved it"
        )
    taken = [
        {key: typed(value, old.get(key)) for key, value in group.items()} | {"params": old["params"]}
        for group, old in zip(groups, now["param_groups"], strict=True)
    ]
    mine = {index: dict(state[name]) for index, name in enumerate(names) if name in state}
    load_exactly(optimizer, {"state": mine, "param_groups": taken})


def under(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
