"""One copy of the weights on a host: synchronous SGD without copies."""

from __future__ import annotations

from polytempo.aggregation import mean
from polytempo.core import Strategy, call_name, native
from polytempo.core.strategy import OnOneCopy


def shared_memory() -> Strategy:
    """Synchronous SGD on one copy of parameters and optimizer state, shared by the workers of a host.

    g = Σᵢ (nᵢ/n) gᵢ and one step of the optimizer, as in `sync_sgd`: the same model, to rounding. A step is: all
    meet; every rank reduces its slice of the gradients over the ranks and applies the optimizer to it in the same
    pass; all meet. Under the virtual clock it is `sync_sgd`, with own copies.

    Cost on N workers with K bytes of gradients: each reads K and writes its K/N of the parameters and the optimizer's
    state, where N copies of the optimizer would write K each. Memory: one copy instead of N.

    Source: the rule is from J. Chen et al., "Revisiting distributed synchronous SGD", 2016; the layout is ours.
    """
    return Strategy(call_name(shared_memory, locals()), gradients=mean(native), meeting=OnOneCopy("together"))
