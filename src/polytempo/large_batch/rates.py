"""Learning rates of a larger batch: how they grow with it, and how they go from there.

k times the batch ──▶ linear, square_root: the factor of the rate ──▶ warm_up · cosine · …: as epochs go by
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Factor = Callable[[float], float]
"""Epochs so far, with fractions -> the factor of the learning rate."""


def linear(times: float) -> float:
    """The factor of the learning rate for a batch that is `times` times as large: k.

    k steps of rate γ on batches of n, and one of kγ on a batch of kn, are about the same while the gradient changes
    little. It does not hold in the first epochs (see `warm_up`), nor beyond some batch that depends on the task.
    Source: P. Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1.
    """
    return _grown(times)


def square_root(times: float) -> float:
    """√k: it keeps the covariance of a step, as the rule for Adam and its kin (with `adam`, which moves β, too).

    Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5.
    """
    return math.sqrt(_grown(times))


def adam(times: float, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> dict[str, object]:
    """Adam's options for a batch that is so many times as large, as keywords for `torch.optim.Adam`.

        lr √k        βᵢ ← 1 - k (1 - βᵢ)        ε / √k

    The moments forget after the same number of samples. Errors: ValueError where k is so large that a β is none.
    Source: S. Malladi, K. Lyu, A. Panigrahi and S. Arora, "On the SDEs and scaling rules for adaptive gradient
    algorithms", 2022.
    """
    kept = tuple(1 - _grown(times) * (1 - beta) for beta in betas)
    if min(kept) < 0:
        most = min(1 / (1 - beta) for beta in betas)
        raise ValueError(f"with betas={betas} the batch can be {most:g} times as large at most, got {times:g}")
    return {"lr": lr * math.sqrt(times), "betas": kept, "eps": eps / math.sqrt(times)}


def warm_up(epochs: float, start: float = 0.0, *, constant: bool = False) -> Factor:
    """Grow from `start` to 1 in so many epochs, by the same amount in each step; `constant`: at `start` until then.

    With k times the batch and k times the rate, `start=1 / k` begins at the rate of the small batch.
    Source: P. Goyal et al., 2017, section 2.2.
    """
    if not (0 <= epochs < math.inf and 0 <= start <= 1):
        raise ValueError(f"a warm-up takes 0 epochs or more, from 0 to 1 times the rate; got {epochs} from {start}")

    def factor(epoch: float) -> float:
        return 1.0 if epoch >= epochs else start if constant else start + (1 - start) * epoch / epochs

    return factor


def polynomial(epochs: float, power: float = 1.0) -> Factor:
    """(1 - t/T)^power, 0 from the last epoch T on. FireCaffe's has power 1/2."""
    _check_positive(epochs=epochs, power=power)
    return lambda epoch: max(0.0, 1 - epoch / epochs) ** power


def cosine(epochs: float, end: float = 0.0) -> Factor:
    """Fall from 1 to `end` along half a cosine, and stay at `end`.

    Source: I. Loshchilov and F. Hutter, "SGDR: Stochastic gradient descent with warm restarts", 2017, equation 5.
    """
    _check_positive(epochs=epochs)
    if not 0 <= end < math.inf:
        raise ValueError(f"a cosine ends at a part of the rate, 0 or more, got end={end!r}")
    return lambda epoch: end + (1 - end) * (1 + math.cos(math.pi * min(1.0, epoch / epochs))) / 2


def falling(at: Sequence[float], factor: float = 0.1) -> Factor:
    """Times `factor` after each of these epochs. Errors: ValueError for a factor that is not positive."""
    _check_positive(factor=factor)
    if not isinstance(at, Sequence):
        raise ValueError(f"falling takes the epochs of the rate's falls, got {at!r}; write falling([{at}])")
    return lambda epoch: factor ** sum(epoch >= each for each in at)


def schedule(*factors: Factor) -> Callable[[Optimizer, int], LRScheduler]:
    """A job's `schedule`: the rate that the optimizer has, times all these factors.

        pt.Job(..., schedule=schedule(warm_up(5, start=1 / 8), cosine(90)))

    Epochs are the run's, with fractions: it moves in every step. With a parameter server tickets count them, so that
    no worker's speed matters. In one's own loop: `schedule(…)(optimizer, steps_per_epoch)`.
    """

    def made(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: math.prod(factor(step / steps_per_epoch) for factor in factors))

    return made


def _grown(times: float) -> float:
    _check_positive(times=times)
    return times


def _check_positive(**given: float) -> None:
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
