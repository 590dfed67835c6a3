"""`Strategy`: the layout of a model over workers, their partners, and the two transforms between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polytempo.core.arithmetic.merge import Merge
from polytempo.core.bundle import Bundle
from polytempo.core.codec import Codec
from polytempo.core.rule import Service
from polytempo.core.state import OwnNumbers, ProvisionalState, nodes
from polytempo.core.transform import Transform, identity

Turn = Literal["together", "free", "atomic", "locked", "in_turn"]
"""Writers to one copy of the parameters: all ranks by one update, each rank at any time (component by component, by
loads and stores or by atomic additions), one after the other, or in the order of ranks, each once."""


class Staged(Protocol):
    """Stages of a model and their order of work; `partition.schedules` makes them."""

    @property
    def stages(self) -> int:
        """Workers that hold the parts of one model."""

    @property
    def micro_batches(self) -> int:
        """Parts of a batch that go through the stages one by one."""


class Parted(Protocol):
    """Layers that are divided over several workers; `partition.tensor` and `partition.hybrid` make them."""

    @property
    def ranks(self) -> int:
        """Workers with the same samples that hold one model together; 1 where each has samples of its own."""


class Distillation(NamedTuple):
    """Groups of workers, each with its own model and part of the data, that learn from each other's predictions.

    The strategy's `gradients` and `parameters` are the exchanges within a group.
    """

    groups: int
    weight: float
    """Weight in the loss of the distance from the other groups' predictions."""


@dataclass(frozen=True)
class Undivided:
    """Layout: each worker holds the whole model."""


@dataclass(frozen=True)
class InParts:
    """Layout: some layers are divided over several workers; holders of the same parts exchange."""

    parted: Parted


@dataclass(frozen=True)
class InStages:
    """Layout: the model is cut into stages that work by `schedule`; holders of the same stage exchange."""

    schedule: Staged
    layers: Undivided | InParts = field(default_factory=Undivided)


@dataclass(frozen=True)
class InGroups:
    """Layout: groups of workers, each with a whole model of its own; the workers of a group exchange."""

    distillation: Distillation


Layout = Undivided | InParts | InStages | InGroups
"""Layout of a model over workers."""


@dataclass(frozen=True)
class ByMessages:
    """Meeting: workers exchange among themselves."""


@dataclass(frozen=True)
class InSlices:
    """Meeting: workers exchange among themselves, and compute a global batch in `number` slices, for any number of
    workers.

    `gradients` is given the weighted sum of a rank's slices (`core.arithmetic.slice_tree`).
    """

    number: int


class Buffering(NamedTuple):
    """Clients of an asynchronous server (`fed_buff`)."""

    concurrency: int
    """Clients in training at any time."""
    oldest: int
    """The largest age of a model that counts, in updates."""
    sigma: float
    """The spread of clients' times."""
    lost: float
    """The probability that a client's movement never arrives."""


