"""The catalogue of codecs: a row for each, with its promises.

`test_codec_laws.py` and `test_codec_mistakes.py` hold each to its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from polytempo import compression as c
from polytempo.core import Codec


class Row(NamedTuple):
    """A codec's constructor and its promises, written out: its own facts must be the same."""

    text: str
    make: Callable[[], Codec]
    law: str
    summable: bool = False
    sparse: bool = False
    fixed: bool = True
    passes: bool = False
    """NaN and infinities arrive unchanged."""
    draws: bool = False
    """Random draws: the law holds in the mean."""
    feeds_itself: bool = False
    """A residual of its own: it has no `encode_`."""
    diverges: bool = False
    """An error that may be longer than x, so that with feedback the residual grows without end."""

    @property
    def feedable(self) -> bool:
        """True if feedback makes sense."""
        return not self.feeds_itself and not self.diverges


ROWS = [
    Row("exact()", c.exact, "lossless", summable=True, passes=True),
    Row("fp16()", c.fp16, "contraction", summable=True, passes=True),
    Row("bf16()", c.bf16, "contraction", summable=True, passes=True),
    Row("int8()", c.int8, "contraction"),
    Row("int8(block=64)", lambda: c.int8(block=64), "contraction"),
    Row("dynamic8()", c.dynamic8, "contraction"),
    Row("bins()", c.bins, "contraction"),
    Row("bins(bits=5)", lambda: c.bins(bits=5), "contraction"),
    Row("one_bit()", c.one_bit, "contraction"),
    Row("sign()", c.sign, "contraction"),
    Row("sign(scaled=False)", lambda: c.sign(scaled=False), "conserving", diverges=True),
    Row("threshold(0.5)", lambda: c.threshold(0.5), "conserving", sparse=True, fixed=False),
    Row("threshold(density=0.1)", lambda: c.threshold(density=0.1), "conserving", sparse=True, fixed=False),
    Row("top_k(0.1)", lambda: c.top_k(0.1), "contraction", sparse=True),
    Row("top_k(0.1, entropy=True)", lambda: c.top_k(0.1, entropy=True), "contraction", sparse=True, fixed=False),
    Row("chunk_top_k()", c.chunk_top_k, "contraction", sparse=True),
    Row("chunk_top_k(0.1, bits=None)", lambda: c.chunk_top_k(0.1, bits=None), "contraction", sparse=True),
    Row("chunk_top_k(0.2, 4, rotated=True)", lambda: c.chunk_top_k(0.2, 4, rotated=True), "contraction", sparse=True),
    Row("random_k(0.1)", lambda: c.random_k(0.1), "contraction", summable=True, sparse=True, draws=True),
    Row(
        *("random_k(0.1, unbiased=True)", lambda: c.random_k(0.1, unbiased=True), "unbiased"),
        summable=True,
        sparse=True,
        draws=True,
        diverges=True,
    ),
    Row(
        *("dgc(0.1)", lambda: c.dgc(0.1, momentum=0.0, dense_below=0), "conserving"),
        sparse=True,
        fixed=False,
        feeds_itself=True,
    ),
    Row("prune(below=0.5)", lambda: c.prune(below=0.5), "contraction", sparse=True, fixed=False),
    Row("pca(rank=2)", lambda: c.pca(rank=2), "contraction"),
    Row("pca(error=0.3)", lambda: c.pca(error=0.3), "contraction", fixed=False),
    Row("qsgd()", c.qsgd, "unbiased", draws=True, diverges=True),
    Row("qsgd(levels=15, bucket=64)", lambda: c.qsgd(levels=15, bucket=64), "unbiased", draws=True),
    Row("terngrad()", c.terngrad, "conserving", summable=True, draws=True, diverges=True),
    Row("terngrad(clip=None)", lambda: c.terngrad(clip=None), "unbiased", summable=True, draws=True, diverges=True),
    Row("natural()", c.natural, "unbiased", draws=True),
]


def text(row: Row) -> str:
    """The codec's name in a test."""
    return row.text
