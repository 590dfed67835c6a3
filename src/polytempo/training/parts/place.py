"""`place`: the branches of a model on several ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from polytempo.core import Port
from polytempo.core.suspension import drive
from polytempo.partition.branches.placed_model import PlacedModel, placed
from polytempo.partition.tensor import ModelGroup
from polytempo.training.model.agree import agree
from polytempo.training.parts.split import model_port, take_first
from polytempo.worlds import ProcessWorld, current


def place(model: nn.Module, *, sample: Any, world: ProcessWorld | None = None, port: Port | None = None) -> PlacedModel:
    """Keep this rank's branches of `model`; returns the placed model, which takes the place of `model`.

        pt.init(mesh={"data": 1, "model": 2})
        model = pt.place(net, sample=x)
        optimizer = torch.optim.AdamW(model.parameters())
        pt.attach(model, optimizer, pt.strategies.sync_sgd())

    The branches that `pt.threads` finds for threads go to the ranks along the axis "model" of the mesh instead, each
    where it ends the soonest. A tensor that passes between two ranks is sent once to each that needs it, and its
    gradient once back; the model's answer is on all ranks, which compute the same loss and all call backward. Every
    rank makes the whole model and takes the parameters of the first; then it keeps its own branches' parameters, under
    their names. `full_parameters()` and `full_gradients()` show the whole model's, `places` the rank of each branch.

    `sample` holds the model's arguments; batches may have other sizes. `port`: this rank's place in another world
    than a process world, such as a virtual one. There, `place`, forward and backward passes are called inside of
    `await suspendable(…)` (`polytempo.core.suspension`).

    The results equal one process's, except for random numbers: a dropout draws from its own rank's. Clipping
    by `handle.clip_grad_norm_`, or by torch's, which all ranks call, is by the whole model's norm. The first pass with
    inputs of new sizes sends the sizes.

    Errors: `Mismatch` where ranks have other models; ValueError for a model without branches, for one that cannot be
    traced, for a parameter that branches of two ranks would share, and, in a pass, for inputs that need a gradient.

    Source: J. Dean et al., "Large scale distributed deep networks", 2012, section 3: a model partitioned across
    machines; each computes its nodes and sends values to the machines that need them. There the user places the nodes.
    """
    whole = port or (world or current()).port
    group = ModelGroup(model_port(whole), drive if port is not None else (world or current()).drive)
    if group.size > 1:
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        group.drive(agree(group.port, {"model": shapes}))
        group.drive(take_first(group.port, model))
    return placed(model, sample, group)
