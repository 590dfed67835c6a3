"""Top-k SGD: only the largest numbers of each gradient travel; the rest waits until it is large enough."""

from __future__ import annotations

from polytempo.compression import feedback as fed_back
from polytempo.compression import through, top_k
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Strategy, call_name


def top_k_sgd(
    ratio: float = 0.01, feedback: bool = True, route: WireRoute | None = None, exact_below: int = 1024
) -> Strategy:
    """Send the `ratio` of a gradient's entries that are largest; with `feedback` the others are added to the next.

    v = g + r; the k = ratio · n entries of v with the largest |v| travel as (index, value); r ← v without them.
    Without `feedback` the others are lost, and training is visibly worse: it is there to be compared with. Tensors of
    fewer than `exact_below` elements travel as they are. With one worker nothing is left out.

    Cost: (N-1) · k entries from each worker, of 8 bytes where the gradient is float32. A ring without compression sends
    2(N-1)/N · 4n, which is 1/(N · ratio) times as much: the gain shrinks with N, and past N = 1/ratio it is gone.
    Memory for one more gradient, in float32 where that has 16 bits.

    Source: A. F. Aji and K. Heafield, "Sparse communication for distributed gradient descent", 2017; S. U. Stich,
    J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with memory", 2018. The former takes one threshold for the whole
    model, here each tensor has its own k.
    """
    codec = fed_back(top_k(ratio)) if feedback else top_k(ratio)
    return Strategy(
        call_name(top_k_sgd, locals()),
        gradients=through(codec, route=route, exact_below=exact_below),
    )
