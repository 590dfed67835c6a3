"""Rounds of clients with secure sums: the server learns the sum of movements alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from polytempo.core import Strategy, call_name, identity
from polytempo.core.calls.refusals import refuse
from polytempo.core.strategy import InRounds, SecureSum
from polytempo.federated.rounds import rounds_of
from polytempo.federated.secure_sum import FixedPoint
from polytempo.federated.strategies.fed_avg import fed_avg


def secure(
    inner: Strategy | None = None, bits: Literal[32, 64] = 32, fraction: int = 24, threshold: int | None = None
) -> Strategy:
    """`inner` (None: `fed_avg()`), where a client sends its weighted movement as masked integers that only add up.

        pt.run(job, pt.federated.secure(pt.federated.fed_avg(cohort=10)), clients="iid(100)", workers=2, steps=100)

        xₖ ← round(2^fraction · shareₖ Δₖ) mod 2^bits        gradient ← 2^-fraction Σₖ xₖ

    With clients of their own machines (`serve`) the words have masks, as in `secure_sum`: the server has random numbers
    of each client, and the same sum. Where `pt.run` or `pt.simulate` plays the clients, masks are left out: they cancel
    to the bit. A client makes its own shareₖ of the clients' numbers of samples, and its masks cancel with masks of
    clients that were told the same numbers alone: the server sets no weight. `threshold` clients must stay in a sum
    (None: two thirds of the clients that have trained, and one).

    The gradient is wrong by cohort · 2^-(fraction + 1) at most. A client's weighted movement has numbers below
    2^(bits - 1 - fraction) / cohort (with `private`: over its places, which are more), or the run ends; take fewer
    bits of fraction, or 64 bits. Numbers of samples, losses and the sum are not hidden.

    `secure(private(…))` rounds towards 0, so that no movement gets longer, and noise is added to the sum.

    Errors: `Incompatible` (PT2520) for an inner strategy that needs single movements, or other sums: `fed_robust`, a
    codec up, `q_fed_avg`, `scaffold`.

    Cost: between workers a `tree` of bits / 8 bytes a parameter. Clients of their own machines send
    `pt.federated.secure_bytes(cohort, numel, bits)` bytes each.

    Source: K. Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning", 2017.
    """
    inner = fed_avg() if inner is None else inner
    rounds, point = rounds_of(inner, "secure"), FixedPoint(bits, fraction)
    if (reason := unsummable(rounds)) is not None:
        refuse({"secure sum", "single movements"}, strategy=inner, reason=reason)
    places = rounds.number if rounds.privacy is None else rounds.privacy.cohort
    if places < 2 or not (threshold is None or places < 2 * threshold <= 2 * places):
        raise ValueError(
            f"a secure sum is of two clients at least, and its threshold is more than half of them; got {places} "
            f"clients and threshold={threshold}"
        )
    name = call_name(secure, {"inner": inner, "bits": bits, "fraction": fraction, "threshold": threshold})
    meeting = replace(rounds, secure=SecureSum(point.bits, point.fraction, threshold))
    return replace(inner, name=name, gradients=identity(), meeting=meeting)


def unsummable(rounds: InRounds) -> str | None:
    """The need of rounds that a sum of movements does not meet; None: it meets all."""
    found = {
        "its sums are secure already": rounds.secure is not None,
        "its merge compares single movements": rounds.merge is not None,
        "codes of single movements do not add up under masks": rounds.codec is not None,
        "it weighs clients by losses and movements of their own": bool(rounds.local.fairness),
        "it has sums of control variates beside movements": rounds.local.controls,
    }
    return next((reason for reason, has in found.items() if has), None)
