"""Tensor parallelism: layers of one model on several workers, and a strategy between the models."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name
from polytempo.partition.staged_strategy import over_parts
from polytempo.partition.tensor.rules import Rules, rule_text, rules_of
from polytempo.partition.tensor.way import AUTO, SplitLayers
from polytempo.partition.wires import Wires
from polytempo.strategies.sync_sgd import sync_sgd


def split(
    rules: Rules | str = "auto",
    parts: int = 2,
    sequence: bool = False,
    inner: Strategy | None = None,
    activations: Codec | None = None,
    gradients: Codec | None = None,
) -> Strategy:
    """Split the layers that `rules` name over `parts` workers, which compute one batch together.

    `rules` go from layers' names, or patterns with `*`, to ways: {"*.up": "column", "*.down": "row"}, or as text:
    '*.up: column, *.down: row'. `pt.split`, the same for a loop of one's own, lists the ways and explains `sequence`.
    "auto" splits every layer that can be, by the ways that send the fewest bytes (`partition.plan.split_choice`). The
    loss gets the model's whole answer: the answer of a layer split by "vocabulary" is gathered, except for
    `torch.nn.functional.cross_entropy` of class indices, which needs less.

    `workers` is a multiple of `parts`: worker r has part r mod N of model r // N; the N workers of a model get the same
    batches. `inner` (default: `sync_sgd()`) is the strategy between workers that hold the same parts.

    `activations` and `gradients`: codecs for the layers' exchanges, as in `pt.split`.

    Cost: activations; `partition.tensor.traffic` counts their bytes. Gradients, optimizer state and activations
    of split layers exist once over the N workers.

    Source: M. Shoeybi et al., "Megatron-LM", 2019.
    """
    written = AUTO if rules == AUTO else rules_of(rules)
    text = AUTO if isinstance(written, str) else rule_text(written)
    name = call_name(split, {**locals(), "rules": text}, brief=("inner", "activations", "gradients"))
    return over_parts(name, SplitLayers(written, parts, sequence, Wires(activations, gradients)), inner or sync_sgd())
