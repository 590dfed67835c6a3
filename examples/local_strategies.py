"""Local strategies beside each other: bytes, virtual seconds and loss of workers that meet once in a while.

Two workers at each of two sites, with 10 Mbit/s and 20 ms between the sites.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import polytempo as pt
from polytempo.jobs.digits import job

plain = replace(job, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr))
sites = replace(pt.cluster.internet(mbit_per_s=10, latency_ms=20), workers_per_host=2)

print("                         loss  kB a step  virtual s")
for strategy in (
    pt.strategies.diloco(period=12),
    pt.strategies.streaming_diloco(period=12, fragments=3, delay=3),
    pt.strategies.streaming_diloco(period=12, fragments=3, delay=3, blend="keep"),
    pt.strategies.sparse_loco(period=12),
    pt.strategies.sparta(0.05, outer=pt.strategies.diloco(period=12)),
    pt.strategies.co2(period=6, slow_lr=1.0, slow_momentum=0.0),
    pt.strategies.noloco(period=12),
    pt.strategies.quasi_global_momentum(),
    pt.strategies.islands(outer=pt.strategies.diloco(period=12)),
):
    result = pt.simulate(plain, strategy, workers=4, cluster=sites, batch_size=16, lr=0.1, steps=48)
    kilobytes = result.bytes_sent_per_rank / result.steps / 1e3
    name = strategy.name.partition("(")[0]
    print(f"{name:22} {result.loss:6.3f} {kilobytes:10.2f} {result.seconds:10.2f}")
