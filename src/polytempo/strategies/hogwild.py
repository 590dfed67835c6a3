"""Hogwild!: workers of one host update one copy of the parameters, without locks."""

from __future__ import annotations

from typing import Literal, get_args

from polytempo.core import Strategy, call_name
from polytempo.core.strategy import OnOneCopy

Update = Literal["free", "atomic", "locked", "in_turn"]


def hogwild(update: Update = "free") -> Strategy:
    """Every worker: read the parameters as they are, compute a gradient, subtract it from them as they are by then.

    θᵥ ← θᵥ - γ gᵥ for the components v that the gradient touches. No worker waits. With "free" a component is read,
    added to and stored, so of two updates of one component at the same moment one may be lost; where gradients are
    sparse that is rare. With "atomic" the addition is one step, as the paper assumes, and none is lost.
    For comparison, as in the paper: "locked" lets one worker write at a time (AIG), and "in_turn" lets them write in
    the order of ranks, each once (round-robin: gradients are N - 1 updates old). The virtual clock performs updates one
    after the other, so "free" and "atomic" are the same there.

    The optimizer's state, where it has any, stays with the worker; the paper's has none (plain SGD, with the step size
    multiplied by β = 0.9 after each epoch: a job's `schedule`). Steps count a worker's own updates, so N workers make
    N updates a step, each with its weight decay. Workers must be on one host.

    Cost: an update writes the touched components: the rows of an embedding's sparse gradient, all of a dense one. An
    atomic addition takes longer than a load and a store (`benchmarks/one_host/README.md`). "atomic" adds
    the gradients of plain SGD directly. Any other step (momentum, weight decay, Adam) it makes on a private copy, and
    adds the changes: two more copies of the parameters a worker. It takes float32 and float64.

    Source: B. Recht, C. Re, S. Wright and F. Niu, "Hogwild!: a lock-free approach to parallelizing stochastic gradient
    descent", 2011, section 2 (the rule) and section 7 (AIG and round-robin). It locks the components of one sample
    where we lock the model (`fit_logistic` does as the paper).
    """
    if update not in get_args(Update):
        raise ValueError(f"update must be one of {', '.join(get_args(Update))}, got {update!r}")
    return Strategy(call_name(hogwild, locals()), synchronized=False, meeting=OnOneCopy(update))
