"""What training asks of a split model: parameters that every rank has whole, such as norms, and its optimizer.

Their gradients are the same bits on all ranks of a model. What ranks then exchange along "data" may not be: a codec
chooses by what else lies in its bucket, and a ring adds in an order that depends on the place in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer

from polytempo.core import Bundle
from polytempo.large_batch.layer_wise import LayerWise
from polytempo.partition.tensor import SplitModel
from polytempo.training.model.tensor_groups import by_kind

_OF_WHOLE_LAYERS = (LayerWise, Adafactor, LBFGS, Muon)


def check_optimizer(optimizer: Optimizer, splits: Sequence[SplitModel], own: Collection[str]) -> None:
    """Raise ValueError for an optimizer that would take a rank's part of a layer, or `own` part, for the layer."""
    parts = own or any(split.group.size > 1 for split in splits)
    if isinstance(optimizer, _OF_WHOLE_LAYERS) and parts:
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole layers, of which this rank has parts; with pt.split and "
            "pt.hybrid use an optimizer that treats each element by itself, such as SGD or AdamW"
        )


def counted_elsewhere(splits: Sequence[SplitModel]) -> list[nn.Parameter]:
    """Parameters that the first rank of the model counts, where this is another one."""
    return [p for split in splits if split.group.rank for p in split.replicated()]


async def align(splits: Sequence[SplitModel]) -> None:
    """Take the first rank's values of parameters that all ranks of a model have whole. Cost: a broadcast of these."""
    for split in splits:
        held = {str(i): p.detach() for i, p in enumerate(split.replicated())}
        for group in by_kind(held).values() if split.group.size > 1 else ():
            bundle = Bundle(group).copy()
            first = bundle.with_flat(await split.group.port.broadcast(bundle.flat))
            for name, view in first.views.items():
                group[name].copy_(view)
