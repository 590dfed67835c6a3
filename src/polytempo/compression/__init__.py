"""How tensors are encoded before they travel: casts, codes, a few entries, and what feeds the rest back."""

from polytempo.compression.all_gather import all_gather
from polytempo.compression.cast import bf16, fp16
from polytempo.compression.dgc import dgc
from polytempo.compression.dynamic8 import dynamic8
from polytempo.compression.exact import exact
from polytempo.compression.feedback import feedback
from polytempo.compression.int8 import int8
from polytempo.compression.natural import natural
from polytempo.compression.one_bit import one_bit
from polytempo.compression.pca import pca
from polytempo.compression.point_to_point import recv, send
from polytempo.compression.prune import prune
from polytempo.compression.qsgd import qsgd
from polytempo.compression.random_k import random_k
from polytempo.compression.reduce_scatter import reduce_scatter
from polytempo.compression.sign import sign
from polytempo.compression.terngrad import terngrad
from polytempo.compression.threshold import threshold
from polytempo.compression.through import through
from polytempo.compression.top_k import top_k

__all__ = [
    "all_gather",
    "bf16",
    "dgc",
    "dynamic8",
    "exact",
    "feedback",
    "fp16",
    "int8",
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
