"""The training of a row of `combinations`: the model, its job, a user's loop, and the same training in plain torch."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import polytempo as pt
from laws.combinations import FAMILIES, LAYOUTS, QUANTISED, SERVED, STAGED, WAITING, Combination
from polytempo.core import Strategy
from polytempo.data.plan import part, permutation
from polytempo.data.shard import DataShard
from polytempo.report.status.records import Logged
from polytempo.report.status.stream import stream
from polytempo.runs.simulated import simulate
from polytempo.spec.run_options import OptionKeywords
from polytempo.training.step import pace_store, pace_watch
from polytempo.ui import hub
from polytempo.ui.page_view import PageView
from polytempo.worlds import ProcessWorld
from silent_tracker import SilentTracker

SAMPLES, GLOBAL_BATCH, STEPS = 71, 24, 6
"""Two epochs of two whole batches and one of 23 samples, which two replicas share unevenly."""

DECAY = 0.35
"""Of the weights' average: more than (1 + t) / (10 + t) up to step 3, and less from step 4."""

CPU = torch.device("cpu")

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3),
}
"""A nearly zero gradient's rounding makes no step of the rate's size with this ε."""
FOLDERS = ("page", "logged", "profiled")
"""Ways to look at a loop that need its folder."""
SPLIT = ("split", "places")
"""Layouts of `pt.split`."""


class Instance(nn.Module):
    """Instance norm of six features as two channels of three, with running statistics.

    Of two nearly equal values, a norm's gradient would be a quotient of rounding errors, but for its ε.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, eps=0.1, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.unflatten(1, (2, 3)))
        return y.flatten(1)


class Folded(nn.Module):
    """A layer of pictures, on features that are folded to (channels, rows, columns)."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.unflatten(1, self.shape))
        return y.flatten(1)


NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm1d(6),
    "instance": Instance,
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 6),
}


class Spare(nn.Sequential):
    """Layers without the layer `spare`."""

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            if name != "spare":
                x = layer(x)
        return x


class Sometimes(Spare):
    """The layer `spare` acts on batches with a first number above 0 alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.get_submodule("spare")(x) if x[0, 0] > 0 else x)


class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of rank 2 beside it: LoRA (E. Hu et al., 2021)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.narrow, self.wide = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.wide(self.narrow(x))
        return y


SPARE = {"unused": Spare, "sometimes": Sometimes}


def up(row: Combination) -> nn.Module:
    """Six features to eight: a linear layer, or a convolution of 3 × 2 places."""
    return Folded(nn.Conv2d(1, 2, (2, 1)), 1, 3, 2) if row.layout == "places" else nn.Linear(6, 8)


def down(row: Combination) -> nn.Module:
    """Eight features to six."""
    if row.layout == "places":
        return Folded(nn.ConvTranspose2d(2, 1, (2, 1), bias=False), 2, 2, 2)
    return nn.Linear(8, 6, bias=False)


def model_of(row: Combination) -> nn.Module:
    """Four layers with a norm behind the first; drawn from torch's generator."""
    layers = OrderedDict[str, nn.Module](
        first=Adapted(4, 6) if row.loop == "adapters" else nn.Linear(4, 6, bias=False),  # a norm takes a bias away
        norm=NORMS[row.norm](),
        bend=nn.Tanh(),
        up=up(row),
        turn=nn.Tanh(),
        down=down(row),
        again=NORMS[row.norm](),
        twist=nn.Tanh(),
        last=nn.Linear(6, 2),
    )
    if row.loop in SPARE:
        layers["spare"] = nn.Linear(4, 4)
    net = SPARE.get(row.loop, nn.Sequential)(layers)
    if row.loop == "frozen":
        net[0].requires_grad_(False)
    return net.to(dtype_of(row))


def dtype_of(row: Combination) -> torch.dtype:
    return torch.float64 if row.precision == "float64" else torch.float32


def points(num_samples: int, seed: int, dtype: torch.dtype) -> TensorDataset:
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1))


