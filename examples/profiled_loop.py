"""Record four steps of a loop with torch.profiler: computing, exchanges and waits of each rank.

python examples/profiled_loop.py [FOLDER]
torchrun --standalone --nproc-per-node 2 examples/profiled_loop.py runs/profiled-loop
polytempo profile runs/profiled-loop
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import polytempo as pt
from polytempo.report.status.profile_trace import read_profiles, totals

pt.init()
torch.manual_seed(0)
digits = pt.data.digits()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with TemporaryDirectory() as scratch:
    folder = Path(sys.argv[1] if sys.argv[1:] else scratch)  # under torchrun one for all ranks
    handle = pt.attach(model, optimizer, out=folder, profile="20:24")
    for images, labels in pt.shard(digits.train, batch_size=32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    handle.detach()
    if handle.world.rank == 0:
        profile = read_profiles(folder)[0]
        steps = profile.last - profile.first
        for total in totals(profile.slices)[:5]:
            print(f"{total.name}: {total.calls} calls, {1e3 * total.seconds:.2f} ms in {steps} steps")
