"""`ProgramState`: a stage's passes and messages between two steps, and their saved form.

A late pipeline always has some batches between their forward and their backward pass. A checkpoint holds their inputs
and the versions of the parameters that they began with; their forward pass is computed again when the run goes on. For
a schedule without old versions ("current"), it holds autograd's tensors instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.core.state import Saved
from polytempo.partition.cut import Layout
from polytempo.training.pipeline.mail.sent_ahead import SentTensor
from polytempo.training.pipeline.stage_work import UnderWay

_PATH = "program"


class ProgramState(NamedTuple):
    """A stage after a step."""

    step: int
    updates: int
    """The parameters' version: the number of their updates."""
    num_entered: int
    entered: dict[int, int]
    """Number of the steps before, for each step with a batch."""
    older: dict[int, list[Tensor]]
    """Versions of the parameters but for the present one."""
    under_way: dict[tuple[int, int], UnderWay]
    layouts: dict[int, dict[str, Layout]]
    sent: list[SentTensor]
    gradients: list[Tensor | None] | None
    """Gradients of micro-batches before their update."""


def saved_state(state: ProgramState, about: Mapping[str, Any]) -> Saved:
    """The state as tensors by name and one JSON text, which has `about` as well.

    Errors: ValueError where a part is given something else than tensors.
    """
    tensors: dict[str, Tensor] = {}
    passes = []
    for (part, number), kept in state.under_way.items():
        path = f"pass/{part}/{number}"
        if not all(isinstance(each, Tensor) for each in kept.inputs):
            raise ValueError(
                "a checkpoint of a pipeline that does not wait holds the inputs of batches under way, and this model's "
                "are other than tensors; use a schedule that waits, such as one_f_one_b, or run without out"
            )
        for kind, several in (("inputs", kept.inputs), ("taken", kept.taken), ("saved", kept.saved or ())):
            tensors |= _listed(f"{path}/{kind}", several)
        tensors |= {f"{path}/buffer/{name}": buffer for name, buffer in kept.buffers.items()}
        passes.append([part, number, kept.version, kept.saved is not None])
    for version, several in state.older.items():
        tensors |= _listed(f"version/{version}", several)
    for place, gradient in enumerate(state.gradients or ()):
        if gradient is not None:
            tensors[f"gradient/{place}"] = gradient
    tensors |= _listed("sent", [sent.tensor for sent in state.sent])
    plain = {
        **about,
        "step": state.step,
        "updates": state.updates,
        "num_entered": state.num_entered,
        "entered": list(state.entered.items()),
        "older": list(state.older),
        "passes": passes,
        "layouts": [
            [n, name, list(shape), str(d)[6:]] for n, of in state.layouts.items() for name, (shape, d) in of.items()
        ],
        "sent": [[*sent[:-1]] for sent in state.sent],
        "gradients": None if state.gradients is None else len(state.gradients),
    }
    return Saved(tensors, {_PATH: json.dumps(plain)})


def restored_state(source: Saved) -> tuple[ProgramState, dict[str, Any]]:
    """The arguments of `saved_state`."""
    plain = json.loads(str(source.scalars[_PATH]))
    tensors = source.tensors
    under_way = {}
    for part, number, version, has_saved in plain["passes"]:
        path = f"pass/{part}/{number}"
        taken = [t.requires_grad_(t.is_floating_point() or t.is_complex()) for t in _list(tensors, f"{path}/taken")]
        saved = _list(tensors, f"{path}/saved") if has_saved else None
        inputs = tuple(_list(tensors, f"{path}/inputs"))
        kept = UnderWay(inputs, taken, version, _unseeded, saved=saved)
        kept.buffers = dict(source.under(f"{path}/buffer").tensors)
        under_way[part, number] = kept
    layouts: dict[int, dict[str, Layout]] = {}
    for number, name, shape, dtype in plain["layouts"]:
        layouts.setdefault(number, {})[name] = (tuple(shape), getattr(torch, dtype))
    count = plain["gradients"]
    state = ProgramState(
        step=plain["step"],
        updates=plain["updates"],
        num_entered=plain["num_entered"],
        entered=dict(plain["entered"]),
        older={version: _list(tensors, f"version/{version}") for version in plain["older"]},
        under_way=under_way,
        layouts=layouts,
        sent=[
            SentTensor(number, value, target, way, tensor)
            for (number, value, target, way), tensor in zip(plain["sent"], _list(tensors, "sent"), strict=True)
        ],
        gradients=None if count is None else [tensors.get(f"gradient/{place}") for place in range(count)],
    )
    return state, plain


def _listed(path: str, several: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{path}/{place}": tensor.detach() for place, tensor in enumerate(several)}


def _list(tensors: Mapping[str, Tensor], path: str) -> list[Tensor]:
    found: list[Tensor] = []
    while (name := f"{path}/{len(found)}") in tensors:
        found.append(tensors[name])
    return found


def _unseeded() -> None:
    """The program knows the seed."""
