"""Many virtual workers with 100 Mbit/s each and stragglers: virtual seconds and bytes until a small GPT has a loss.

python benchmarks/virtual/slow_link.py --data tinyshakespeare [--workers 64] [--loss 2.6] [--steps 256] [NAME …]

The job is `chars` with a width of 64, one window of 64 characters a worker and step, and its AdamW; `one_bit_adam`,
`zero_one_adam`, `demo` and `distributed_lion` are that update themselves, without weight decay; with `dion`,
`distributed_muon` and `muloco` AdamW steps all but hidden matrices. Strategies with a server have 16 shards on hosts of
their own, each with a link as a worker's. Each step's computations take exp(0.3 Z) times their median. The workers'
mean model is scored on 64 windows of the test text, outside the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils.data import Subset

import polytempo as pt
from polytempo import strategies as s
from polytempo.compression import feedback, one_bit
from polytempo.core import Strategy
from polytempo.jobs import chars
from polytempo.spec.job import Data, Job

EVAL_EVERY, LR = 8, 2e-3
PERIOD = 16


def model() -> nn.Module:
    """137,216 parameters: two layers of width 64 with four heads."""
    return chars.Transformer(chars.VOCABULARY, chars.CONTEXT, 64, chars.NUM_HEADS, chars.NUM_LAYERS)


def read(given: Path | None) -> Data:
    """The text, and 64 windows of its last tenth."""
    train, test = chars.read(given)[:2]
    return Data(train, Subset(test, range(0, len(test), len(test) // 64)[:64]))


class HiddenMatrices(Optimizer):
    """`hidden` for matrices but the two embeddings, which come first, and the last; AdamW at a tenth of its rate."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, hidden: Callable[..., Optimizer]) -> None:
        given = list(parameters)
        matrices = [p for p in given if p.ndim == 2][2:-1]
        rest = [p for p in given if all(p is not each for each in matrices)]
        self.parts = hidden(matrices, lr=10 * lr), AdamW(rest, lr=lr)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of both."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


ADAM = replace(chars.job, name="small chars", model=model, data=read, lr=LR)
PLAIN = replace(ADAM, optimizer=SGD)
MATRICES = replace(ADAM, optimizer=partial(HiddenMatrices, hidden=SGD))
MUON = replace(ADAM, optimizer=partial(HiddenMatrices, hidden=partial(Muon, momentum=0.9, weight_decay=0.0)))
BUT = "characters, places, scores"


def rows(steps: int, workers: int) -> dict[str, tuple[Job, Strategy]]:
    """Name in the table -> job and strategy."""
    signs, moving = feedback(one_bit()), {"shards": 16}
    return {
        "sync_sgd (DDP)": (ADAM, s.sync_sgd()),
        "power_sgd": (ADAM, s.power_sgd(rank=4)),
        "one_bit_adam": (PLAIN, s.one_bit_adam(warmup_steps=steps // 6, beta1=0.9, scale=1.0)),
        "zero_one_adam": (PLAIN, s.zero_one_adam(steps // 6, repeats=8, beta1=0.9, scale=1.0)),
        "demo": (PLAIN, s.demo(scale=1.0)),
        "distributed_lion": (PLAIN, s.distributed_lion(scale=0.25)),
        "dion": (MATRICES, s.dion(scale=1.0, but=BUT)),
        "distributed_muon": (MATRICES, s.distributed_muon(scale=1.0, but=BUT)),
        "acco": (ADAM, s.acco()),
        "quasi_global_momentum": (ADAM, s.quasi_global_momentum()),
        "local_sgd": (ADAM, s.local_sgd(PERIOD)),
        "local_sgd, one_bit": (ADAM, s.local_sgd(PERIOD, codec=signs)),
        "des_loc": (ADAM, s.des_loc(PERIOD, 2 * PERIOD, 4 * PERIOD)),
        "slowmo": (ADAM, s.slowmo(PERIOD)),
        "co2": (ADAM, s.co2(PERIOD)),
        "diloco": (ADAM, s.diloco(PERIOD)),
        "streaming_diloco": (ADAM, s.streaming_diloco(PERIOD)),
        "sparse_loco": (ADAM, s.sparse_loco(PERIOD)),
        "noloco": (ADAM, s.noloco(PERIOD)),
        "muloco": (MUON, s.diloco(PERIOD, outer_lr=0.8)),
        "async_diloco": (ADAM, s.async_diloco(PERIOD, **moving)),
        "decoupled_diloco": (ADAM, s.decoupled_diloco(PERIOD, quorum=workers // 2, **moving)),
        "halos": (ADAM, s.halos(PERIOD, region=8, every=16, **moving)),
    }


def main() -> None:
    """A line of the table for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="lines; default: all")
    parser.add_argument("--data", type=Path, required=True, help="a text, or a folder with input.txt")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--loss", type=float, default=2.6)
    parser.add_argument("--steps", type=int, default=256)
    asked = parser.parse_args()
    cluster = pt.cluster.ethernet(gbit_per_s=0.1, stragglers=pt.cluster.lognormal(sigma=0.3))
    print("| strategy | steps | virtual s | MB a worker | loss | CPU s |\n|---|---|---|---|---|---|", flush=True)
    for name, (job, strategy) in rows(asked.steps, asked.workers).items():
        if asked.names and name not in asked.names:
            continue
        began = time.process_time()
        with sdpa_kernel(SDPBackend.MATH):  # which torch.func.vmap can batch
            found = pt.simulate(
                job,
                strategy,
                workers=asked.workers,
                cluster=cluster,
                batched=strategy.server is None,
                data=asked.data,
                batch_size=1,
                steps=asked.steps,
                eval_every=EVAL_EVERY,
                until={"loss": asked.loss},
            )
        until = "" if found.reached else "not in "
        megabytes, spent = found.bytes_sent_per_rank / 1e6, time.process_time() - began
        numbers = f"{until}{found.steps} | {found.seconds:.2f} | {megabytes:.2f} | {found.loss:.3f} | {spent:.0f}"
        print(f"| `{name}` | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
