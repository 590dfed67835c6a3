"""MuLoCo: DiLoCo with Muon as the workers' own optimizer, compared to AdamW.

It needs no strategy of its own, because `diloco` leaves inner optimizers as they are. Muon takes hidden matrices, AdamW
takes vectors and the last layer. A job has one optimizer, so both are parts of one here.

Source: B. Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import polytempo as pt
from polytempo.compression import bins, chunk_top_k, exact, feedback
from polytempo.core import Codec
from polytempo.jobs.digits import job
from polytempo.strategies import diloco


class MuonAndAdamW(Optimizer):
    """Muon for all matrices but the last, at `lr`; AdamW for the rest, at a tenth of it."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        given = list(parameters)
        *hidden, _ = [p for p in given if p.ndim == 2]
        rest = [p for p in given if all(p is not each for each in hidden)]
        self.parts = (Muon(hidden, lr=lr, momentum=0.9, weight_decay=0.0), AdamW(rest, lr=lr / 10, weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


with_muon = replace(job, optimizer=MuonAndAdamW)
with_adamw = replace(job, optimizer=lambda parameters, lr: AdamW(parameters, lr=lr, weight_decay=0.0))

codecs: list[Codec] = [exact(), feedback(bins(2)), feedback(chunk_top_k(1 / 16))]
for name, inner, lr in (("Muon", with_muon, 0.03), ("AdamW", with_adamw, 0.003)):
    for codec in codecs:
        strategy = diloco(period=12, outer_lr=0.8, codec=codec)
        result = pt.simulate(inner, strategy, workers=4, batch_size=16, lr=lr, steps=36)
        sent = result.bytes_sent_per_rank / 1e3
        print(f"{name:5} with {codec!s:44} loss {result.loss:.3f}, {sent:4.0f} kB sent per worker")
