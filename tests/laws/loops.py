"""The catalogue of loops: ways to write a training loop that torch allows. A new one is a function and a row in LOOPS.

Each loop is run with a strategy and compared with another loop under the same strategy, the plain order of calls. Where
the strategy equals torch alone, it is also compared with itself without Polytempo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.worlds import ProcessWorld

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]
CPU = torch.device("cpu")

STEPS = 7
SKIPPED = 3
"""The step that overflows."""
FREEZES = 3
PERIODS = 8
"""Ranks meet within so many steps under every strategy of the catalogue."""


def momentum(net: nn.Module) -> Optimizer:
    """Momentum, which must not act on frozen parameters and dropped gradients."""
    return SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Trial:
    """One rank's model in one loop: with a strategy, or without Polytempo (`strategy` None: the whole batches)."""

    def __init__(
        self,
        strategy: Strategy | None,
        world: ProcessWorld | None = None,
        make: MakeOptimizer = momentum,
        device: torch.device = CPU,
        **options: Any,
    ) -> None:
        self.world = world if strategy is not None else None
        self.device = device
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(device)
        self.optimizer = make(self.net)
        self.scaler = GradScaler(device.type, init_scale=1024.0, growth_interval=1)
        if options.pop("scaled", False):
            options["scaler"] = self.scaler
        self.races = strategy is not None and strategy.one_copy not in (None, "together")
        """True if ranks write to the same parameters, each at its own time."""
        self.handle = None if strategy is None else pt.attach(self.net, self.optimizer, strategy, **options)

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def size(self) -> int:
        return 1 if self.world is None else self.world.size

    def batches(self, seed: int = 7, num_steps: int = STEPS) -> Iterator[Batch]:
        """This rank's equal part of known global batches of 8 samples."""
        random = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            inputs, targets = torch.randn(8, 4, generator=random), torch.randn(8, 3, generator=random)
            yield self.moved(inputs.chunk(self.size)[self.rank]), self.moved(targets.chunk(self.size)[self.rank])

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device of the model."""
        return tensor.to(self.device)

    def loss(self, batch: Batch) -> Tensor:
        return squared(self.net(self.moved(batch[0])), self.moved(batch[1]))

    def no_sync(self) -> Any:
        return nullcontext() if self.handle is None else self.handle.no_sync()

    def parameters(self) -> Tensor:
        """All parameters in one vector, in memory of its own."""
        return torch.cat([p.detach().flatten() for p in self.net.parameters()]).clone()

    def end(self) -> None:
        if self.handle is not None:
            self.handle.state_dict()  # finishes exchanges under way
            self.handle.detach()


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples of the squared error."""
    return ((output - target) ** 2).sum(1).mean()


# ------------------------------------------------------------------ the plain order of calls


def plain(trial: Trial) -> None:
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()


def plain_without_a_step(trial: Trial) -> None:
    for step, batch in enumerate(trial.batches()):
        if step != SKIPPED:
            trial.optimizer.zero_grad()
            trial.loss(batch).backward()
            trial.optimizer.step()


def two_batches_at_once(trial: Trial) -> None:
    for one, two in zip(trial.batches(), trial.batches(8), strict=True):
        trial.optimizer.zero_grad()
        (trial.loss(one) + trial.loss(two)).backward()
        trial.optimizer.step()


# ------------------------------------------------------------------ the loops


def closure(trial: Trial) -> None:
    for batch in trial.batches():

        def evaluate(batch: Batch = batch) -> Tensor:
            trial.optimizer.zero_grad()
            loss = trial.loss(batch)
            loss.backward()
            return loss

        trial.optimizer.step(evaluate)


def closure_that_says_the_loss(trial: Trial) -> None:
    """The backward pass is before the step."""
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        loss = trial.loss(batch)
        loss.backward()
        assert trial.optimizer.step(lambda loss=loss: loss) is loss


