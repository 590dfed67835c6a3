"""`FirstFailure`: the first process of a run that failed, and the line that names it."""

from __future__ import annotations

import json
from typing import NamedTuple

MOST_SAID = 400
"""Characters of an exception's message that are kept."""
MOST_OF_CAUSE = 240
"""Characters of the cause in the line; the log has all."""
BEGIN = "first failure: "


class FirstFailure(NamedTuple):
    """The first failure of a run: who, where, why, and the log to read."""

    who: str
    """The process: "rank 1 of 4", "worker-2"."""
    cause: str
    """A verb and its circumstances: "was killed by SIGKILL", "raised ValueError: …"."""
    rank: int | None = None
    host: str = ""
    """The host's name; "" where it is not known."""
    log: str = ""
    """The path of the process's log, or words for the place of its output."""

    def __str__(self) -> str:
        """The line: `first failure: rank 1 of 4 on n2 was killed by SIGKILL; read runs/a/logs/rank-1.log`."""
        where = f" on {self.host}" if self.host else ""
        read = f"; read {self.log}" if self.log else ""
        line = f"{BEGIN}{self.who}{where} {shortened(self.cause, MOST_OF_CAUSE)}{read}"
        return "".join(letter if letter.isprintable() else " " for letter in line)

    def as_json(self) -> bytes:
        """The death for `from_json`."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> FirstFailure:
        """The death again. ValueError for other text."""
        facts = json.loads(text)
        if not isinstance(facts, dict) or facts.keys() != set(cls._fields):
            raise ValueError("it is not a death")
        return cls(**facts)


def raised(error: BaseException) -> str:
    """The cause of a process that ended with `error`."""
    said = in_short(error)
    return f"raised {type(error).__name__}{f': {said}' if said else ''}"


def in_short(error: BaseException) -> str:
    """The exception's message on one line, and not too long."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # a user's exception that has no text
        return ""
    return shortened(said, MOST_SAID)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
