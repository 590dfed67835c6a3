"""Random flips of single bits in the weights and the optimizer state of one rank of three, while they train.

Each flip ends in one of four ways: it is *found* and its rank is named; it *heals*, because the next updates round it
away (all ranks hold equal bits again); it makes a number that is *not finite*; or the step *failed* with an error, as
Adam's does after a negative number of steps. A flip that is still there after everything was compared once more ends
the search with exit code 1.

    python benchmarks/drift/flips.py [--flips 1000] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo import strategies
from polytempo.cluster import one_host
from polytempo.core import Port
from polytempo.training.checkpoint.fingerprint import fingerprint
from polytempo.training.hooks.drift import Compared, DriftVerdict, Walk, comparable, compared, judged, looked
from polytempo.training.step.replica import Replica
from polytempo.worlds import VirtualWorld

RANKS = 3


class Rank:
    """A model of 1.9 MB with its Adam, and the compared tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(200, 700), nn.Tanh(), nn.Linear(700, 10))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.replica = Replica(self.net, self.optimizer, strategies.sync_sgd(), RANKS)
        self.walk = Walk()

    def tensors(self, what: Compared) -> list[Tensor]:
        """The tensors that must be equal on all ranks."""
        return list(comparable(self.replica, what).values())

    async def step(self, port: Port, number: int) -> None:
        """One step on a batch of its own."""
        drawn = torch.Generator().manual_seed(RANKS * number + port.rank)
        inputs, targets = torch.randn(4, 200, generator=drawn), torch.randint(10, (4,), generator=drawn)
        self.optimizer.zero_grad()
        functional.cross_entropy(self.net(inputs), targets).backward()
        for bucket in self.replica.buckets:
            await self.replica.exchange(port, bucket)
        self.optimizer.step()
        await self.replica.finish_step(port)


class Search:
    """The ranks of one search, and the flip that is under way."""

    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.ranks = [Rank() for _ in range(RANKS)]
        what = compared(self.ranks[0].replica)
        assert what is not None
        self.what = what
        self.number = 0

    def step(self) -> None:
        """One step of all ranks."""
        number, self.number = self.number, self.number + 1
        VirtualWorld(one_host(), RANKS).run(lambda port: self.ranks[port.rank].step(port, number))

    def look(self) -> DriftVerdict:
        """All ranks' hashes of the next slice."""
        looks = []
        for rank in self.ranks:
            pieces = rank.walk.next(rank.tensors(self.what))
            looks.append(looked(rank.replica, self.what, pieces, buffers=True))
        return judged(looks)

    def flip(self, culprit: int) -> str:
        """Flip a bit of that rank's."""
        names = list(comparable(self.ranks[culprit].replica, self.what).items())
        name, tensor = self.drawn.choices(names, [tensor.nbytes for _, tensor in names])[0]
        if self.drawn.random() < 0.2:  # small tensors, too
            name, tensor = self.drawn.choice(names)
        bit = self.drawn.randrange(8 * tensor.nbytes)
        tensor.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
        return f"bit {bit} of {name} on rank {culprit}"

    def outcome(self, culprit: int) -> str:
        """Train and look until the flip is found or gone; returns its outcome."""
        for _ in range(self.ranks[0].walk.num_slices + 1):
            try:
                if self.drawn.random() < 0.8:
                    self.step()
            except (ArithmeticError, RuntimeError):
                return "failed"
            others = self.look().others
            if others:
                return "found" if others == [culprit] else "another rank was named"
        tensors = [rank.tensors(self.what) for rank in self.ranks]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors[culprit]):
            return "not finite"
        return "healed" if len({fingerprint(own) for own in tensors}) == 1 else "missed"

    def mend(self, culprit: int, *, anew: bool) -> None:
        """Give the rank another one's state, or all the first state."""
        healthy = self.ranks[(culprit + 1) % RANKS].tensors(self.what)
        if anew or not all(bool(tensor.isfinite().all()) for tensor in healthy):
            self.ranks = [Rank() for _ in range(RANKS)]
            self.step()
            return
        for mine, theirs in zip(self.ranks[culprit].tensors(self.what), healthy, strict=True):
            mine.detach().copy_(theirs)


def main() -> int:
    """Search, and print the outcomes of the flips."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    search, found = Search(arguments.seed), Counter[str]()
    search.step()
    for number in range(arguments.flips):
        if search.look().others:
            print(f"seed {arguments.seed}, flip {number}: a false alarm before it", file=sys.stderr)
            return 1
        culprit = search.drawn.randrange(RANKS)
        what = search.flip(culprit)
        outcome = search.outcome(culprit)
        found[outcome] += 1
        if outcome not in ("found", "healed", "not finite", "failed"):
            print(f"seed {arguments.seed}, flip {number}: {what}: {outcome}", file=sys.stderr)
            return 1
        search.mend(culprit, anew=outcome == "failed")
    print(f"{arguments.flips} flips: " + ", ".join(f"{count} {name}" for name, count in sorted(found.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
