"""`PendingExchange`: a push or pull of a worker that not every shard has answered."""

from __future__ import annotations

from torch import Tensor


class PendingExchange:
    """A push or pull under way. `value` is its answer once it is `done`."""

    def __init__(self, what: str, waits_for: set[int]) -> None:
        self.what, self.waits_for = what, waits_for
        self.value: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether every shard has answered."""
        return not self.waits_for

    def __str__(self) -> str:
        return f"{self.what} (shards {sorted(self.waits_for)} have not answered)"
