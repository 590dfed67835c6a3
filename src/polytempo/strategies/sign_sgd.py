"""signSGD: workers vote on the direction of every parameter; or, with feedback, they send scaled signs."""

from __future__ import annotations

from polytempo.aggregation import moving_average
from polytempo.aggregation.robust import votes_of
from polytempo.compression import feedback as fed_back
from polytempo.compression import sign, through
from polytempo.core import Strategy, call_name, chain


def sign_sgd(feedback: bool = False, exact_below: int = 1024, momentum: float = 0.0, scale: float = 0.01) -> Strategy:
    """Send one bit for each number of the gradient: the majority's sign is the update, or the mean of scaled signs.

    Without `feedback`: g ← scale · sign(Σᵢ bᵢ), 0 on a tie, where bᵢ = sign(gᵢ), and for gᵢ = 0 it is 1 or -1 as
    (element + i + step) is odd or even, for one bit has no word for 0. That is the optimizer's gradient: under SGD
    every parameter moves by `scale` times the learning rate (and by its weight decay). By the default, a hundredth,
    SGD's learning rate does for votes, too; the paper's `scale=1` needs a hundredth of that rate. All workers weigh the
    same, and fewer than half of them cannot turn a vote. A parameter without a gradient on any worker (the row of an
    embedding that no rank used) stays where it is if their number N is even; if it is odd, it goes forth and back, and
    is never farther than one step from where it was. With `momentum` β (Signum) each worker votes by its own average mᵢ
    ← β mᵢ + (1 - β) gᵢ. One worker alone then steps by mᵢ. An optimizer's own momentum acts on the votes, as it does
    without. With `feedback` (EF-signSGD): v = g + r; v̂ = mean|v| · sign(v); r ← v - v̂; the mean of the v̂, with SGD's
    learning rate. Tensors of fewer than `exact_below` elements travel as they are, and are voted on all the same, where
    zero is not a vote. With one worker nothing is encoded: it is plain SGD, with steps of another size than several
    voters'.

    Cost: votes (N-1)/32 of float32's bytes; with feedback 2(N-1)/N · 1/32, and memory for one more gradient,
    in float32 where that has 16 bits; with momentum memory for mᵢ.

    Source: J. Bernstein, J. Zhao, K. Azizzadenesheli and A. Anandkumar, "signSGD with majority vote is communication
    efficient and fault tolerant", 2019; S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error feedback fixes
    SignSGD and other gradient compression schemes", 2019. The former's server sends the majority's bit back; here
    every rank gathers all votes and counts.
    """
    if feedback and momentum:
        raise ValueError(
            f"momentum={momentum:g} is for votes, and with feedback scaled signs are sent; give the optimizer momentum"
        )
    if feedback:
        transform = through(fed_back(sign(scaled=True)), exact_below=exact_below)
    else:
        transform = through(sign(scaled=False), votes_of(scale), exact_below=exact_below)
    if momentum:
        transform = chain(moving_average(momentum), transform)
    return Strategy(call_name(sign_sgd, locals(), brief=("momentum", "scale")), gradients=transform)
