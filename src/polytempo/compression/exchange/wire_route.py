"""`WireRoute`: how encoded tensors travel and become one, for one `ExchangePlan`.

all_reduce       wires are numbers that may be added                  every rank decodes one sum
all_gather       every rank sends its wire to every other             every rank decodes N wires
reduce_scatter   each rank owns a stripe: it gets the others'         every rank decodes N-1 wires of a stripe,
                 wires of it, adds, encodes the sum, hands it out     and then N wires of 1/N each

Which of them is right depends on the codec: see `through`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polytempo.compression.encoding.values import first_nonfinite
from polytempo.compression.exchange.packing import EXACT_BELOW, Packing, stripes, whole
from polytempo.core import Bundle, Codec, CodecState, NotFinite, Port, Program, Residual
from polytempo.core.arithmetic.merge import Merge
from polytempo.core.codec import PartlyGiven
from polytempo.core.state import narrowed, tuple_like


class Exchanged(NamedTuple):
    """The number of exchanges so far, and the codec's state for each parameter."""

    step: int
    codecs: dict[str, CodecState]


@dataclass(frozen=True)
class ExchangePlan:
    """The constants of an exchange: `merge` None is the weighted mean. Layouts are worked out once and kept."""

    codec: Codec
    merge: Merge | None = None
    exact_below: int = EXACT_BELOW
    layouts: dict[tuple[Any, ...], list[Packing]] = field(default_factory=dict)

    def packing(self, bundle: Bundle) -> Packing:
        """The whole bundle as one message."""
        return self.striped(bundle, 1)[0]

    def striped(self, bundle: Bundle, num_ranks: int) -> list[Packing]:
        """The bundle as a message for each owner of a stripe."""
        key = (num_ranks, *((name, t.shape, t.dtype) for name, t in bundle.tensors.items()))
        if key not in self.layouts:
            likes = bundle.views
            pieces = whole(likes, self.codec, self.exact_below)
            cut = stripes(pieces, likes, num_ranks) if num_ranks > 1 else [pieces]
            self.layouts[key] = [Packing(stripe, likes) for stripe in cut]
        return self.layouts[key]


WireRoute = Callable[[Port, Bundle, Exchanged, ExchangePlan], Program["tuple[Bundle, Exchanged]"]]
"""An exchange of wires, and their merge: `await route(port, bundle, state, plan)`."""


def contribution(port: Port, bundle: Bundle, plan: ExchangePlan) -> Bundle:
    """This rank's part of the mean; for a merge, all of the rank's bundle."""
    if plan.merge is not None:
        return bundle
    share = 1 / port.size if bundle.share is None else bundle.share
    return bundle.with_flat(bundle.scaled(share) if share else torch.zeros_like(bundle.flat))


def check_finite(bundle: Bundle, codec: Codec, states: Mapping[str, CodecState], rank: int) -> None:
    """Raise NotFinite before the first tensor is encoded, so that no residual has changed when the last is refused."""
    if not states or codec.facts.passes_nonfinite or bundle.flat.is_meta or first_nonfinite(bundle.flat) < 0:
        return
    name, view, index = next(
        (name, view, index) for name, view in bundle.views.items() if (index := first_nonfinite(view)) >= 0
    )
    raise NotFinite(codec.facts.name, index, float(view.reshape(-1)[index]), f"{name} on rank {rank}")


def flushed(bundle: Bundle, state: Exchanged) -> tuple[Bundle, Exchanged]:
    """Alone, no rank needs an encoding: residuals from when there were others are given, and are gone."""
    codecs: dict[str, CodecState] = {}
    for name, codec_state in state.codecs.items():
        residuals, codecs[name] = _given(codec_state)
        for residual in residuals:
            bundle = bundle.with_flat(bundle.flat)
            view = bundle.views[name]
            view.copy_(narrowed(view + residual, view))
    return bundle, Exchanged(state.step, codecs)


def _given(state: CodecState) -> tuple[list[Tensor], CodecState]:
    """The residuals of a codec's state, and the state without them."""
    if isinstance(state, PartlyGiven):  # not all that ranks add up is to be given: `dgc`
        return state.given()
    if isinstance(state, Residual):
        return ([] if state.residual is None else [state.residual]), Residual()
    if isinstance(state, tuple):
        parts = [_given(each) for each in state]
        after = tuple_like(state, [each for _, each in parts])
        return [residual for residuals, _ in parts for residual in residuals], after
    return [], state
