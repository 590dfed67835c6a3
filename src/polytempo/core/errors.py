"""What can go wrong between ranks, in either world."""

from __future__ import annotations


class PolytempoError(RuntimeError):
    """Base of the errors that come from running, not from wrong arguments (those are `ValueError`)."""


class PeerLost(PolytempoError):
    """A rank that this one needs is gone. Raised at the `await` of the operation that needed it.

    `peer` is the lost rank, or None where the transport cannot tell which member of a group it was. `step` is None
    where the operation belongs to no step of training.
    """

    def __init__(self, rank: int, step: int | None, operation: str, peer: int | None, reason: str = "") -> None:
        self.rank, self.step, self.operation, self.peer, self.reason = rank, step, operation, peer, reason
        who = f"rank {peer}" if peer is not None else "a peer"
        detail = f" ({reason})" if reason else ""
        super().__init__(f"{_where(rank, step)}: {operation} cannot finish, {who} is lost{detail}")


class TimedOut(PolytempoError):
    """An operation did not finish before its deadline. Raised at its `await`. `reason`: who is missing, if known.

    The message says "timed out", as those of torch's own backends do: scripts look for it.
    """

    def __init__(self, rank: int, step: int | None, operation: str, timeout_s: float, reason: str = "") -> None:
        self.rank, self.step, self.operation, self.timeout_s, self.reason = rank, step, operation, timeout_s, reason
        detail = f" ({reason})" if reason else ""
        super().__init__(f"{_where(rank, step)}: timed out: {operation} did not finish within {timeout_s:g} s{detail}")


class Deadlock(PolytempoError):
    """Every rank of a virtual world waits for something that nobody will do."""


class Mismatch(PolytempoError):
    """Ranks disagree about what they run (strategy, shapes, seed, version, operation)."""


class NotFinite(ValueError):
    """A tensor to be encoded holds NaN or an infinity, which the codec could only hide.

    Other ranks may not know of it: who skips the step alone leaves them waiting. `bf16()` and `fp16()` between workers
    and without feedback hand such values on, for those who want to see them in the sum (loss scaling).
    """

    def __init__(self, codec: str, index: int, value: float, where: str = "") -> None:
        self.codec, self.index, self.value = codec, index, value
        place = f"element {index} of {where}" if where else f"element {index}"
        super().__init__(
            f"{place} is {value}, which {codec} cannot encode; look for the cause (a learning rate too high?), and "
            "skip the step only where all ranks skip it (a GradScaler does, with pt.attach(…, scaler=scaler))"
        )


def _where(rank: int, step: int | None) -> str:
    return f"rank {rank}" if step is None else f"rank {rank}, step {step}"