def closure_called_twice(trial: Trial) -> None:
    """A line search calls it twice: the last evaluation counts."""
    for other, batch in zip(trial.batches(8), trial.batches(), strict=True):
        left = [other, batch]

        def evaluate(left: list[Batch] = left) -> Tensor:
            trial.optimizer.zero_grad()
            loss = trial.loss(left.pop(0))
            loss.backward()
            return loss

        trial.optimizer.step(evaluate)


class Twice(SGD):
    """Calls the closure twice."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


def twice(net: nn.Module) -> Optimizer:
    return Twice(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def other_loss(trial: Trial, *, set_to_none: bool = True) -> None:
    """A GAN's: the generator's loss, with an optimizer of its own, reaches these parameters, too."""
    generator = nn.Linear(4, 4).to(trial.device)
    theirs = SGD(generator.parameters(), lr=0.1)
    for noise, batch in zip(trial.batches(8), trial.batches(), strict=True):
        theirs.zero_grad(set_to_none=set_to_none)
        (100 * squared(trial.net(generator(noise[0])), noise[1])).backward()
        theirs.step()
        trial.optimizer.zero_grad(set_to_none=set_to_none)
        trial.loss(batch).backward()
        trial.optimizer.step()


def other_loss_zeroed(trial: Trial) -> None:
    other_loss(trial, set_to_none=False)


def sharpness(trial: Trial) -> None:
    """SAM with ρ = 0: the first gradient says where to compute the second."""
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()


def accumulated(trial: Trial) -> None:
    for one, two in zip(trial.batches(), trial.batches(8), strict=True):
        trial.optimizer.zero_grad()
        with trial.no_sync():
            trial.loss(one).backward()
        trial.loss(two).backward()
        trial.optimizer.step()


def accumulated_zeroed(trial: Trial) -> None:
    for one, two in zip(trial.batches(), trial.batches(8), strict=True):
        trial.optimizer.zero_grad(set_to_none=False)
        with trial.no_sync():
            trial.loss(one).backward()
        trial.loss(two).backward()
        trial.optimizer.step()


def accumulated_aloud(trial: Trial) -> None:
    """The second pass, without no_sync, adds to the answer of the first."""
    for one, two in zip(trial.batches(), trial.batches(8), strict=True):
        trial.optimizer.zero_grad()
        trial.loss(one).backward()
        trial.loss(two).backward()
        trial.optimizer.step()


def scaled(trial: Trial) -> None:
    """The scale doubles in every step."""
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.scaler.scale(trial.loss(batch)).backward()
        trial.scaler.step(trial.optimizer)
        trial.scaler.update()
    assert trial.scaler.get_scale() == 1024.0 * 2**STEPS


def overflowing(trial: Trial) -> None:
    """One gradient of the last rank is infinite once."""
    for step, batch in enumerate(trial.batches()):
        trial.optimizer.zero_grad()
        factor = torch.inf if step == SKIPPED and trial.rank == trial.size - 1 else 1.0
        trial.scaler.scale(trial.loss(batch) * factor).backward()
        trial.scaler.unscale_(trial.optimizer)
        trial.scaler.step(trial.optimizer)
        trial.scaler.update()
    assert trial.races or trial.scaler.get_scale() == 1024.0 * 2 ** (STEPS - 2)


def checkpointed(trial: Trial) -> None:
    for inputs, targets in trial.batches():
        trial.optimizer.zero_grad()
        hidden = checkpoint(trial.net[:2], inputs, use_reentrant=False)
        squared(trial.net[2](hidden), targets).backward()
        trial.optimizer.step()


def penalised(trial: Trial) -> None:
    """A gradient penalty, as WGAN-GP's: the loss holds a gradient by the inputs."""
    for inputs, targets in trial.batches():
        trial.optimizer.zero_grad()
        inputs = inputs.clone().requires_grad_()
        output = trial.net(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        (squared(output, targets) + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
        trial.optimizer.step()


def differentiated(trial: Trial) -> None:
    """Gradients come from autograd.grad, and no backward pass is run."""
    parameters = list(trial.net.parameters())
    for batch in trial.batches():
        for parameter, gradient in zip(parameters, torch.autograd.grad(trial.loss(batch), parameters), strict=True):
            parameter.grad = gradient
        trial.optimizer.step()


def kept(trial: Trial, keep: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> None:
    """The gradients of the step before are kept, and half of them is added."""
    last: dict[nn.Parameter, Tensor] = {}
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        now = {parameter: keep(parameter.grad) for parameter in trial.net.parameters() if parameter.grad is not None}
        for parameter, gradient in last.items():
            if parameter.grad is not None:
                parameter.grad = parameter.grad + 0.5 * gradient
        last = now
        trial.optimizer.step()


def kept_as_copies(trial: Trial) -> None:
    kept(trial, torch.clone)


def cleared(trial: Trial) -> None:
    """The optimizer begins with a new state."""
    for step, batch in enumerate(trial.batches()):
        if step == 3:
            trial.optimizer.state.clear()
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()


def compiled(trial: Trial) -> None:
    net = torch.compile(trial.net, backend="eager")
    for inputs, targets in trial.batches():
        trial.optimizer.zero_grad()
        squared(net(inputs), targets).backward()
        trial.optimizer.step()


def clipped(trial: Trial) -> None:
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        if trial.handle is None:
            nn.utils.clip_grad_norm_(trial.net.parameters(), 0.5)
        else:
            trial.handle.clip_grad_norm_(0.5)
        trial.optimizer.step()


def scheduled(trial: Trial) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(trial.optimizer, step_size=2, gamma=0.5)
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
        schedule.step()


def cast(trial: Trial) -> None:
    for inputs, targets in trial.batches():
        trial.optimizer.zero_grad()
        with torch.autocast(trial.device.type, torch.bfloat16):
            output = trial.net(inputs)
        squared(output.float(), targets).backward()
        trial.optimizer.step()


def scored(trial: Trial) -> None:
    """The agreed model is looked at after every step."""
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
        with nullcontext() if trial.handle is None else trial.handle.consensus(), torch.no_grad():
            trial.loss(batch)


def swapped(trial: Trial) -> None:
    """Other weights are loaded for a look at them, and then the trained ones again."""
    for batch in trial.batches():
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
        own = {name: tensor.clone() for name, tensor in trial.net.state_dict().items()}
        trial.net.load_state_dict({name: tensor + 1 for name, tensor in own.items()})
        trial.net.load_state_dict(own)


def frozen(trial: Trial) -> None:
    """A layer is frozen, rests once the ranks have met, and goes on when it is thawed."""
    layer = trial.net[0]
    assert isinstance(layer, nn.Linear)
    meets = trial.handle is None or trial.handle.replica.strategy.synchronized
    at_rest = None
    for step, batch in enumerate(trial.batches(num_steps=FREEZES + PERIODS + 4)):
        if step == FREEZES:
            layer.requires_grad_(False)
        if step == (FREEZES if meets else FREEZES + PERIODS):
            at_rest = layer.weight.detach().clone()
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
    assert at_rest is not None
    assert trial.races or torch.equal(layer.weight, at_rest), "a frozen layer has moved"
    layer.requires_grad_(True)
    for batch in trial.batches(9, num_steps=4):
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
    assert not torch.equal(layer.weight, at_rest), "a thawed layer has not"


def loaded(trial: Trial) -> None:
    """Other weights are loaded on the way, and the learning rate is zero from there on."""
    for step, batch in enumerate(trial.batches(num_steps=3 + PERIODS)):
        if step == 3:
            trial.net.load_state_dict({name: torch.ones_like(t) for name, t in trial.net.state_dict().items()})
            trial.optimizer.param_groups[0].update(lr=0.0)
        trial.optimizer.zero_grad()
        trial.loss(batch).backward()
        trial.optimizer.step()
    assert trial.races or bool((trial.parameters() == 1).all()), f"{float(trial.parameters().max())} is not 1"


def begun_anew(trial: Trial) -> None:
    """Weights are set in place before the first step."""
    for parameter in trial.net.parameters():
        nn.init.ones_(parameter)
    trial.optimizer.param_groups[0].update(lr=0.0)
    plain(trial)
    assert bool((trial.parameters() == 1).all()), f"{float(trial.parameters().max())} is not 1"


def searched(trial: Trial) -> None:
    """LBFGS: several evaluations a step, as many as the losses say."""
    batch = next(trial.batches())

    def evaluate() -> Tensor:
        trial.optimizer.zero_grad()
        loss = trial.loss(batch)
        loss.backward()
        return loss

    for _ in range(3):
        trial.optimizer.step(evaluate)


def lbfgs(net: nn.Module) -> Optimizer:
    return LBFGS(net.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


# ------------------------------------------------------------------ loaders


def samples() -> TensorDataset:
    """11 of them: no batch size divides them."""
    random = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(11, 4, generator=random), torch.randn(11, 3, generator=random))


def from_a_loader(trial: Trial) -> None:
    for _ in range(2):
        for batch in _loader(trial):
            trial.optimizer.zero_grad()
            trial.loss(batch).backward()
            trial.optimizer.step()


def looking_ahead(trial: Trial, moved: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
    """The next batch is taken before the step on this one."""
    for _ in range(2):
        coming = iter(_loader(trial))
        batch = next(coming, None)
        while batch is not None:
            inputs, targets = batch
            batch = next(coming, None)
            trial.optimizer.zero_grad()
            trial.loss((moved(inputs), moved(targets))).backward()
            trial.optimizer.step()


def looking_ahead_and_moving(trial: Trial) -> None:
    """The model gets other tensors than the loader yielded, as after a move to another device."""
    looking_ahead(trial, torch.clone)


def validating(trial: Trial) -> None:
    """A pass over other data between taking a batch and training on it, which is moved as to another device."""
    for _ in range(2):
        for inputs, targets in _loader(trial):
            with torch.no_grad():
                for batch in _loader(trial, num_samples=6):
                    trial.loss(batch)
            trial.optimizer.zero_grad()
            trial.loss((inputs.clone(), targets.clone())).backward()
            trial.optimizer.step()


def _loader(trial: Trial, num_samples: int = 11) -> Any:
    data = TensorDataset(*[tensor[:num_samples] for tensor in samples().tensors])
    if trial.handle is None:
        return pt.data.DataShard(data, rank=0, size=1, batch_size=4, shuffle=False)
    return pt.shard(data, batch_size=4 // trial.size, shuffle=False)


# ------------------------------------------------------------------ the catalogue


class Loop(NamedTuple):
    """A loop, the plain order of calls with its meaning (None: the loop itself), and its needs."""

    run: Callable[[Trial], None]
    like: Callable[[Trial], None] | None = plain
    make: MakeOptimizer = momentum
    scaled: bool = False
    tolerance: float = 0.0
    """Relative to the norm of the parameters; 0: the same bits."""

    @property
    def name(self) -> str:
        return self.run.__name__


LOOPS = [
    Loop(closure),
    Loop(closure_that_says_the_loss),
    Loop(closure_called_twice, make=twice),
    Loop(other_loss),
    Loop(other_loss_zeroed),
    Loop(sharpness),
    Loop(accumulated, two_batches_at_once, tolerance=1e-5),
    Loop(accumulated_zeroed, two_batches_at_once, tolerance=1e-5),
    Loop(accumulated_aloud, two_batches_at_once, tolerance=1e-5),
    Loop(scaled, scaled=True),
    Loop(overflowing, plain_without_a_step, scaled=True),
    Loop(checkpointed),
    Loop(compiled),
    Loop(differentiated),
    Loop(kept, kept_as_copies),
    Loop(penalised, None),
    Loop(cleared, None),
    Loop(scored),
    Loop(swapped),
    Loop(looking_ahead, from_a_loader),
    Loop(looking_ahead_and_moving, from_a_loader),
    Loop(validating, from_a_loader),
    Loop(frozen, None),
    Loop(loaded, None),
    Loop(begun_anew, None),
    Loop(clipped, None),
    Loop(scheduled, None),
    Loop(cast, None),
    Loop(searched, None, make=lbfgs, tolerance=1e-4),
]
