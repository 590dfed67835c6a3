"""The sentence about a slow rank: who, where, how much, since when, and why."""

from __future__ import annotations

from typing import Any

from polytempo.diagnosis.slow_rank import SlowRank

UNREAD = "its computations take longer"
"""The cause where no host is read."""
_READING = 0.15
"""A rank that spends so much more of its time on batches than its peers is slow because of them."""


def slow_sentence(found: SlowRank, who: str, host: str, cause: str) -> str:
    """Such as "rank 3 on n2 is 31 % slower since step 1,200: 1.9 cores are used by pid 4711 (stress)"."""
    place = f"{who} on {host}" if host else who
    return f"{place} is {100 * found.slower:.0f} % slower since step {found.since_step:,}: {_why(found, cause)}"


def _why(found: SlowRank, cause: str) -> str:
    if found.read_share - found.peers_read_share > _READING:
        peers = f"{100 * found.peers_read_share:.0f} % on its peers"
        return f"getting batches takes {100 * found.read_share:.0f} % of its time ({peers})"
    return cause or f"{UNREAD}, and nothing on its host explains it"


def slow_row(found: SlowRank, who: str, host: str, cause: str, at_s: float, kind: str = "rank") -> dict[str, Any]:
    """The row of metrics about a slow rank, or `kind`; `report.status.records.Diagnosis` reads it."""
    return {
        "kind": "diagnosis",
        "step": found.step,
        "at_s": round(at_s, 3),
        "about": "slow rank",
        "who": f"{kind}-{found.rank}",
        "rank": found.rank,
        "host": host or None,
        "text": slow_sentence(found, who, host, cause),
        "values": {
            "slower": found.slower,
            "since_step": float(found.since_step),
            "lost_s": found.lost_s,
            "read_share": found.read_share,
        },
    }
