"""Hybrid parallelism: some layers by model parallelism, all others by data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.core import Codec, Strategy, call_name
from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import undoes_steps
from polytempo.core.transform import is_idle
from polytempo.partition.hybrid.divided_names import DividedNames, names_of
from polytempo.partition.hybrid.traffic import Exchange
from polytempo.partition.staged_strategy import over_parts
from polytempo.partition.tensor.way import AUTO
from polytempo.partition.wires import Wires
from polytempo.strategies.sync_sgd import sync_sgd

_SOME_RANKS = 2


def hybrid(
    layers: str | Sequence[str] = "auto",
    exchange: Exchange = "joined",
    link: str | None = None,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Divide the weights of `layers` over all workers; each gets samples of its own.

    `layers`: names or patterns, as a list or as text with commas: 'classifier.1, classifier.4'. "auto" takes the layers
    of `pt.training.plan_layers` for the run's workers and batch: where inputs are fewer bytes than weights, or with
    `link`, such as "1gbit", where they take less time on that link. `exchange`: the rounds of samples; see
    `partition.hybrid.traffic`. `inner` (default: `sync_sgd()`) exchanges the gradients of all other layers.

    `activations` and `gradients`: codecs for the divided layers' exchanges, as in `pt.hybrid`. `inner` encodes its own
    exchanges.

    Cost: 2(N-1) · B · I + 2(N-1)/N · B · O numbers for a divided layer of I inputs and O outputs, for the B samples of
    all N workers, and nothing for its weights. `pt.hybrid` is this for a loop of one's own.

    Source: A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014; the plan is from F.
    Iandola et al., "FireCaffe", 2016.
    """
    given = [name for name in layers.split(",") if name.strip()] if isinstance(layers, str) else layers
    names = tuple(name.strip() for name in names_of(given))
    between = inner or sync_sgd()
    codecs = {"activations": activations, "gradients": gradients}
    shown = {"layers": ", ".join(names), "exchange": exchange, "link": link, "inner": inner, **codecs}
    name = call_name(hybrid, shown, brief=("inner", *codecs))
    chosen = None if names == (AUTO,) else names
    found = over_parts(name, DividedNames(chosen, exchange, link, Wires(activations, gradients)), between)
    if not (between.synchronized and is_idle(between.parameters, _SOME_RANKS)):
        refuse({"divided layers", "models differ"}, who=name, strategy=between)
    if undoes_steps(between):
        refuse({"divided layers", "provisional steps"}, who=name, strategy=between)
    return found