def training_data(row: Combination) -> TensorDataset | pt.data.InMemoryShards:
    """The points, or the same in four shards of unequal sizes."""
    data = points(SAMPLES, 0, dtype_of(row))
    if row.loop != "streamed":
        return data
    samples = [data[number] for number in range(SAMPLES)]
    shards = [samples[start:stop] for start, stop in ((0, 30), (30, 31), (31, 55), (55, SAMPLES))]
    return pt.data.InMemoryShards(shards).shuffled(buffer=16, interleave=2)


def trainable(row: Combination, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return OPTIMIZERS[row.optimizer]([p for p in parameters if p.requires_grad])


def job_of(row: Combination) -> pt.Job:
    dtype = dtype_of(row)
    return pt.Job(
        model=partial(model_of, row),
        data=lambda folder: pt.Data(training_data(row), points(16, 1, dtype)),
        loss=logged_loss if row.loop == "watched" or row.shown == "logged" else nn.functional.mse_loss,
        optimizer=lambda parameters, lr: trainable(row, parameters),
        metrics={"own error": lambda output, target: (output - target).abs().mean()} if row.loop == "watched" else {},
    )


def logged_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss, and two numbers of the user's."""
    loss = nn.functional.mse_loss(output, target)
    pt.log({"own/loss": loss}, spread=output.detach().std())
    return loss


def watching_of(row: Combination) -> OptionKeywords:
    """Options that show a run with a folder: a tracker, a callback, and a profile where steps are common."""
    if row.loop != "watched":
        return {"profile": "2:4"} if row.shown == "profiled" else {}
    given: OptionKeywords = {"trackers": [SilentTracker()], "callbacks": [pt.callbacks.Callback()]}
    return given if row.family in SERVED else given | {"profile": "2:4"}


@contextmanager
def looked_at(row: Combination, folder: Path) -> Iterator[None]:
    """Inside, runs below `folder` are looked at: by a page that reads all that is new, or by ranks that are compared
    after each step."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as looks:
        if row.shown == "compared":
            patch.setattr(pace_watch, "EVERY", 1)
            patch.setattr(pace_watch, "MAX_COST", math.inf)
        if row.shown == "page":
            patch.setattr(hub, "LOOK_S", 0.0)
            looks.enter_context(page_of(folder))
        yield
    if row.shown == "logged":
        rows = [each for file in folder.rglob("metrics.jsonl") for each in stream(file.parent)]
        assert any(isinstance(each, Logged) and "own/loss" in each.values for each in rows)
    if row.shown == "profiled":
        assert list(folder.rglob("profile/rank-0*"))


@contextmanager
def uncompared(row: Combination) -> Iterator[None]:
    """Inside, no ranks of such rows are compared."""
    with pytest.MonkeyPatch.context() as patch:
        if row.shown == "compared":
            patch.setattr(simulate, "watch_paces", lambda contexts, world: None)
            patch.setattr(pace_store, "_MOST_RANKS", 0)
        yield


@contextmanager
def page_of(folder: Path) -> Iterator[None]:
    """A page's list of the runs in `folder`, and its views of each run, again and again."""
    over, looks = threading.Event(), hub.Hub(folder, hub.LookPace(None))
    seen = set[str]()

    def look() -> None:
        while not over.is_set():
            names = [str(row["id"]) for row in looks.rows(fresh=True)]
            seen.update(names)
            for view in [PageView(), *(PageView(kind="run", runs=(name,), pixels=100) for name in names)]:
                list(looks.parts(view))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        yield
        over.set()
        looking.result()
    assert seen


def strategy_of(row: Combination) -> Strategy:
    return LAYOUTS[row.layout](FAMILIES[row.family]())


def workers_of(row: Combination) -> int:
    return row.replicas * (2 if row.layout in STAGED or row.layout in SPLIT else 1)


def mesh_of(row: Combination) -> dict[str, int] | None:
    """The mesh of a user's loop."""
    axes = {**dict.fromkeys(SPLIT, "model"), **dict.fromkeys(STAGED, "stage")}
    return {"data": row.replicas, axes[row.layout]: 2} if row.layout in axes else None


def options_of(row: Combination, steps: int = STEPS) -> OptionKeywords:
    given: OptionKeywords = {"threads": 1, "steps": steps}
    if row.precision in ("bf16", "autocast", *QUANTISED):
        given["precision"] = row.precision
    if row.scored == "average":
        given["ema"] = DECAY
    if row.loop == "micro_batches":
        given["accumulate"] = 2
    if row.loop == "clip_norm":
        given["clip_norm"] = 0.1
    if row.family in SERVED:
        return given | {"batch_size": GLOBAL_BATCH // row.replicas}
    return given | {"global_batch_size": GLOBAL_BATCH}


# ------------------------------------------------------------------ plain torch


class Replica:
    """One replica in plain torch: parameters, those of fewer bits for each pass, an optimizer and an average."""

    def __init__(self, row: Combination, start: Mapping[str, Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.row, self.net = row, model_of(row)
        if start is not None:
            self.net.load_state_dict(start)
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.optimizer = trainable(row, self.net.parameters())

    def output(self, x: Tensor) -> Tensor:
        answer: Tensor
        if self.row.precision == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x).float()  # type: ignore[no-any-return]
        if self.row.precision != "bf16":
            answer = torch.func.functional_call(self.net, few_levels(self.row, self.net), (x,))
            return answer
        wide = {id(p) for m in self.net.modules() if isinstance(m, _NORMS) for p in m.parameters()}
        low = {n: p if id(p) in wide else p.bfloat16() for n, p in self.net.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            answer = torch.func.functional_call(self.net, low, (x,))
        return answer.float()

    def backward(self, x: Tensor, y: Tensor, weight: float) -> None:
        for each_x, each_y in zip(*self._pieces(x, y), strict=True):
            (nn.functional.mse_loss(self.output(each_x), each_y) * (weight * len(each_x) / len(x))).backward()

    def _pieces(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Micro-batches."""
        number = 2 if self.row.layout in WAITING or self.row.loop in ("accumulated", "micro_batches") else 1
        bounds = [part(len(x), number, index) for index in range(number)]
        return [x[a:b] for a, b in bounds if a < b], [y[a:b] for a, b in bounds if a < b]

    def clip(self) -> None:
        if self.row.loop in ("clipped", "clip_norm"):
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    def take_in(self, step: int) -> None:
        """The weights after step 1, 2, … go into their average."""
        d = min(DECAY, (1 + step) / (10 + step))
        for name, p in self.net.named_parameters():
            self.average[name] = d * self.average[name] + (1 - d) * p.detach()


_NORMS = (nn.BatchNorm1d, nn.InstanceNorm1d, nn.LayerNorm, nn.GroupNorm)


def few_levels(row: Combination, net: nn.Module) -> dict[str, Tensor]:
    """Q(w) of the matrices of `net`, by name; the gradient of Q is taken as 1. Empty for other precisions."""
    if row.precision not in QUANTISED:
        return {}
    level = {"int8": _int8, "ternary": _ternary}[row.precision]
    matrices = {name: p for name, p in net.named_parameters() if p.dim() > 1}
    return {name: torch.stack([level(w) for w in p.detach()]) + (p - p.detach()) for name, p in matrices.items()}


def _int8(w: Tensor) -> Tensor:
    step = w.abs().max() / 127
    return (w / step).round() * step


def _ternary(w: Tensor) -> Tensor:
    large = w.abs() > 0.7 * w.abs().mean()
    return torch.where(large, w[large].abs().mean() * w.sign(), torch.zeros_like(w))


class Reached(NamedTuple):
    """Parameters and buffers after training with plain torch, by name."""

    saved: dict[str, Tensor]
    scored: dict[str, Tensor]
    """The saved ones, or their average over the steps."""


def plain(row: Combination, start: Mapping[str, Tensor] | None = None) -> Reached:
    """The training of `row` from the tensors `start`, or from the job's own, in plain torch."""
    copies = [Replica(row, start) for _ in range(row.replicas)]
    anchor = [p.detach().clone().requires_grad_() for p in copies[0].net.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    together = row.family in ("sync", "backup", "islands")
    for step in range(STEPS):
        batch = batch_of(step, row)
        for rank, copy in enumerate(copies):
            mine = slice(*part(len(batch[0]), row.replicas, rank))
            x, y = (tensor[mine] for tensor in batch)
            copy.optimizer.zero_grad()
            copy.backward(x, y, len(x) / len(batch[0]) if together else 1.0)
        if together:
            _sum_gradients(copies)
        for copy in copies:
            copy.clip()
            copy.optimizer.step()
        if together or step % 3 == 2:
            _meet(copies, parameters=not together)
        if row.family in ("diloco", "islands") and step % 3 == 2:
            _outer_step(copies, anchor, outer)
        for copy in copies:
            copy.take_in(step + 1)
    saved = mean_state(copies)
    if row.scored == "weights":
        return Reached(saved, saved)
    averages = {name: torch.stack([copy.average[name] for copy in copies]).mean(0) for name in copies[0].average}
    return Reached(saved, {**saved, **averages})


def batch_of(step: int, row: Combination) -> tuple[Tensor, Tensor]:
    """The global batch of a step: the next samples of the epoch's permutation, or of all ranks' stretches of shards."""
    if row.loop == "streamed":
        return streamed(row)[step]
    steps = -(-SAMPLES // GLOBAL_BATCH)
    start = step % steps * GLOBAL_BATCH
    order = permutation(SAMPLES, 0, step // steps)[start : start + GLOBAL_BATCH]
    x, y = points(SAMPLES, 0, dtype_of(row)).tensors
    return x[order], y[order]


@lru_cache(maxsize=8)
def streamed(row: Combination) -> list[tuple[Tensor, Tensor]]:
    """The joined batches of two epochs."""
    ranks = range(row.replicas)
    given = {"size": row.replicas, "global_batch_size": GLOBAL_BATCH}
    shards = [DataShard(training_data(row), rank=rank, **given) for rank in ranks]
    parts = zip(*([batch for _ in range(2) for batch in shard] for shard in shards), strict=True)
    return [(torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for each in parts]


def _sum_gradients(copies: list[Replica]) -> None:
    for parameters in zip(*(copy.net.parameters() for copy in copies), strict=True):
        if found := [p.grad for p in parameters if p.grad is not None]:
            total = torch.stack(found).sum(0)
            for p in parameters:
                p.grad = total.clone()


def _meet(copies: list[Replica], *, parameters: bool) -> None:
    """Running statistics become their mean, and parameters where they have moved apart."""
    mean = mean_state(copies)
    names = {name for name, _ in copies[0].net.named_parameters()}
    for copy in copies:
        copy.net.load_state_dict({k: v for k, v in mean.items() if parameters or k not in names}, strict=False)


def mean_state(copies: list[Replica]) -> dict[str, Tensor]:
    states = [copy.net.state_dict() for copy in copies]
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if tensor.is_floating_point() else tensor
        for name, tensor in states[0].items()
    }


def _outer_step(copies: list[Replica], anchor: list[Tensor], outer: Optimizer) -> None:
    """w ← Nesterov(w, w - mean of the replicas)"""
    for wide, now in zip(anchor, copies[0].net.parameters(), strict=True):
        wide.grad = wide.detach() - now.detach()
    outer.step()
    for copy in copies:
        for wide, now in zip(anchor, copy.net.parameters(), strict=True):
            now.data.copy_(wide.detach())


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a value, relative to the larger of 1 and the largest of its tensor."""
    assert set(found) == set(expected)
    return max(
        float((found[name].double() - tensor.double()).abs().max() / max(1.0, float(tensor.double().abs().max())))
        for name, tensor in expected.items()
    )


def loss_of(row: Combination, state: dict[str, Tensor]) -> float:
    """The test loss of the model with these parameters and buffers."""
    net = model_of(row)
    net.load_state_dict(state)
    x, y = points(16, 1, dtype_of(row)).tensors
    with torch.no_grad():
        answer = torch.func.functional_call(net.eval(), few_levels(row, net), (x,))
        return float(nn.functional.mse_loss(answer, y))


# ------------------------------------------------------------------ a user's loop


def own_loop(
    row: Combination,
    world: ProcessWorld,
    stop: int | None = None,
    device: torch.device = CPU,
    out: Path | None = None,
) -> dict[str, Tensor]:
    """The whole model after a loop of `STEPS` steps; after `stop` steps all is saved, made again, and goes on. `out`:
    the folder of a loop that is looked at."""
    loop = (StagedLoop if row.layout in STAGED else AttachedLoop)(row, world, device, out)
    step = 0
    while step < STEPS:
        for x, y in loop.batches:
            loop.step(x.to(device), y.to(device))
            step += 1
            if step == stop:
                loop = loop.again()
                break
    return loop.end()


class StagedLoop:
    """`pt.pipeline`, and a step a batch."""

    def __init__(self, row: Combination, world: ProcessWorld, device: torch.device, out: Path | None) -> None:
        torch.manual_seed(0)
        self.row, self.world, self.device, self.out = row, world, device, out
        dtype = dtype_of(row)
        self.pipe = pt.pipeline(
            model_of(row).to(device),
            partial(trainable, row),
            nn.functional.mse_loss,
            strategy_of(row),
            sample=torch.zeros(2, 4, dtype=dtype, device=device),
            max_norm=0.1 if row.loop == "clipped" else None,
        )
        self.batches = pt.shard(points(SAMPLES, 0, dtype), batch_size=GLOBAL_BATCH // row.replicas)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.pipe.step(x, y)

    def again(self) -> StagedLoop:
        state, place = self.pipe.training_state(), self.batches.state_dict()
        other = StagedLoop(self.row, self.world, self.device, self.out)
        other.pipe.load_training_state(state)
        other.batches.load_state_dict(place)
        return other

    def end(self) -> dict[str, Tensor]:
        self.pipe.finish()
        return self.pipe.state_dict()


class AttachedLoop:
    """`pt.attach`, and the loop of every textbook; parts of layers by `pt.split` or `pt.hybrid`."""

    def __init__(self, row: Combination, world: ProcessWorld, device: torch.device, out: Path | None) -> None:
        torch.manual_seed(0)
        self.row, self.world, self.device, self.out = row, world, device, out
        self.net = self._parted(model_of(row).to(device))
        self.optimizer = trainable(row, self.net.parameters())
        strategy = pt.strategies.shared_memory() if row.layout == "one_copy" else FAMILIES[row.family]()
        given: dict[str, Any] = {
            "precision": options_of(row).get("precision"),
            "profile": watching_of(row).get("profile"),
        }
        self.handle = pt.attach(self.net, self.optimizer, strategy, **given, out=out if row.shown in FOLDERS else None)
        self.batches = pt.shard(points(SAMPLES, 0, dtype_of(row)), batch_size=GLOBAL_BATCH // row.replicas)

    def _parted(self, net: nn.Module) -> nn.Module:
        if self.row.layout == "split":
            return pt.split(net, {"up": "column", "down": "row"})
        if self.row.layout == "places":
            return pt.split(net, {"*.layer": "places"})
        return pt.hybrid(net, ["up", "down"]) if self.row.layout == "hybrid" else net

    def step(self, x: Tensor, y: Tensor) -> None:
        loss = logged_loss if self.row.shown in FOLDERS else nn.functional.mse_loss
        self.optimizer.zero_grad()
        if self.row.loop == "accumulated":
            cut = part(len(x), 2, 0)[1]
            with self.handle.no_sync():
                (loss(self.net(x[:cut]), y[:cut]) * (cut / len(x))).backward()
            (loss(self.net(x[cut:]), y[cut:]) * (1 - cut / len(x))).backward()
        else:
            loss(self.net(x), y).backward()
        if self.row.loop == "clipped":
            self.handle.clip_grad_norm_(0.1)
        self.optimizer.step()

    def again(self) -> AttachedLoop:
        states = [each.state_dict() for each in (self.net, self.optimizer, self.handle, self.batches)]
        states = deepcopy(states)
        self.handle.detach()
        other = AttachedLoop(self.row, self.world, self.device, self.out)
        for each, state in zip((other.net, other.optimizer, other.handle, other.batches), states, strict=True):
            each.load_state_dict(state)
        return other

    def end(self) -> dict[str, Tensor]:
        with self.handle.consensus():
            buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
            whole = self.net.full_parameters() if self.row.layout in (*SPLIT, "hybrid") else self.net.state_dict()
            found = {name: tensor.clone() for name, tensor in {**buffers, **whole}.items()}
        self.handle.detach()
        return found
