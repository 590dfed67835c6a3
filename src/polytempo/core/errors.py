"""Errors between ranks, in either world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polytempo.core.system.first_failure import FirstFailure


class PolytempoError(RuntimeError):
    """Base of the errors that come from running, not from wrong arguments (those are `ValueError`)."""

    death: FirstFailure | None = None
    """The first failure of a run that this error ended; its line is a note of the error."""


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
    """An operation did not finish before its deadline. Raised at its `await`. `reason`: the missing ranks, if known.

    The message says "timed out", as torch's own backends do: scripts look for it.
    """

    def __init__(self, rank: int, step: int | None, operation: str, timeout_s: float, reason: str = "") -> None:
        self.rank, self.step, self.operation, self.timeout_s, self.reason = rank, step, operation, timeout_s, reason
        detail = f" ({reason})" if reason else ""
        super().__init__(f"{_where(rank, step)}: timed out: {operation} did not finish within {timeout_s:g} s{detail}")


class Deadlock(PolytempoError):
    """Every rank of a virtual world waits for something that no rank will do."""


class JobFailed(PolytempoError):
    """A function of the job raised. The message has its lines of the traceback; the exception itself is the cause."""


class Mismatch(PolytempoError):
    """Ranks disagree about their run (strategy, shapes, seed, version, operation)."""


class Drifted(PolytempoError):
    """Ranks that promise equal models differ. `ranks`: the minority; empty where there is no majority."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = list(ranks)
        super().__init__(message)


class NotFinite(PolytempoError):
    """NaN or an infinity in a loss, a gradient, a parameter, or a tensor to encode or to save.

    `where` holds it, `index` is its element (None: a single number) and `value` its value. `rank` brought it in step
    `step` (counted from 0), and `parameter` names the parameter, each as far as it is known. `codec` could only hide
    the value ("": no codec). In a collective only the ranks that found the value raise it; the others lose a peer
    (`PeerLost`), so a rank that skips the step alone leaves them waiting. `bf16()` and `fp16()` between workers and
    without feedback pass such values on, so that they appear in the sum (loss scaling).
    """

    def __init__(
        self,
        codec: str,
        index: int | None,
        value: float,
        where: str = "",
        *,
        step: int | None = None,
        rank: int | None = None,
        parameter: str | None = None,
        advice: str = "",
    ) -> None:
        self.codec, self.index, self.value, self.where = codec, index, value, where
        self.step, self.rank, self.parameter, self.advice = step, rank, parameter, advice
        place = where if index is None else f"element {index} of {where}" if where else f"element {index}"
        before = ", ".join(
            f"{name} {number}" for name, number in (("rank", rank), ("step", step)) if number is not None
        )
        if codec:
            advice = advice or (
                f"which {codec} cannot encode; look for the cause (a learning rate too high?), and "
                "skip the step only where all ranks skip it (a GradScaler does, with pt.attach(…, scaler=scaler))"
            )
        super().__init__(f"{before}{before and ': '}{place} is {value}{advice and ', '}{advice}")

    def at(self, step: int) -> NotFinite:
        """The same error, with the step if that was not known."""
        return self if self.step is not None else NotFinite.from_facts(self.facts | {"step": step})

    @property
    def facts(self) -> dict[str, Any]:
        """The arguments as plain values, for `from_facts` in another process."""
        names = ("codec", "index", "where", "step", "rank", "parameter", "advice")
        return {name: getattr(self, name) for name in names} | {"value": str(self.value)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> NotFinite:
        """The same error again."""
        return cls(**{**facts, "value": float(facts["value"])})


def _where(rank: int, step: int | None) -> str:
    return f"rank {rank}" if step is None else f"rank {rank}, step {step}"
