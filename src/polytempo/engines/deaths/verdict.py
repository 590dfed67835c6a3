"""`judged`: the first culprit, from the complaints of ranks that only lost a peer.

A rank that raises an error of its own, or sees a process of its host killed, is certain, and needs no judgement.
Ranks that wait for a peer fail because it did. The culprit is among the ranks that complain of nothing:

    rank 0  complains: lost a peer   ┐
    rank 1  complains: lost rank 3   ├─▶ rank 2 complained too, rank 3 is silent ─▶ rank 3
    rank 2  complains: timed out     ┘
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polytempo.core.errors import PeerLost, TimedOut
from polytempo.core.system.first_failure import FirstFailure, in_short
from polytempo.engines.deaths.rank_process import RankProcess

_OF_A_PEER = re.compile(
    r"closed by peer|connection (reset|closed|refused)|broken pipe|socket closed|remote process|timed? ?out|"
    r"network error|failed to (recv|send)",
    re.IGNORECASE,
)
_TORCH = ("torch", "builtins")


class Complaint(NamedTuple):
    """The words of a rank that failed because of another one."""

    rank: int
    text: str
    """The rank's error."""
    late: bool
    """True if a deadline passed; False if a connection ended."""
    peer: int = -1
    """The rank that it names; -1: none."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Complaint | None:
        """The complaint in an error; None for an error of the rank's own."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            if isinstance(error, PeerLost):
                return cls(rank, in_short(error), False, -1 if error.peer is None else error.peer)
            if isinstance(error, TimedOut):
                return cls(rank, in_short(error), True, _missing(error.reason))
            text = str(error) if type(error).__module__.partition(".")[0] in _TORCH else ""
            if isinstance(error, RuntimeError | OSError) and _OF_A_PEER.search(text):
                return cls(rank, in_short(error), re.search(r"timed? ?out", text, re.I) is not None)
            following = error.__cause__
            if following is None:
                break
            error = following
        return None

    def as_json(self) -> bytes:
        """The complaint for `from_json`."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Complaint:
        """The complaint again."""
        return cls(**json.loads(text))


def _missing(reason: str) -> int:
    """The rank in "rank 2 did not come"; -1 for other words."""
    found = re.match(r"rank (\d+) did not come", reason)
    return int(found[1]) if found else -1


def judged(
    processes: Mapping[int, RankProcess], size: int, complaints: Sequence[Complaint], known: Mapping[int, str]
) -> FirstFailure:
    """The first culprit of `size` ranks.

    `complaints` has the present complaints, this rank's first; `known` the causes that this host's kernel tells of
    ranks that complained of nothing. Cost: linear in `size`.
    """
    complained = {complaint.rank for complaint in complaints}
    named = [complaint.peer for complaint in complaints if complaint.peer >= 0]
    silent = [rank for rank in range(size) if rank not in complained]
    told = [rank for rank in silent if rank in known]
    suspects = told or silent
    if not suspects:  # each of them blames another one
        first = complaints[0]
        rank = named[0] if named else first.rank
        return _of(processes, rank, size, f"is blamed by rank {first.rank} ({first.text})")
    late = all(complaint.late for complaint in complaints)
    lost = None if told else _lost_host(processes, silent, complained)
    if lost is not None and (len(lost[1]) > 1 or not late):
        host, ranks = lost
        more = f" with all {len(ranks)} ranks of its host" if len(ranks) > 1 else ""
        cause = f"was lost{more}: {_complains(complaints[0])}"
        return FirstFailure(f"rank {ranks[0]} of {size}", cause, ranks[0], host, processes[ranks[0]].log)
    culprit = next((peer for peer in named if peer in suspects), suspects[0])
    if culprit in known:
        return _of(processes, culprit, size, known[culprit])
    cause = "hangs" if late else "ended without a word"
    return _of(processes, culprit, size, f"{cause}: {_complains(complaints[0])}")


def _complains(complaint: Complaint) -> str:
    return complaint.text if complaint.text.startswith("rank ") else f"rank {complaint.rank}: {complaint.text}"


def _of(processes: Mapping[int, RankProcess], rank: int, size: int, cause: str) -> FirstFailure:
    if rank in processes:
        return processes[rank].died(size, cause)
    return FirstFailure(f"rank {rank} of {size}", cause, rank)


def _lost_host(
    processes: Mapping[int, RankProcess], silent: Sequence[int], complained: set[int]
) -> tuple[str, list[int]] | None:
    """A host with silent ranks alone, where others complain, and these ranks."""
    for rank in silent:
        if rank not in processes:
            continue
        there = [each for each, process in processes.items() if process.machine == processes[rank].machine]
        if complained and not complained & set(there):
            return processes[rank].host, sorted(there)
    return None
