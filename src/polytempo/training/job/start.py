"""The start of a run from another run's model, and `replica_of`, which makes every model of a run.

    runs/first/checkpoint ──the launcher reads it once──▶ OUT/start.safetensors ──▶ the model of each process
                                                          copied: a replay, a resume and a replaced worker need the
                                                          first run no more

Taken are parameters and buffers. Optimizer, schedule, random numbers and the strategy's state begin as in any run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core.calls.refusals import refuse
from polytempo.core.system import files
from polytempo.core.system.url_path import Place, UrlPath, place
from polytempo.device import seed_generators
from polytempo.partition.branches import Threads
from polytempo.spec.job_calls import model_of, move_model, optimizer_of, who
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.checkpoint.manifest import COMPLETE
from polytempo.training.model.randomness import kept_random_states
from polytempo.training.observe.whole_checkpoint import run_model

START = "start.safetensors"
"""The file with a run's first weights, in its folder."""
_FACTS = "polytempo start"
_MOST_NAMED = 3


class FirstWeights(NamedTuple):
    """The first weights of a run."""

    tensors: dict[str, Tensor]
    """Parameters and buffers by the model's names."""
    facts: dict[str, Any]
    """`Result.started_from`."""


def replica_of(spec: RunSpec, device: torch.device | None = None) -> tuple[nn.Module, Optimizer]:
    """The job's model, the same wherever it is made, and its optimizer with the run's learning rate; in rounds of
    clients the server's.

    The model is made as the job makes it, so on the CPU its first values are the same for every `device`, and then
    moved there (None: it stays).

    Errors: `Incompatible` (PT2001, PT2002) where the run starts from tensors of other names or shapes.
    """
    seed_generators(spec.seed, unused_too=True)
    model = model_of(spec.job)
    if spec.options.start_from is not None:
        _load(model, read_start(spec.options.start_from).tensors, spec)
    if device is not None:
        move_model(model, device)
    rounds = spec.strategy.rounds
    if rounds is not None:
        kept = rounds.local.kept(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in kept)
    optimizer = optimizer_of(spec.job, model, spec.lr) if rounds is None else rounds.server(model.parameters())
    Threads(inter=spec.options.inter_threads).apply(model)
    return model, optimizer


def with_start(spec: RunSpec) -> RunSpec:
    """The run with its first weights in its own folder, if it has one. They are read and checked here, once.

    A resumed run has them there already. Errors: ValueError and CheckpointError for a run that has saved no model, and
    as of `replica_of`.
    """
    options = spec.options
    kept = None if options.out is None else options.out.absolute() / START
    if kept is not None and options.resume:
        return _resumed(spec, kept)
    if options.start_from is None:
        if kept is not None and kept.is_file():
            files.remove(kept)  # of a run that this folder had before
        return spec
    start = read_start(options.start_from)
    with kept_random_states():
        _load(model_of(spec.job), start.tensors, spec)
    if kept is None:
        return _from(spec, _absolute(options.start_from))
    content = save({n: t.contiguous() for n, t in start.tensors.items()}, metadata={_FACTS: json.dumps(start.facts)})
    files.replace(kept, content)
    return _from(spec, str(kept))


def start_facts(options: RunOptions) -> dict[str, Any] | None:
    """`Result.started_from`; None where the run began with the job's own weights."""
    return None if options.start_from is None else read_start(options.start_from).facts


def read_start(text: str) -> FirstWeights:
    """The weights that `text` names: a run's folder, "folder@step", or a file of named tensors, *.safetensors."""
    path = place(text)
    if path.name.endswith(".safetensors"):
        return _read_file(path)
    found = run_model(text)
    facts = {"run": _name(path), "step": found.step, "strategy": found.strategy}
    return FirstWeights(found.tensors, facts | {"sha256": tensors_sha256(found.tensors)})


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _resumed(spec: RunSpec, kept: Place) -> RunSpec:
    """A resumed run has its weights from its checkpoint, and tensors that no checkpoint of it has from its start."""
    asked = spec.options.start_from
    if not kept.is_file():
        if asked is not None:
            refuse({"start", "resume"}, start=asked, out=spec.options.out, saved="the job's own weights")
        return spec
    saved = read_start(str(kept)).facts
    if asked is not None and saved["run"] != _name(place(asked)):
        refuse({"start", "resume"}, start=asked, out=spec.options.out, saved=saved["run"])
    return _from(spec, str(kept))


def _name(path: Place) -> str:
    """The name of a run's folder, which a simulation repeats and a moved folder keeps."""
    run = path.parent.parent if COMPLETE.fullmatch(path.name) else path
    return run.parent.name if run.name == "checkpoint" else run.name.rpartition("@")[0] or run.name


def _from(spec: RunSpec, text: str) -> RunSpec:
    return replace(spec, options=replace(spec.options, start_from=text))


def _absolute(text: str) -> str:
    """`text` for a process in another folder."""
    return text if isinstance(place(text), UrlPath) else str(place(text).absolute())


def _read_file(path: Place) -> FirstWeights:
    try:
        content = path.read(path.size()) if isinstance(path, UrlPath) else files.read(path, path.stat().st_size)
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        told = header.get("__metadata__", {}).get(_FACTS)
    except OSError as error:
        raise ValueError(f"start_from {path}: it cannot be read ({error.strerror}); name a run's folder") from error
    except (SafetensorError, ValueError) as error:
        raise ValueError(
            f"start_from {path}: it is not a file of named tensors ({error}); name a run's folder"
        ) from error
    sha256 = tensors_sha256(tensors)
    if told is None:
        return FirstWeights(tensors, {"run": path.name, "step": None, "strategy": None, "sha256": sha256})
    facts = json.loads(told)
    if facts["sha256"] != sha256:
        raise ValueError(f"start_from {path}: its tensors have changed since the run began; begin another run")
    return FirstWeights(tensors, facts)


@torch.no_grad()
def _load(model: nn.Module, tensors: Mapping[str, Tensor], spec: RunSpec) -> None:
    """Copy the tensors into the model. `Incompatible` where names or shapes differ."""
    own = model.state_dict()
    given = {"job": who(spec.job), "start": spec.options.start_from}
    if own.keys() != tensors.keys():
        lacks, surplus = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        refuse({"start", "other names"}, lacks=_named(lacks), surplus=_named(surplus), **given)
    shapes = {name: (tuple(tensors[name].shape), tuple(own[name].shape)) for name in own}
    wrong = [f"{name} {there} instead of {here}" for name, (there, here) in shapes.items() if there != here]
    if wrong:
        refuse({"start", "other shapes"}, wrong=_named(wrong), **given)
    if not any(tensor.is_meta for tensor in own.values()):
        model.load_state_dict(tensors)


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return (", ".join(names[:_MOST_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")
