"""Distributed Lion: workers vote on the sign of Lion's update, one bit a parameter, and keep their momenta."""

from __future__ import annotations

from polytempo.aggregation import moving_average, signs
from polytempo.aggregation.robust import votes_of
from polytempo.compression import sign, through
from polytempo.core import Strategy, call_name, chain


def distributed_lion(
    beta1: float = 0.9, beta2: float = 0.99, scale: float = 0.002, exact_below: int = 1024
) -> Strategy:
    """Vote on sign(β₁ mᵢ + (1 - β₁) gᵢ); mᵢ ← β₂ mᵢ + (1 - β₂) gᵢ stays with worker i.

    The optimizer's gradient is `scale` · sign(Σᵢ bᵢ), bᵢ = ±1, and 0 on a tie, so with plain SGD of learning rate η and
    weight decay λ the step is θ ← θ - η (scale · vote + λ θ): Lion's, with its decoupled decay. By the default scale
    SGD's usual learning rate does, with a momentum of 0.9, too, which acts on votes; `scale=1` needs Lion's, as 1e-4.
    Workers with equal gradients make the steps of one, which makes Lion's; with β₁ = β₂ = 0 it is `sign_sgd`. As
    there, one bit has no word for 0: such an element votes by turns, so an element without gradients does not drift.

    Cost: (N-1)/32 of float32's bytes; memory for mᵢ.

    Source: B. Liu, L. Wu, L. Chen et al., "Communication efficient distributed training with distributed Lion", 2024,
    with the majority's vote; X. Chen et al., "Symbolic discovery of optimization algorithms", 2023. Deviation: there a
    server sends the majority's bit back; here every rank gathers all votes.
    """
    vote = through(sign(scaled=False), votes_of(scale), exact_below=exact_below)
    return Strategy(
        call_name(distributed_lion, locals()), gradients=chain(moving_average(beta2, beta1), vote, signs(scale))
    )
