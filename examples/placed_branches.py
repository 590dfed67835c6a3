"""Two towers of one model on two workers, which compute one batch together, with the result of one process.

python examples/placed_branches.py
torchrun --standalone --nproc-per-node 2 examples/placed_branches.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import polytempo as pt


class TwoTowers(nn.Module):
    """One tower sees the image's rows, the other one its columns."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.columns = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes (samples, 64) and (samples, 10)."""
        turned = x.unflatten(1, (8, 8)).transpose(1, 2).flatten(1)
        scores: Tensor = self.scores(torch.cat([self.rows(x), self.columns(turned)], dim=1))
        return scores


world = pt.init()
pt.init(mesh={"data": 1, "model": world.size})
digits = pt.data.digits()
images, labels = digits.test.tensors
torch.manual_seed(0)
model = pt.training.place(TwoTowers(), sample=images)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pt.attach(model, optimizer, pt.strategies.sync_sgd())
for images_of_batch, labels_of_batch in pt.shard(digits.train, batch_size=64):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images_of_batch), labels_of_batch).backward()
    optimizer.step()
with torch.no_grad():
    right = (model.eval()(images).argmax(dim=1) == labels).float().mean()
own = sorted({name.split(".")[0] for name, _ in model.named_parameters()})
if world.rank == 0:
    print(f"{right:.1%} of the test digits, {world.size} part(s), layers on rank 0: {', '.join(own)}")
