"""Process sets: operations of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index


class ProcessSet:
    """Ranks that perform operations among themselves, given as `ProcessSet([0, 1])`.

    Hand it to `init(process_sets=[…])` or to `add_process_set`; from then on it has a `process_set_id`.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            self.ranks: list[int] | None = sorted(index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise ValueError(
                f"a process set is given as a list of ranks, got {ranks_or_comm!r}; communicators of MPI are not "
                "supported, as no MPI takes part here"
            ) from None
        self.process_set_id: int | None = None
        self._own_rank = -1

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._known())

    def rank(self) -> int:
        """This process's place among them. ValueError where it is not one of them."""
        ranks = self._known()
        if self._own_rank not in ranks:
            raise ValueError(f"rank {self._own_rank} is not in the process set {ranks}")
        return ranks.index(self._own_rank)

    def included(self) -> bool:
        """Whether this process is one of them."""
        return self._own_rank in self._known()

    def bind(self, number: int, ranks: Sequence[int], own_rank: int) -> None:
        """It has been registered. Called by `init` and `add_process_set`."""
        self.process_set_id, self.ranks, self._own_rank = number, sorted(ranks), own_rank

    def unbind(self) -> None:
        """It has been removed."""
        self.process_set_id = None

    def _known(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} is not registered; call init(process_sets=[…]) or add_process_set first")
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"
