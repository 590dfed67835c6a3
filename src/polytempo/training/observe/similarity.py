"""Linear CKA: how alike are two layers' activations for the same samples?"""

from __future__ import annotations

from torch import Tensor


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centered kernel alignment of two representations of the same n samples, from 0 to 1.

        CKA(X, Y) = ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖)        Frobenius norms; the mean of each column is taken off first

    `x`: (n, …), `y`: (n, …); further dims count as features, p of x and q of y. Rotations, translations and one scale
    for all features of a representation change nothing; other invertible maps do. NaN for a representation that is the
    same for all samples. With few samples it is too large: independent random features, p on each side, have about
    p / (n + p). Cost: n² (p + q) operations and 2 n² numbers, or n (p + q)² and (p + q)² where samples outnumber
    features.

    Errors: ValueError where they have different numbers of samples, or fewer than two.

    Source: S. Kornblith, M. Norouzi, H. Lee and G. Hinton, "Similarity of neural network representations revisited",
    2019, section 3: HSIC, without correction for bias, of linear kernels, normalized.
    """
    if len(x) != len(y) or len(x) < 2:
        raise ValueError(
            f"CKA compares activations for the same samples, two at least; got {len(x)} and {len(y)} samples"
        )
    a, b = centered(x), centered(y)
    if len(a) <= max(a.shape[1], b.shape[1]):
        return alignment(a @ a.T, b @ b.T)
    return float((b.T @ a).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


def alignment(one: Tensor, other: Tensor) -> float:
    """The cosine of two Gram matrices, (n, n): linear CKA where they are of `centered` representations."""
    return float((one * other).sum() / (one.norm() * other.norm()))


def centered(x: Tensor) -> Tensor:
    """`x`, (n, …), as float64 (n, p) without the mean of each column."""
    flat = x.detach().flatten(1).double()
    return flat - flat.mean(0)
