"""Two towers of one model on two threads: the same bits as on one thread, sooner where two cores are free.

python examples/branch_threads.py
torchrun --standalone --nproc-per-node 2 examples/branch_threads.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import polytempo as pt


class TwoTowers(nn.Module):
    """One tower sees the image's rows, the other one its columns."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU())
        self.columns = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU()
        )
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        turned = x.unflatten(1, (8, 8)).transpose(1, 2).flatten(1)
        scores: Tensor = self.scores(torch.cat([self.rows(x), self.columns(turned)], dim=1))
        return scores


world = pt.init()
digits = pt.data.digits()
images, labels = digits.test.tensors
found = []
for inter in (1, 2):
    torch.manual_seed(world.rank)
    model = TwoTowers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = pt.attach(model, optimizer, pt.strategies.sync_sgd(), threads=1, inter_threads=inter)
    for images_of_batch, labels_of_batch in pt.shard(digits.train, batch_size=64 // world.size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images_of_batch), labels_of_batch).backward()
        optimizer.step()
    regions = handle.threaded.parts.regions if handle.threaded and handle.threaded.parts else ()
    handle.detach()
    found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    if world.rank == 0:
        tasks = [task.name for region in regions for task in region.tasks]
        with torch.no_grad():
            right = (model.eval()(images).argmax(dim=1) == labels).float().mean()
        print(f"inter={inter}: {right:.1%} of the test digits, {world.size} worker(s), tasks: {tasks or 'none'}")
if world.rank == 0:
    print(f"the same bits: {torch.equal(*found)}")
