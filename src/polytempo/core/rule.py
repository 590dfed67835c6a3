"""`Rule`: a parameter server's decisions, without I/O; `Service`: all that a strategy says about its server.

    worker ──push──▶ ┌─ shard ───────────────────────────────┐
                     │ rule.receive(state, arrival, situation)│──▶ actions: Add, Update, Answer, …   (data)
    worker ◀─answer─ └─ weights, optimizer, versions ────────┘◀── the shard performs them

A rule never sees a tensor. It sees requests, and decides on actions. The shard owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from polytempo.core.codec import Codec, PullCodec

RuleState = Any
"""A tree of ints, floats, strings, tuples and dicts, for msgspec; rules return new ones, never mutate."""


class Arrival(NamedTuple):
    """A request that has reached a shard, as its rule sees it.

    kind "push": a gradient, which from now on waits at the shard under (worker) until it is added or dropped.
    kind "had": a push that is dropped, and answered, because its tickets are applied already: its steps are done, too.
    kind "pull": the worker asks for the weights. "joined", "left": the worker is a member from now on, or no
    more (its waiting gradients are gone already when the rule hears of "left").
    kind "elapsed": the rule's window is over; no worker asks, and `worker` is -1.
    kind "settled", for rules with regions alone: a change of members is complete; `worker` is -1.
    """

    kind: Literal["push", "had", "pull", "joined", "left", "elapsed", "settled"]
    worker: int
    clock: int = 0
    """Steps of the worker: with a push, steps with gradients so far; with a pull, finished steps."""
    basis: int = 0
    """The version of this shard's weights that the gradient was computed on."""
    samples: int = 0
    """The gradient's number of samples."""
    tickets: tuple[int, ...] = ()
    """Numbers of the gradient's batches, or slices of batches."""
    others: tuple[int, ...] = ()
    """The other workers of a host's sum. See `Rule.adds_sums`."""
    last: bool = False
    """A pull's: the worker has no more work."""


class Situation(NamedTuple):
    """Facts about the shard that a rule may look at."""

    version: int
    """The number of updates of this shard's weights; where there are regions, of the weights that the worker reads."""
    members: tuple[int, ...]
    """The workers that take part, in order."""


class Add(NamedTuple):
    """Add the gradient of `worker` that waits longest to the shard's sum; it waits no more."""

    worker: int
    weight: float = 1.0
    """m: its weight in the mean, its samples for example."""
    rate: float = 1.0
    """s: the factor of the learning rates that came with it, 1/τ for example."""
    part_of: int | None = None
    """The gradient's batch, if it is a part of one. It goes to a sum apart, as it is, until an update includes that."""


class Update(NamedTuple):
    """θ ← one step of the optimizer on Σ mᵢ gᵢ / D, D = `divisor`; the sum is 0 again, the version one more.

    It has the pushes' learning rate. Where they differ, or s does, each gradient counts by its own: the step has
    the rate η̄ = Σ mᵢ sᵢ ηᵢ / Σ mᵢ and the gradient Σ mᵢ sᵢ ηᵢ gᵢ / (D η̄); see `server.step_rates`.

    `including`: a batch. Its parts, if there are any, are added to the sum before. They have its rate. `region`: the
    step is of that region's weights, by its workers' gradients; None: of the shard's own.
    """

    divisor: float = 1.0
    including: int | None = None
    region: int | None = None


class MergeRegion(NamedTuple):
    """The movement of a region's weights φ since the last time makes a step of θ; then φ ← (1 - a) φ + a θ.

        Δ = φ₀ - φ;  θ ← one step of `Service.outer` on Δ, at s times its rate;  φ ← (1 - a) φ + a θ;  φ₀ ← φ

    a = `share`, s = `rate`. φ₀ are the region's weights after the last time, or when it began.
    """

    region: int
    share: float
    rate: float = 1.0


class DropRegion(NamedTuple):
    """A region without workers ends. It begins again with θ, when one of its workers joins."""

    region: int


class Drop(NamedTuple):
    """The gradient of `worker` that waits longest is not used, for `reason`; its worker hears of it."""

    worker: int
    reason: str = "late"


class Mix(NamedTuple):
    """Elastic averaging with x, the parameters that `worker` pushed: d = α (x - θ); θ ← θ + d; d is its answer."""

    worker: int
    alpha: float


class Answer(NamedTuple):
    """Answer the requests of `worker` that wait, oldest first, up to a push with a waiting gradient.

    A push's answer says if its gradient was used; a pull's is θ at this action's turn. Where nothing waits, nothing
    happens.
    """

    worker: int


RegionAction = MergeRegion | DropRegion
Action = Add | Update | RegionAction | Drop | Mix | Answer