class LocalTraining(NamedTuple):
    """The training of a client in a round."""

    epochs: int = 1
    batch_size: int | None = 10
    """Samples of a step; None: all that the client has."""
    proximal: float = 0.0
    """μ of μ/2 ‖θ - θ_round‖², which is added to the loss."""
    controls: bool = False
    """Gradients are corrected by control variates: one of each client, and their mean (`scaffold`)."""
    keeps: Callable[[nn.Module], frozenset[str]] | None = None
    """Names of parameters and buffers that stay with each client; the server's copy never changes."""
    head_epochs: int = 0
    """Passes over the data that train the kept parameters alone, before others train alone. 0: all train together."""
    fairness: float = 0.0
    """q of `q_fed_avg`: clients weigh by the power q of their loss, too."""

    buffering: Buffering | None = None
    """Clients train from models of different ages. None: all from the newest one."""

    def kept(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's parameters and buffers that stay with each client."""
        return frozenset() if self.keeps is None else self.keeps(model)

    def passes(self, samples: int) -> float:
        """Samples in forward and backward passes of a client with so many; a forward pass alone is a third of one."""
        return samples * (self.epochs + self.head_epochs + (1 / 3 if self.fairness else 0.0))

    def steps(self, samples: Tensor) -> Tensor:
        """Steps of clients with so many samples."""
        return self.epochs * torch.ceil(samples / samples.clamp(max=self.batch_size or float("inf")))


class Privacy(NamedTuple):
    """Differential privacy of clients in rounds (`federated.private`)."""

    clip: float
    """S, the largest norm of a client's movement."""
    noise: float
    """z: the sum of movements has noise of deviation z S."""
    delta: float
    """δ of (ε, δ)."""
    cohort: int
    """The expected number of clients in a round. Each takes part with probability cohort / clients."""


class SamplePrivacy(NamedTuple):
    """Differential privacy of samples (`federated.dp_sgd`)."""

    clip: float
    """S, the largest norm of a sample's gradient."""
    noise: float
    """z: the sum of a step's gradients has noise of deviation z S."""
    delta: float
    """δ of (ε, δ)."""


class SecureSum(NamedTuple):
    """Sums of clients' movements as masked integers (`federated.secure`)."""

    bits: Literal[32, 64]
    fraction: int
    """Bits behind the point."""
    threshold: int | None
    """Clients that must stay. None: two thirds of the sum's clients, and one."""

    def least(self, clients: int) -> int:
        """The clients that must stay of so many."""
        return 2 * clients // 3 + 1 if self.threshold is None else self.threshold


@dataclass(frozen=True)
class InRounds(InSlices):
    """Meeting: each step is a round of `number` clients, drawn from many. They train from the same model.

    A client's movement θ - θ_k is its slice's gradient, and the server's optimizer makes the step. Slices make the
    result the same for any number of workers.
    """

    local: LocalTraining
    shares: Callable[[Tensor, LocalTraining], Tensor]
    """The clients' weights in the sum of their movements, from their numbers of samples; both of shape (number,)."""
    server: Callable[[Iterable[nn.Parameter]], Optimizer]
    """Makes the optimizer of the rounds."""
    merge: Merge | None = None
    """Makes one movement of all clients' movements, in the place of their weighted sum."""
    codec: Codec | None = None
    """The code of a client's movement on its way to the server."""
    pull_codec: Codec | None = None
    """The code of the model on its way to a client."""
    privacy: Privacy | None = None
    """Rounds that have it have at most `number` clients."""
    secure: SecureSum | None = None
    """The server has the sum of weighted movements alone."""

    @property
    def is_noisy(self) -> bool:
        """True where rounds spend privacy, which is then counted."""
        return self.privacy is not None and self.privacy.noise > 0


@dataclass(frozen=True)
class OnOneCopy:
    """Meeting: the parameters exist once per host, and its ranks write to them by this turn."""

    turn: Turn


Meeting = ByMessages | InSlices | InRounds | OnOneCopy | Service
"""Partners of a worker. A `Service`: the parameters are at a parameter server; the transforms push and pull."""


class Before(NamedTuple):
    """A run before the strategy's own run, which starts from its model (see `spec.then`)."""

    strategy: Strategy
    steps: int


def any_optimizer(strategy: Strategy, optimizer: Optimizer) -> Strategy:
    """The strategy itself, which does the same with each optimizer."""
    return strategy


@dataclass(frozen=True, repr=False)
class Strategy:
    """Work between `backward()` and the next `forward()`.

    `gradients` runs before `optimizer.step`, `parameters` after it. `name` is the strategy as the command line has it;
    ranks compare it before they begin.

    `layout` places a model on workers, and `meeting` names their partners.
    `synchronized`: all ranks hold equal parameters after every step. Where it is False, the mean of the ranks' models
    is evaluated and handed out.
    `carries_optimizer`: the `parameters` transform sees the optimizer's state tensors too.
    `momentum`: momentum within `gradients` (`dgc`). The optimizer must then have none, or it counts twice.
    `before`: the strategy that trains first, so that this one begins with its model.
    `sample_privacy`: gradients of single samples are clipped, and their sums have noise.
    `fit`: this strategy with a given optimizer; it raises ValueError for an optimizer that does not suit it.
    """

    name: str
    gradients: Transform = field(default_factory=identity)
    parameters: Transform = field(default_factory=identity)
    layout: Layout = field(default_factory=Undivided)
    meeting: Meeting = field(default_factory=ByMessages)
    synchronized: bool = True
    carries_optimizer: bool = False
    momentum: float = 0.0
    before: Before | None = None
    sample_privacy: SamplePrivacy | None = None
    fit: Callable[[Strategy, Optimizer], Strategy] = any_optimizer

    @property
    def schedule(self) -> Staged | None:
        """The order of stages' work; None where the model is not cut into stages."""
        return self.layout.schedule if isinstance(self.layout, InStages) else None

    @property
    def parted(self) -> Parted | None:
        """The layers that are divided over workers; None where each has whole layers."""
        layers = self.layout.layers if isinstance(self.layout, InStages) else self.layout
        return layers.parted if isinstance(layers, InParts) else None

    @property
    def distillation(self) -> Distillation | None:
        """The groups of workers; None where all train one model."""
        return self.layout.distillation if isinstance(self.layout, InGroups) else None

    @property
    def server(self) -> Service | None:
        """The parameter server; None where there is none."""
        return self.meeting if isinstance(self.meeting, Service) else None

    @property
    def slices(self) -> int | None:
        """The number of slices of a global batch; None where each rank computes its batch whole."""
        return self.meeting.number if isinstance(self.meeting, InSlices) else None

    @property
    def rounds(self) -> InRounds | None:
        """The rounds of clients; None where workers train on the data themselves."""
        return self.meeting if isinstance(self.meeting, InRounds) else None

    @property
    def one_copy(self) -> Turn | None:
        """The turn of ranks that write to one copy of the parameters; None where each has its own."""
        return self.meeting.turn if isinstance(self.meeting, OnOneCopy) else None

    @property
    def stages(self) -> int:
        """Workers that hold the stages of one model."""
        return 1 if self.schedule is None else self.schedule.stages

    @property
    def holders(self) -> int:
        """Workers with the same samples that hold one model together, as stages or as parts of layers."""
        return self.stages * (1 if self.parted is None else self.parted.ranks)

    @property
    def groups(self) -> int:
        """Models that are trained, each by workers of its own."""
        return 1 if self.distillation is None else self.distillation.groups

    @property
    def least_ranks(self) -> int:
        """Ranks that its merges need."""
        return max(self.gradients.least_ranks, self.parameters.least_ranks)

    @property
    def is_noisy(self) -> bool:
        """True where samples spend privacy, which is then counted."""
        return self.sample_privacy is not None and self.sample_privacy.noise > 0

    @property
    def features(self) -> frozenset[str]:
        """Names of its differences from messages between whole models; `core.calls.refusals` excludes pairs of them."""
        service = self.server
        found = {
            "server": service is not None,
            "helping": service is not None and service.reassigns is not None,
            "host sums": service is not None and service.hierarchical,
            "regions": service is not None and service.rule.region_size > 0,
            "wires at a server": service is not None and (service.codec or service.pull_codec) is not None,
            "one copy": self.one_copy is not None,
            "racing": self.one_copy not in (None, "together"),
            "slices": self.slices is not None,
            "rounds": self.rounds is not None,
            "noise": (self.rounds is not None and self.rounds.is_noisy) or self.is_noisy,
            "private samples": self.sample_privacy is not None,
            "stages": self.schedule is not None,
            "parts": self.parted is not None,
            "groups": self.distillation is not None,
            "then": self.before is not None,
        }
        return frozenset(name for name, has in found.items() if has)

    def between_equals(self) -> Strategy:
        """The two transforms alone, between workers that hold the same parameters and compute whole batches."""
        return replace(
            self,
            layout=Undivided(),
            meeting=ByMessages() if isinstance(self.meeting, InSlices) else self.meeting,
            sample_privacy=None,
        )

    def laid_out(self, name: str, layout: Layout, meeting: Meeting | None = None) -> Strategy:
        """This strategy between holders of the same part of a model that is laid out as `layout`."""

        def fitted(_: Strategy, optimizer: Optimizer) -> Strategy:
            return replace(self.fit(self, optimizer), name=name, layout=layout, fit=any_optimizer)

        fit = any_optimizer if self.fit is any_optimizer else fitted
        return replace(self, name=name, layout=layout, meeting=self.meeting if meeting is None else meeting, fit=fit)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


def check_merges(strategy: Strategy, workers: int) -> None:
    """ValueError for fewer workers than the merges of `strategy` need. A worker that meets no other merges nothing."""
    apart = strategy.holders * strategy.groups
    least = strategy.least_ranks * apart
    if apart < workers < least:
        raise ValueError(
            f"{strategy} has a merge that needs at least {least} workers, and there are {workers}; use workers={least} "
            "or more, or a merge with smaller numbers"
        )


def undoes_steps(strategy: Strategy) -> bool:
    """True if the strategy makes provisional steps (`core.state.ProvisionalState`)."""
    return any(True for _ in nodes(strategy.gradients.init(Bundle({"w": torch.zeros(1)})), ProvisionalState))


def averages_numbers(strategy: Strategy) -> bool:
    """True if ranks decide on later steps by numbers that they average (`core.state.OwnNumbers`)."""
    layout = Bundle({"w": torch.zeros(2)})
    states = (strategy.gradients.init(layout), strategy.parameters.init(layout))
    return any(True for _ in nodes(states, OwnNumbers))


def checked_inner(strategy: Strategy, who: str) -> Strategy:
    """The strategy itself. ValueError unless it is two transforms alone, for `who` to build on."""
    if strategy.carries_optimizer or strategy.fit is not any_optimizer or strategy.features:
        raise ValueError(
            f"{who} takes an inner strategy that exchanges gradients or parameters alone, by messages, and {strategy} "
            "works by another way; give one such as sync_sgd(), top_k_sgd(), local_sgd() or gossip()"
        )
    if undoes_steps(strategy):
        raise ValueError(
            f"{who} exchanges parameters, and {strategy} undoes every second step, with all that came behind it; give "
            "an inner strategy such as sync_sgd()"
        )
    return strategy
