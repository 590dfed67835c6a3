"""`Rule`: a parameter server's decisions, without I/O; `Service`: all that a strategy says about its server.

    worker ──push──▶ ┌─ shard ───────────────────────────────┐
                     │ rule.receive(state, arrival, situation)│──▶ actions: Add, Update, Answer, …   (data)
    worker ◀─answer─ └─ weights, optimizer, versions ────────┘◀── the shard performs them

A rule never sees a tensor. It sees who asks for what, and says what becomes of it. The shard owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from polytempo.core.codec import Codec

RuleState = Any
"""A tree of ints, floats, strings, tuples and dicts (what msgspec can write); rules return new ones, never mutate."""


class Arrival(NamedTuple):
    """A request that has reached a shard, as its rule sees it.

    kind "push": a gradient, which from now on waits at the shard under (worker) until it is added or dropped.
    kind "had": a push that is dropped, and answered, because its tickets are applied already: its steps are done, too.
    kind "pull": the worker asks for the weights. "joined", "left": the worker is a member from now on, or no more (what
    waited of it is gone already when the rule hears of "left").
    """

    kind: Literal["push", "had", "pull", "joined", "left"]
    worker: int
    clock: int = 0
    """Steps of the worker: of a push those that its gradients so far are from, of a pull those that it has finished."""
    basis: int = 0
    """The version of this shard's weights that the gradient was computed on."""
    samples: int = 0
    """How many samples the gradient is of."""
    tickets: tuple[int, ...] = ()
    """The numbers of what the gradient is of: batches, or slices of them."""
    others: tuple[int, ...] = ()
    """The workers whose gradients are in it, too, where it is the sum of a host's. See `Rule.adds_sums`."""


class Situation(NamedTuple):
    """What else a rule may look at."""

    version: int
    """How many updates this shard's weights have had."""
    members: tuple[int, ...]
    """The workers that take part, in order."""


class Add(NamedTuple):
    """Add the gradient of `worker` that waits longest to the shard's sum; it waits no more."""

    worker: int
    weight: float = 1.0
    """m: how much it counts in the mean, its samples for example."""
    rate: float = 1.0
    """s: what the learning rates that came with it are multiplied by, 1/τ for example."""
    part_of: int | None = None
    """A batch, of which the gradient is a part. It goes to a sum apart, as it is, until an update includes that."""


class Update(NamedTuple):
    """θ ← one step of the optimizer on Σ mᵢ gᵢ / D, D = `divisor`; the sum is 0 again, the version one more.

    Its learning rate is that of the pushes. Where they differ, or s does, each gradient counts by its own: the step has
    the rate η̄ = Σ mᵢ sᵢ ηᵢ / Σ mᵢ and the gradient Σ mᵢ sᵢ ηᵢ gᵢ / (D η̄); see `server.step_rates`.

    `including`: a batch whose parts, as far as there are any, are added to the sum before. They have its rate.
    """

    divisor: float = 1.0
    including: int | None = None


class Drop(NamedTuple):
    """The gradient of `worker` that waits longest is not used, for `reason`; its worker hears of it."""

    worker: int
    reason: str = "late"


class Mix(NamedTuple):
    """Elastic averaging with what `worker` pushed, its own parameters x: d = α (x - θ); θ ← θ + d; d is its answer."""

    worker: int
    alpha: float


class Answer(NamedTuple):
    """Answer the requests of `worker` that wait, oldest first, up to a push whose gradient still waits.

    Pushes are answered with what became of them, pulls with θ as it is when this action's turn comes. Where nothing
    waits, nothing happens.
    """

    worker: int


Action = Add | Update | Drop | Mix | Answer


class Rule(NamedTuple):
    """A pair of functions, as `Transform` is.

    `init() -> state`; `receive(state, arrival, situation) -> (state, actions)`. Actions are performed in order. A
    gradient that is not added or dropped by the actions of its own arrival goes on waiting at the shard.
    """

    name: str
    """As a person would write it: `softsync(n=4)`."""
    init: Callable[[], RuleState]
    receive: Callable[[RuleState, Arrival, Situation], tuple[RuleState, list[Action]]]
    needs_newest: bool = False
    """Whether it drops gradients that were not computed on the newest weights."""
    adds_sums: bool = False
    """Whether a push may be the sum of several workers' gradients. It is then added by the actions of its own arrival,
    with the rate 1, and all its workers are answered."""


Staleness = Callable[[int], float]
"""τ, the updates between the version that a gradient was computed on and the present one -> what its learning rate is
multiplied by."""

Rate = Callable[[int], float]
"""The number of workers -> what the job's learning rate is multiplied by at the server."""

Modifier = Callable[..., Tensor]
"""`(gradient, weights, basis)`, all flat, basis the weights that the gradient was computed on where `needs_basis`
(else None) -> the gradient to use. It must not write to these: other copies of the shard read them, too. Where it
`remembers` it is given a fourth vector, 0 at first, which is its own to write to and part of the shard's state."""


@dataclass(frozen=True)
class Modified:
    """A modifier with its name, whether it needs the weights that a gradient was computed on, and whether it remembers.

    What it remembers lies where SGD has no second moment, so it goes with SGD alone, and is the only one of its kind.
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
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lr_decay: float = 0.0
    initial: float = 0.0
    """What Adagrad's accumulator begins with."""
    maximize: bool = False


@dataclass(frozen=True)
class Service:
    """What a strategy says about its parameter server.

    `optimizer` None: the job's own, moved into the shards. `decays` says who adds the weight decay that belongs to the
    gradient: the "shards", to each update's, or the "workers", to each batch's, before they step and push.
    `deals` "freely": a worker that is free takes the next batch;
    "evenly": each step deals one batch to each worker. `warm_start`: so many steps of one worker alone first. `waits`:
    the rule makes workers wait for each other, so it must hear of those that have no work for now. `rate` None: the
    job's learning rate as it is. `reassigns`: workers help each other by these constants (a
    `flexrr.reassignment.Reassignment`); None: each does its own work. `codec` encodes what is pushed to each shard, and
    `pull_codec` what is pulled from it; None: vectors travel as they are.
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
    pull_codec: Codec | None = None
    numbers_per_batch: int = 1
    """By how many ticket numbers the shards know one batch, the last of which closes it; more than 1 where batches are
    cut into slices."""
    allow_nan: bool = False
    """Whether shards apply gradients that hold NaN or infinities; otherwise they refuse such a push."""
    decays: Literal["shards", "workers"] = "shards"
    hierarchical: bool = False
    """Whether the workers of a host add up their gradients first, and one of them pushes the sum."""
    least_workers: int = 1
    """A run with fewer workers is refused when it starts: the strategy's arguments leave none of them to wait for."""