class Rule(NamedTuple):
    """A pair of functions, as `Transform` is.

    `init() -> state`; `receive(state, arrival, situation) -> (state, actions)`. Actions are performed in order. A
    gradient that is not added or dropped by the actions of its own arrival goes on waiting at the shard.
    """

    name: str
    """The call that makes it: `softsync(n=4)`."""
    init: Callable[[], RuleState]
    receive: Callable[[RuleState, Arrival, Situation], tuple[RuleState, list[Action]]]
    needs_newest: bool = False
    """True if it drops gradients that were not computed on the newest weights."""
    waits_for_several: bool = False
    """True if an update is a mean of several pushes."""
    window_s: Callable[[RuleState, Situation], float | None] | None = None
    """The length of the rule's window in this state: at its end comes an arrival "elapsed". None: there is no window.

    A rule has no clock. The shard's first copy looks at one, and the end of the window is an entry of the log."""
    adds_sums: bool = False
    """True if a push may be the sum of several workers' gradients. It is then added by the actions of its own arrival,
    with the rate 1, and all its workers are answered."""
    region_size: int = 0
    """The workers of a region: worker w is of region w // region_size. It pulls and updates that region's weights, and
    the shard's own, θ, change by `MergeRegion` alone. 0: there are no regions."""
    region_pushes: int = 1
    """The pushes of a region between two of its `MergeRegion`."""


Staleness = Callable[[int], float]
"""τ, the updates between the version that a gradient was computed on and the present one -> the factor of its
learning rate."""

Rate = Callable[[int], float]
"""The number of workers -> the factor of the job's learning rate at the server."""

Modifier = Callable[..., Tensor]
"""`(gradient, weights, basis)`, all flat, basis the weights that the gradient was computed on where `needs_basis`
(else None) -> the gradient to use. It must not write to these: other copies of the shard read them, too. Where it
`remembers` it is given a fourth vector, 0 at first, which is its own to write to and part of the shard's state."""


@dataclass(frozen=True)
class Modified:
    """A modifier with its name, whether it needs the weights that a gradient was computed on, and whether it remembers.

    Its memory is the second moment's place, free with SGD. So it goes with SGD alone, and is the only one of its kind.
    """

    name: str
    apply: Modifier
    needs_basis: bool = False
    remembers: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer inside the shards. `lr` None: the worker's present learning rate, which travels with each push."""

    kind: Literal["sgd", "adagrad", "adam", "adamw"]
    lr: float | None = None
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    momentum_every: int = 1
    """Steps of SGD between two changes of its momentum. A step between them is without momentum; the momentum then
    takes in the sum of all their gradients (delayed Nesterov). More than 1: with `nesterov`, nothing else."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lr_decay: float = 0.0
    initial: float = 0.0
    """The first value of Adagrad's accumulator."""
    maximize: bool = False


@dataclass(frozen=True)
class Service:
    """A strategy's parameter server.

    `optimizer` None: the job's own, moved into the shards. `decays` says who adds the weight decay that belongs to the
    gradient: the "shards", to each update's, or the "workers", to each batch's, before they step and push.
    `deals` "freely": a worker that is free takes the next batch;
    "evenly": each step deals one batch to each worker. `warm_start`: so many steps of one worker alone first. `waits`:
    the rule makes workers wait for each other, so it must hear of workers without work. `rate` None: the job's
    learning rate as it is. `reassigns`: workers help each other by these constants (a
    `flexrr.reassignment.Reassignment`); None: each does its own work. `codec` encodes pushes to each shard, and
    `pull_codec` pulls from it; None: vectors travel as they are.
    """

    rule: Rule
    optimizer: UpdateRule | None = None
    modifiers: tuple[Modified, ...] = ()
    shards: int = 1
    replicas: int = 0
    deals: Literal["freely", "evenly"] = "freely"
    warm_start: int = 0
    waits: bool = False
    rate: Rate | None = None
    reassigns: object | None = None
    codec: Codec | None = None
    pull_codec: PullCodec | None = None
    numbers_per_batch: int = 1
    """The ticket numbers of a batch at the shards; the last one closes it. More than 1: batches are cut into slices."""
    allow_nan: bool = False
    """True if shards apply gradients with NaN or infinities; otherwise they refuse such a push."""
    decays: Literal["shards", "workers"] = "shards"
    hierarchical: bool = False
    """True if the workers of a host add up their gradients first, and one of them pushes the sum."""
    average: float | None = None
    """The decay of a moving average of the weights that each shard keeps, for scores; None: there is none."""
    outer: UpdateRule | None = None
    """The optimizer of θ with its rate, if the rule has regions; `optimizer` is then of each region's weights. None:
    plain SGD with the rate 1."""
    least_workers: int = 1
    """A run with fewer workers is refused when it starts: the strategy's arguments leave none of them to wait for."""
