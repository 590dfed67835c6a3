"""QSGD: every number of the gradient is rounded up or down to a few levels, by chance, so that the mean is right."""

from __future__ import annotations

from polytempo import compression
from polytempo.compression import through
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Strategy, call_name


def qsgd(
    levels: int = 7, bucket: int = 128, seed: int = 0, route: WireRoute | None = None, exact_below: int = 1024
) -> Strategy:
    """Numbers become l/s of their bucket's norm, s = `levels`: l is drawn so that the expectation is the gradient.

    x̂ = ‖x‖₂ · sign(x) · l/s, with l one of the two neighbours of s|x|/‖x‖₂. More levels and smaller buckets mean less
    noise and more bytes. No residual: errors have mean 0. Without a `route`, the owner of a stripe adds the ranks'
    codes and draws again for the sum; `all_gather` draws once, as in the paper. Tensors of fewer than `exact_below`
    elements travel as they are. With one worker nothing is encoded.

    Cost: 2(N-1)/N · (the bits of 2s + 1 levels for each number, and 4 bytes a bucket).

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka and M. Vojnović, "QSGD: communication-efficient SGD via gradient
    quantization and encoding", 2017. There codes are Elias-coded; here they have a fixed width.
    """
    codec = compression.qsgd(levels=levels, bucket=bucket, seed=seed)
    return Strategy(
        call_name(qsgd, locals()),
        gradients=through(codec, route=route, exact_below=exact_below),
    )
