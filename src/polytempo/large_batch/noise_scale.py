"""The gradient noise scale: how large a batch may be before more samples bring little.

It is estimated from gradients, or from sketches of them: 1,024 numbers that keep norms and inner products on average.

vector   [ row 0 | row 1 | row 2 | … ]      rows of 1,024 numbers
sketch   Σ ± row · σ                        a sign ± drawn for each row, σ signs for each place
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Squares(NamedTuple):
    """Unbiased estimates from the norms of two mean gradients, over a small and over a large batch."""

    of_gradient: float
    """|G|², the squared norm of the true gradient; may be negative where noise outweighs it."""
    of_noise: float
    """tr Σ, the variance of one sample's gradient, summed over all parameters."""


def squares(small: float, small_batch: float, large: float, large_batch: float) -> Squares:
    """Estimate from |G_b|² and |G_B|², the squared norms of mean gradients over b and over B samples, b < B:

        |G|² = (B |G_B|² - b |G_b|²) / (B - b)        tr Σ = (|G_b|² - |G_B|²) / (1/b - 1/B)

    The large batch may contain the small ones, as one worker's gradient and the mean of all; then `small` may be the
    mean of |G_b|² over the workers. Errors: ValueError unless 0 < b < B.
    Source: S. McCandlish et al., "An empirical model of large-batch training", 2018, appendix A.1.
    """
    if not 0 < small_batch < large_batch:
        raise ValueError(f"one batch must be larger than the other, got {small_batch} and {large_batch} samples")
    of_gradient = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    return Squares(of_gradient, (small - large) / (1 / small_batch - 1 / large_batch))


def of_workers(samples: Sequence[int], norms: Sequence[float], gradients: Tensor) -> Squares:
    """Estimate from the gradients of N workers at the same parameters, before any of them is encoded or averaged:

        |G|² = mean over i ≠ j of ⟨gᵢ, gⱼ⟩        tr Σ = (mean |gᵢ|² - |G|²) / mean (1/bᵢ)

    With equal batches it is `squares` of one worker's batch and of all workers' together. `samples`: bᵢ. `norms`:
    |gᵢ|². `gradients`: shape (N, numbers), the gᵢ or their sketches. Errors: ValueError for fewer than two workers,
    or an empty batch.
    """
    count = len(samples)
    if count < 2 or min(samples) < 1:
        raise ValueError(f"it takes two workers with samples, got batches of {list(samples)}")
    own = float(gradients.square().sum())
    of_gradient = (float(gradients.sum(0).square().sum()) - own) / (count * (count - 1))
    of_sample = sum(1 / each for each in samples) / count
    return Squares(of_gradient, (sum(norms) / count - of_gradient) / of_sample)


