"""Compressed gradients: the cost in loss of each way of sending fewer bytes, at the same number of samples.

Four workers with 10 Mbit/s and 20 ms between them. Most of these keep the unsent part, and send it later; with
one worker, or with tensors of fewer than 1,024 elements, nothing is encoded. `dgc` has
momentum, so its rate is a tenth of the others'.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import polytempo as pt
from polytempo.jobs.digits import job

plain = replace(job, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr))
sites = pt.cluster.internet(mbit_per_s=10, latency_ms=20)

print("                  loss  kB a step  virtual s")
for strategy, lr in [
    (pt.strategies.sync_sgd(), 0.2),
    (pt.strategies.bf16_sgd(), 0.2),
    (pt.strategies.int8_sgd(), 0.2),
    (pt.strategies.qsgd(), 0.2),
    (pt.strategies.terngrad(), 0.2),
    (pt.strategies.one_bit_sgd(), 0.2),
    (pt.strategies.sign_sgd(), 0.2),
    (pt.strategies.distributed_lion(scale=0.01), 0.2),
    (pt.strategies.one_bit_adam(warmup_steps=20, beta1=0.9, scale=0.01), 0.2),
    (pt.strategies.zero_one_adam(freeze_step=40, repeats=5, beta1=0.9, scale=0.01), 0.2),
    (pt.strategies.demo(), 0.2),
    (pt.strategies.threshold_sgd(density=0.01), 0.2),
    (pt.strategies.top_k_sgd(ratio=0.01), 0.2),
    (pt.strategies.ef21(), 0.2),
    (pt.strategies.dgc(momentum=0.9), 0.02),
    (pt.strategies.power_sgd(rank=1), 0.2),
    (pt.strategies.dion(rank=4), 0.2),
    (pt.strategies.distributed_muon(), 0.2),
]:
    result = pt.simulate(plain, strategy, workers=4, cluster=sites, batch_size=32, lr=lr, epochs=5)
    kilobytes = result.bytes_sent_per_rank / result.steps / 1e3
    name = strategy.name.partition("(")[0]
    print(f"{name:15} {result.loss:6.3f} {kilobytes:10.2f} {result.seconds:10.1f}")
