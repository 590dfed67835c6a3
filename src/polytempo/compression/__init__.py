"""Encodings of tensors before they travel: casts, codes, a few entries, and feedback of the rest."""

from polytempo.compression.codecs.cast import bf16, fp16
from polytempo.compression.codecs.chunk_top_k import chunk_top_k
from polytempo.compression.codecs.class_means import bins, one_bit
from polytempo.compression.codecs.dgc import dgc
from polytempo.compression.codecs.dynamic8 import dynamic8
from polytempo.compression.codecs.int8 import int8
from polytempo.compression.codecs.natural import natural
from polytempo.compression.codecs.pca import pca
from polytempo.compression.codecs.prune import prune
from polytempo.compression.codecs.qsgd import qsgd
from polytempo.compression.codecs.random_k import random_k
from polytempo.compression.codecs.sign import sign
from polytempo.compression.codecs.terngrad import terngrad
from polytempo.compression.codecs.threshold import threshold
from polytempo.compression.codecs.top_k import top_k
from polytempo.compression.encoding.coded import exact
from polytempo.compression.encoding.delta import delta
from polytempo.compression.encoding.feedback import feedback
from polytempo.compression.exchange.all_gather import all_gather
from polytempo.compression.exchange.differences import differences
from polytempo.compression.exchange.masked import masked
from polytempo.compression.exchange.point_to_point import recv, send
from polytempo.compression.exchange.reduce_scatter import reduce_scatter
from polytempo.compression.exchange.through import through

__all__ = [
    "all_gather",
    "bf16",
    "bins",
    "chunk_top_k",
    "delta",
    "dgc",
    "differences",
    "dynamic8",
    "exact",
    "feedback",
    "fp16",
    "int8",
    "masked",
    "natural",
    "one_bit",
    "pca",
    "prune",
    "qsgd",
    "random_k",
    "recv",
    "reduce_scatter",
    "send",
    "sign",
    "terngrad",
    "threshold",
    "through",
    "top_k",
]