@dataclass
class NoiseScale:
    """Both estimates averaged over steps, separately, and then divided: a mean of quotients would be biased.

    `keeps`: the weight of the former steps when a step is added; the first steps weigh as much as they should. Errors:
    ValueError unless it is at least 0 and below 1.
    """

    keeps: float = 0.99
    steps: int = 0
    sum_of_gradient: float = 0.0
    """All steps' values, by their present weights; `mean` divides by the weights."""
    sum_of_noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse weights that forget nothing."""
        if not 0 <= self.keeps < 1:
            raise ValueError(f"keeps is a weight of at least 0 and below 1, got {self.keeps!r}")

    def add(self, found: Squares) -> None:
        """The estimates of one more step."""
        self.sum_of_gradient = self.keeps * self.sum_of_gradient + (1 - self.keeps) * found.of_gradient
        self.sum_of_noise = self.keeps * self.sum_of_noise + (1 - self.keeps) * found.of_noise
        self.steps += 1

    @property
    def mean(self) -> Squares:
        """The averages so far. Errors: ValueError before the first step."""
        if not self.steps:
            raise ValueError("no step has been added, so there is no noise scale yet")
        known = 1 - self.keeps**self.steps
        return Squares(self.sum_of_gradient / known, self.sum_of_noise / known)

    @property
    def simple(self) -> float:
        """B_simple = tr Σ / |G|², in samples; infinite where the gradient is not seen for noise."""
        of_gradient, of_noise = self.mean
        return of_noise / of_gradient if of_gradient > 0 else math.inf


def dynamic_batch(batch: int, noise_scale: float, theta: float = 0.5) -> int:
    """The batch for the coming steps by the test of dynamic sampling; it never shrinks:

        tr Σ / B ≤ θ² |G|²        where it fails: B = tr Σ / (θ² |G|²) = 𝓑 / θ²

    Deviation: the paper takes both from one batch's sample variance and gradient; 𝓑 is the measured noise scale,
    with an unbiased |G|². Where that is infinite the batch stays. Errors: ValueError unless θ is positive.
    Source: R. H. Byrd, G. M. Chin, J. Nocedal and Y. Wu, "Sample size selection in optimization methods for machine
    learning", 2012, section 3.
    """
    if not theta > 0:
        raise ValueError(f"theta is a positive number, got {theta}")
    wanted = noise_scale / theta**2
    return max(batch, math.ceil(wanted)) if math.isfinite(wanted) else batch


def speed_up(batch: float, noise_scale: float) -> float:
    """The quotient of the steps for a batch of one sample and for `batch`, at best: (1 + 𝓑) / (1 + 𝓑/B).

        (S/S_min - 1) (E/E_min - 1) = 1        S steps, E = B·S samples

    With B = 𝓑 it takes twice the fewest steps and twice the fewest samples, and B times fewer where noise hides the
    gradient. Errors: ValueError for a batch or a noise scale that is not positive. Source: McCandlish et al.,
    section 2.3.
    """
    if not (0 < batch < math.inf and noise_scale > 0):
        raise ValueError(f"a batch and a noise scale are positive, got {batch!r} and {noise_scale!r}")
    return (1 + noise_scale) / (1 + noise_scale / batch) if math.isfinite(noise_scale) else float(batch)


WIDTH = 1024
_ROWS = 128
"""Rows that are multiplied by their signs together: they fit the second-level cache."""


@torch.no_grad()
def sketch(vector: Tensor, seed: int) -> Tensor:
    """Sₛ(x): shape (1024,), float64, linear in x; over the draws of s  E ⟨S x, S y⟩ = ⟨x, y⟩.

    The standard deviation of |S x|² is √(2/1024) = 4.4 % of |x|², and independent from seed to seed: averaged over
    steps with seeds of their own it is little. Ranks that give one seed get sketches of one map.

    `vector`: dense, of any shape and dtype. Cost: a pass over it, with two operations an element; memory for 128 rows.
    Source: M. Charikar, K. Chen and M. Farach-Colton, "Finding frequent items in data streams", 2002, with places in
    the order of the vector instead of hashed ones.
    """
    flat = torch.view_as_real(vector).reshape(-1) if vector.is_complex() else vector.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    total = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    drawn = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (-(-flat.numel() // WIDTH),), generator=drawn).mul_(2).sub_(1).to(flat)
    whole = flat.numel() // WIDTH
    places = _places(flat.dtype, flat.device)
    for block, begin in enumerate(range(0, whole, _ROWS)):
        end = min(begin + _ROWS, whole)
        shift = 37 * block % _ROWS  # else rows of all blocks would meet the same signs
        rows = flat[begin * WIDTH : end * WIDTH].view(-1, WIDTH) * places[shift : shift + end - begin]
        total += signs[begin:end] @ rows
    rest = flat[whole * WIDTH :]
    if rest.numel():
        total[: rest.numel()] += rest * signs[-1]
    return total.cpu()


@cache
def _places(dtype: torch.dtype, device: torch.device) -> Tensor:
    """σ: signs, shape (256, 1024)."""
    drawn = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2 * _ROWS, WIDTH), generator=drawn, dtype=torch.int8)
    return signs.mul_(2).sub_(1).to(device, dtype)


class NoiseProbe(NamedTuple):
    """An attached loop's measurement of its noise scale: `pt.attach(…, noise_scale=8, batch_size=32)`."""

    batch_size: int
    """Samples of this rank in a step, of all passes where gradients accumulate."""
    every: int = 32
    """Steps between two looks."""
