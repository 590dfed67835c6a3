"""`NoiseWatch`: measures the gradient noise scale on one rank, from its gradients before they are reduced.

step k, all ranks at the same parameters    |gᵢ|² and a sketch of gᵢ ──▶ all ranks ──▶ |G|², tr Σ ──▶ averages

A look comes before the strategy's transform, so any transform will do. If models differ between meetings, looks come in
the step after a meeting, and ranks prove by a hash that they hold the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, Strategy
from polytempo.core.bundle import by_kind, pack
from polytempo.large_batch.noise_scale import NoiseScale, of_workers, sketch
from polytempo.training.checkpoint.fingerprint import fingerprint

KEEPS = 0.95
"""Part of the averages that each new look keeps: they cover some twenty looks. With few workers fewer looks would be
noise, and more would hide how gradients shrink."""
_HASHES = 2**53
"""Hashes below this are exact in float64."""


class NoisePost(Protocol):
    """Brings the rows of all ranks together, outside of the run's own messages."""

    def post(self, watch: NoiseWatch, row: Tensor) -> None:
        """Send one rank's row. Each watch takes all ranks' rows, in their order, now or with the next `post`."""

    def finish(self, watch: NoiseWatch) -> None:
        """No more rows come: let the watch take the rows under way."""


class NoiseWatch:
    """One rank's part. All ranks make one, and take their steps together.

    `every`: steps between two looks. `samples`: the next gradient is the mean over so many. A look costs one pass over
    the gradients with three operations an element, and 8 KiB to the other ranks, which no rank waits for before the
    next look; if models differ between meetings also a pass over the parameters.
    """

    def __init__(
        self,
        post: NoisePost,
        strategy: Strategy,
        trainable: Mapping[str, nn.Parameter],
        *,
        every: int,
        samples: int = 0,
    ) -> None:
        self.noise = NoiseScale(KEEPS)
        self.samples = samples
        self._post, self._strategy, self._trainable, self._every = post, strategy, trainable, every
        self._step = self._due_at = 0
        self._begun = False
        """False before the first step, which may have any number."""
        self._equal = True
        """True if all ranks hold the same parameters now."""
        self._looks = 0
        self._seen: dict[int, tuple[float, Tensor]] = {}
        self._hash = 0

    def rows_to(self, post: NoisePost) -> None:
        """Give all further rows to another post."""
        self._post = post

    @property
    def due(self) -> bool:
        """True if the coming step is looked at."""
        return self._equal and (not self._begun or self._step >= self._due_at)

    def look(self, step: int, index: int, bundle: Bundle) -> None:
        """Look at one bucket's gradients without a change."""
        self._begin(step)
        if self.due:
            flat = bundle.flat if bundle.packed else pack([each.reshape(-1) for each in bundle.tensors.values()])
            self._look(index, flat)

    def look_at_gradients(self, step: int) -> None:
        """Look at all gradients in a run that exchanges none."""
        self._begin(step)
        if not self.due:
            return
        gradients = {n: p.grad.detach().to_dense() for n, p in self._trainable.items() if p.grad is not None}
        for index, group in enumerate(by_kind(gradients).values()):
            self._look(index, pack([each.reshape(-1) for each in group.values()]))

    def _begin(self, step: int) -> None:
        if not self._begun:
            self._step = self._due_at = step

    def _look(self, index: int, flat: Tensor) -> None:
        if not self._seen and not self._strategy.synchronized:
            self._hash = fingerprint(p for p in self._trainable.values() if p.layout == torch.strided) % _HASHES
        norm = float(torch.linalg.vector_norm(flat)) ** 2
        self._seen[index] = norm, sketch(flat, seed=(self._step << 12) + index)

    def after_step(self, step: int, *, met: bool) -> None:
        """Finish a step. `met`: ranks have met after it."""
        self._begun = True
        if self._seen:
            seen, self._seen = list(self._seen.values()), {}
            norm, total = sum(each for each, _ in seen), torch.stack([each for _, each in seen]).sum(0)
            head = torch.tensor([self.samples, norm, self._hash], dtype=torch.float64)
            self._looks += 1
            checked = self._strategy.synchronized or self._looks > 1  # or soon: do ranks that have met hold the same?
            self._due_at = self._step + (self._every if checked else 1)
            self._post.post(self, torch.cat([head, total]))
        self._step, self._equal = step, self._strategy.synchronized or met

    def take(self, rows: Sequence[Tensor]) -> None:
        """Take all ranks' rows of one step. ValueError for ranks that hold different parameters though they had met."""
        if not self._strategy.synchronized:
            self._check_alike([int(row[2]) for row in rows])
        table = torch.stack(list(rows))
        table = table[table[:, 0] > 0]
        if len(table) < 2 or not bool(table.isfinite().all()):
            return
        self.noise.add(of_workers([int(n) for n in table[:, 0]], table[:, 1].tolist(), table[:, 3:]))

    def _check_alike(self, hashes: Sequence[int]) -> None:
        if len(set(hashes)) > 1:
            raise ValueError(
                "the noise scale is measured where all workers hold the same parameters, and those of "
                f"{self._strategy} differ after every step; leave out noise_scale, or norm_test, or use a strategy "
                "whose workers meet in a mean"
            )

    def state(self) -> dict[str, Any]:
        """The state for `restore`, between two steps: plain numbers, equal on all ranks once they have all rows."""
        return {"noise": asdict(self.noise), "due_at": self._due_at, "looks": self._looks, "equal": self._equal}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Go on after `step` steps of the run that saved `state`."""
        self.noise = NoiseScale(**state["noise"])
        self._due_at, self._looks, self._equal = state["due_at"], state["looks"], state["equal"]
        self._step, self._begun = step, True

    def finish(self) -> None:
        """No more steps come."""
        self._post.finish(self)

    @property
    def row(self) -> dict[str, Any]:
        """The values for rows of metrics; empty before the first look."""
        return noise_row(self.noise)


def noise_row(noise: NoiseScale) -> dict[str, Any]:
    """The averages for rows of metrics: |G|², tr Σ, and their quotient in samples if both are known."""
    if not noise.steps:
        return {}
    of_gradient, of_noise = noise.mean
    simple = noise.simple
    scale = simple if 0 < simple < math.inf else None
    return {"noise_scale": scale, "gradient_square": of_gradient, "noise_trace": of_noise}
