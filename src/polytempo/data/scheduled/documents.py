"""Documents as tokens, for topic models."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from polytempo.data.readers.text import read_text

_MOST_DOCUMENTS = 0.5
"""A word that more of the documents have tells none from another."""


class Documents(NamedTuple):
    """Token t is word `words[t]` of document `documents[t]`; tokens of a document follow each other."""

    documents: Tensor
    """(m,), int64."""
    words: Tensor
    num_documents: int
    num_words: int


def drawn_documents(
    documents: int = 200, words: int = 500, length: int = 100, topics: int = 10, seed: int = 0
) -> Documents:
    """Documents that the model draws, each of `length` words; α = 0.1 for their topics, β = 0.05 for topics' words."""
    if min(documents, words, length, topics) < 1:
        raise ValueError(
            f"no such data: documents={documents}, words={words}, length={length}, topics={topics}; each is at least 1"
        )
    random = torch.Generator().manual_seed(seed)
    of_topic = _dirichlet(topics, words, 0.05, random)
    of_document = _dirichlet(documents, topics, 0.1, random)
    drawn = torch.multinomial(of_document, length, replacement=True, generator=random).flatten()
    tokens = torch.multinomial(of_topic[drawn], 1, generator=random).flatten()
    return Documents(torch.arange(documents).repeat_interleave(length), tokens, documents, words)


def scenes(path: str, speeches: int = 20, least: int = 5) -> Documents:
    """A play, with blank lines between its speeches, cut into documents of so many speeches.

    Words are runs of letters in lower case, without speakers' names (the line with a colon that begins a speech), words
    that are there fewer than `least` times, and words that more than half of the documents have. Numbered by alphabet.
    """
    if min(speeches, least) < 1:
        raise ValueError(f"speeches={speeches} and least={least} must be at least 1")
    found = _read(Path(path))
    cut = [found[first : first + speeches] for first in range(0, len(found), speeches)]
    tokens = [[word for speech in each for word in re.findall(r"[a-z]+", speech.lower())] for each in cut]
    counts = Counter(word for each in tokens for word in each)
    spread = Counter(word for each in tokens for word in set(each))
    kept = sorted(word for word in counts if counts[word] >= least and spread[word] <= _MOST_DOCUMENTS * len(cut))
    number = {word: place for place, word in enumerate(kept)}
    pairs = [(place, number[word]) for place, each in enumerate(tokens) for word in each if word in number]
    if not pairs:
        raise ValueError(f"{path}: no word is there {least} times and in at most half of {len(cut)} documents")
    documents, words = torch.tensor(pairs).T.contiguous()
    return Documents(documents, words, len(cut), len(kept))


def _read(path: Path) -> list[str]:
    """The speeches without their speakers."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; name a text")
    return [re.sub(r"\A[^\n]*:\n", "", speech) for speech in re.split(r"\n\s*\n", read_text(path)) if speech.strip()]


def _dirichlet(rows: int, columns: int, concentration: float, random: torch.Generator) -> Tensor:
    """Rows drawn from a symmetric Dirichlet distribution; `torch.distributions` has no generators."""
    gammas = torch._standard_gamma(torch.full((rows, columns), concentration, dtype=torch.float64), generator=random)
    return gammas.clamp(min=1e-12) / gammas.clamp(min=1e-12).sum(1, keepdim=True)
