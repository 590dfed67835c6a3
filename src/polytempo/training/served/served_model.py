"""The model of a run with a parameter server, from its snapshots, which are flat: names and shapes are in a file.

    checkpoint/
      model.safetensors                        written when the run begins: where each tensor of the model is, and the
                                               tensors that are at no shard (frozen parameters, constants)
      snapshot-00000012-shard-0.safetensors    flat weights and running statistics (see `server.snapshots.snapshot`)

A folder with `model.safetensors` is one of a run with a server: a checkpoint of other workers removes the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core.system import files
from polytempo.core.system.url_path import Place
from polytempo.server.layout import Parameter, Spans, numel_of, place_
from polytempo.server.pieces import split
from polytempo.server.snapshots.disk import disk_of
from polytempo.server.snapshots.snapshot import (
    FORGED,
    SnapshotError,
    newest_whole,
    read,
    snapshot_errors,
)
from polytempo.server.snapshots.state import State, decode
from polytempo.server.tensors.holder import copied
from polytempo.training.checkpoint.checkpoint_folders import SERVED_MODEL
from polytempo.training.model.running_statistics import Running
from polytempo.training.model.trainable_parameters import trainable
from polytempo.training.served.server_plan import ServerPlan

_FORMAT, _VERSION = "polytempo-served-model", 1


class _TensorPlaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The places of a model's tensors in the parts of a snapshot."""

    strategy: str
    workers: int
    numbers_per_batch: int
    parameters: tuple[Parameter, ...]
    """The trained parameters, in the order of the flat vector."""
    spans: tuple[Spans, ...]
    """The ranges of each shard."""
    trained: dict[str, int]
    """Name in the state dict -> number of the parameter; several names may have one."""
    running: dict[str, tuple[int, int]]
    """Name of a norm's buffer -> the shard that is asked, and its begin in that shard's statistics."""
    format: str = _FORMAT
    version: int = _VERSION


class ServedModel(NamedTuple):
    """The whole model of a snapshot."""

    tensors: dict[str, Tensor]
    step: int
    """Batches in all shards, in steps of all workers."""
    strategy: str


def write_served_model(
    folder: Place,
    model: nn.Module,
    optimizer: Optimizer,
    plan: ServerPlan,
    *,
    strategy: str,
    workers: int,
    running: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Leave the file in `folder`. `model` is as it is when the run begins; `workers` take one batch each in a step.

    `running`: the shard, the begin and the end of each buffer of its norms; (): the first shard has them one after the
    other.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(trainable(model, optimizer).values())}
    buffers, at = dict[int, tuple[int, int]](), 0
    for number, buffer in enumerate(Running(model).buffers):
        buffers[id(buffer)] = running[number][:2] if running else (0, at)
        at += buffer.numel()
    named = model.state_dict(keep_vars=True)
    places = _TensorPlaces(
        strategy=strategy,
        workers=workers,
        numbers_per_batch=plan.service.numbers_per_batch,
        parameters=plan.parameters,
        spans=plan.spans,
        trained={name: numbers[id(tensor)] for name, tensor in named.items() if id(tensor) in numbers},
        running={name: buffers[id(tensor)] for name, tensor in named.items() if id(tensor) in buffers},
    )
    rest = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in named.items()
        if isinstance(tensor, Tensor) and name not in places.trained
    }
    files.made(folder)
    files.replace(folder / SERVED_MODEL, save(rest, metadata={"places": msgspec.json.encode(places).decode()}))


def has_served_model(folder: Place) -> bool:
    """True if `folder` has snapshots of a run with a parameter server, and can name their tensors."""
    return (folder / SERVED_MODEL).is_file()


def read_served_model(folder: Place, step: int | None = None, *, average: bool | None = False) -> ServedModel:
    """The model of the newest snapshot in `folder` that is whole, or of the one after `step`.

    `average`: with the moving average of its weights; None: where there is one. Errors: ValueError where an average is
    asked for and missing; `SnapshotError` for a damaged file.
    """
    places, rest = _read_places(folder)
    found, steps, before = None, list[int](), None
    while (number := newest_whole(folder, len(places.spans), before=before)) is not None:
        states = [_state(folder, number, shard) for shard in range(len(places.spans))]
        taken = min(sum(last - first + 1 for first, last in state.tickets) for state in states)
        steps.append(-(-taken // (places.numbers_per_batch * places.workers)))
        if step in (None, steps[-1]):
            found = states
            break
        before = number
    if found is None:
        there = f"it has steps {', '.join(map(str, reversed(steps)))}" if steps else "the run has saved none yet"
        asked = "no whole snapshot" if step is None else f"no snapshot of step {step}"
        raise ValueError(f"{folder} holds {asked}; {there}")
    if average or (average is None and found[0].average is not None):
        found = [_averaged(folder, state) for state in found]
    return ServedModel(rest | _tensors(places, rest, found), steps[-1], places.strategy)


def _averaged(folder: Place, state: State) -> State:
    """The state with its average as its weights."""
    if state.average is None:
        raise ValueError(f"{folder} has no moving average of the weights: the run had no ema; read the weights")
    own = state.weights
    averaged = msgspec.structs.replace(own, buffers=[state.average.to(own.buffers[0].dtype)])
    return msgspec.structs.replace(state, weights=averaged)


def _read_places(folder: Place) -> tuple[_TensorPlaces, dict[str, Tensor]]:
    path = folder / SERVED_MODEL
    try:
        disk = disk_of(folder)
        content = disk.read(path, disk.size(path))
        length = int.from_bytes(content[:8], "little")
        header = msgspec.json.decode(content[8 : 8 + length])
        places = msgspec.json.decode(header["__metadata__"]["places"], type=_TensorPlaces)
        if (places.format, places.version) != (_FORMAT, _VERSION):
            raise ValueError(f"it is {places.format!r} version {places.version}")
        return places, load(content)
    except (OSError, SafetensorError, msgspec.MsgspecError, *FORGED) as error:
        raise SnapshotError(f"{path} cannot be read ({error}); run the job again, or choose another run") from error


def _state(folder: Place, number: int, shard: int) -> State:
    part = read(folder, number, shard)
    with snapshot_errors(folder, number, shard):
        weights = part.tensors[0]
        return decode(part.state, part.tensors, weights.numel(), weights.dtype, lambda given: given)


def _tensors(places: _TensorPlaces, rest: Mapping[str, Tensor], states: Sequence[State]) -> dict[str, Tensor]:
    """The trained parameters and the norms' statistics by name."""
    parameters = places.parameters
    flat = torch.empty(sum(each.numel for each in parameters), dtype=states[0].weights.buffers[0].dtype)
    for spans, state in zip(places.spans, states, strict=True):
        values = state.weights.buffers[0]
        if split(parameters, spans).pieces:
            values = copied(parameters, spans, values, [table.values for table in state.tables])
        if values.numel() != numel_of(spans):
            raise SnapshotError(f"a shard holds {values.numel()} elements, and {numel_of(spans)} are its; use another")
        place_(flat, spans, values)
    by_number = flat.split([each.numel for each in parameters])
    found = {name: by_number[n].view(parameters[n].shape).clone() for name, n in places.trained.items()}
    for name, (shard, begin) in places.running.items():
        running, like = states[shard].running, rest[name]
        assert running is not None
        values = running[begin : begin + like.numel()]
        found[name] = (values if like.is_floating_point() else values.round()).to(like.dtype).view_as(like)
    return found
