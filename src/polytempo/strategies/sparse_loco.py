"""SparseLoCo: H steps alone, then the largest 1 to 3 % of the movement in 2 bits; the decaying rest is the momentum."""

from __future__ import annotations

from typing import Literal

from polytempo.aggregation import from_anchor, senders_mean
from polytempo.compression import chunk_top_k, feedback, through
from polytempo.core import Codec, Strategy, call_name
from polytempo.synchronization import PeriodRule, every


def sparse_loco(
    period: int | PeriodRule = 16,
    outer_lr: float = 1.0,
    decay: float = 0.95,
    codec: Codec | None = None,
    mean_of: Literal["workers", "senders"] = "workers",
    exact_below: int = 1024,
) -> Strategy:
    """Every H = `period` steps each worker sends the largest elements of its movement and of the rest from before.

    Δᵢ = φ - θᵢ; eᵢ ← β eᵢ + Δᵢ; cᵢ = decode(encode(eᵢ)); eᵢ ← eᵢ - cᵢ; φ ← φ - α mean(cᵢ); θᵢ ← φ, with β = `decay` and
    α = `outer_lr`. `codec` is quantised before it is subtracted: by default the largest 1/64 of each chunk of 4,096
    elements in 2 bits. There is no outer momentum; the rest that decays is in its place. α acts once, on the mean.

    mean_of="senders" divides each element by the workers that sent it, as the released code does; an element of one
    sender then moves N times as far as by the mean of all N. With a codec that leaves nothing out and α = 1 both are
    local SGD. Tensors of fewer than `exact_below` elements travel as they are.

    In an elastic run it behaves as `local_sgd`.

    Cost: an all-gather of the wires once in H steps, by default (N-1)/146 of float32's bytes; memory for φ and e.
    Change the inner learning rate slowly: e was computed with the one before.

    Source: A. Sarfi, B. Thérien, J. Lidin and E. Belilovsky, "Communication efficient LLM pre-training with
    SparseLoCo", 2025. Deviations: see `chunk_top_k`; there α = 1 and H = 30 in the large run.
    """
    if mean_of not in ("workers", "senders"):
        raise ValueError(f"mean_of is 'workers' or 'senders', got {mean_of!r}")
    merge = senders_mean if mean_of == "senders" else None
    meet = through(feedback(chunk_top_k() if codec is None else codec, decay), merge, exact_below=exact_below)
    return Strategy(
        call_name(sparse_loco, locals()),
        parameters=every(period, from_anchor(meet, outer_lr)),
        synchronized=period == 1,
    )
