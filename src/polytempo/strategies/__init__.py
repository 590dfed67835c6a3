"""The recipes that people ask for by name: each a few lines over the axes, with the paper that it comes from."""

from polytempo.core.calls.typed_arguments import typed
from polytempo.strategies.acco import acco
from polytempo.strategies.adasum import adasum
from polytempo.strategies.async_diloco import async_diloco
from polytempo.strategies.async_sgd import async_sgd
from polytempo.strategies.backup_workers import backup_workers
from polytempo.strategies.bf16_sgd import bf16_sgd
from polytempo.strategies.co2 import co2
from polytempo.strategies.codistillation import codistillation
from polytempo.strategies.dc_asgd import dc_asgd
from polytempo.strategies.ddg import ddg
from polytempo.strategies.decoupled_diloco import decoupled_diloco
from polytempo.strategies.delayed_sgd import delayed_sgd
from polytempo.strategies.demo import demo
from polytempo.strategies.des_loc import des_loc
from polytempo.strategies.dgc import dgc
from polytempo.strategies.diloco import diloco
from polytempo.strategies.dion import dion
from polytempo.strategies.distributed_lion import distributed_lion
from polytempo.strategies.distributed_muon import distributed_muon
from polytempo.strategies.downpour import downpour
from polytempo.strategies.easgd import easgd
from polytempo.strategies.ef21 import ef21
from polytempo.strategies.features_replay import features_replay
from polytempo.strategies.flexrr import flexrr
from polytempo.strategies.gossip import gossip
from polytempo.strategies.gpipe import gpipe
from polytempo.strategies.halos import halos
from polytempo.strategies.hogwild import hogwild
from polytempo.strategies.hybrid import hybrid
from polytempo.strategies.int8_sgd import int8_sgd
from polytempo.strategies.interleaved import interleaved
from polytempo.strategies.islands import islands
from polytempo.strategies.local_sgd import local_sgd
from polytempo.strategies.noloco import noloco
from polytempo.strategies.one_bit_adam import one_bit_adam
from polytempo.strategies.one_bit_sgd import one_bit_sgd
from polytempo.strategies.one_f_one_b import one_f_one_b
from polytempo.strategies.parameter_averaging import parameter_averaging
from polytempo.strategies.pipedream import pipedream
from polytempo.strategies.pipedream_2bw import pipedream_2bw
from polytempo.strategies.pipelined_backprop import pipelined_backprop
from polytempo.strategies.post_local_sgd import post_local_sgd
from polytempo.strategies.power_sgd import power_sgd
from polytempo.strategies.qsgd import qsgd
from polytempo.strategies.quasi_global_momentum import quasi_global_momentum
from polytempo.strategies.robust_sgd import robust_sgd
from polytempo.strategies.shared_memory import shared_memory
from polytempo.strategies.sign_sgd import sign_sgd
from polytempo.strategies.slowmo import slowmo
from polytempo.strategies.softsync import softsync
from polytempo.strategies.sparse_loco import sparse_loco
from polytempo.strategies.sparta import sparta
from polytempo.strategies.split import split
from polytempo.strategies.ssp import ssp
from polytempo.strategies.staleness_aware import staleness_aware
from polytempo.strategies.stochastic_gradient_push import stochastic_gradient_push
from polytempo.strategies.streaming_diloco import streaming_diloco
from polytempo.strategies.sync_sgd import sync_sgd
from polytempo.strategies.synthetic_gradients import synthetic_gradients
from polytempo.strategies.terngrad import terngrad
from polytempo.strategies.threshold_sgd import threshold_sgd
from polytempo.strategies.top_k_sgd import top_k_sgd
from polytempo.strategies.zero_bubble import zero_bubble
from polytempo.strategies.zero_one_adam import zero_one_adam

__all__ = [
    "acco",
    "adasum",
    "async_diloco",
    "async_sgd",
    "backup_workers",
    "bf16_sgd",
    "co2",
    "codistillation",
    "dc_asgd",
    "ddg",
    "decoupled_diloco",
    "delayed_sgd",
    "demo",
    "des_loc",
    "dgc",
    "diloco",
    "dion",
    "distributed_lion",
    "distributed_muon",
    "downpour",
    "easgd",
    "ef21",
    "features_replay",
    "flexrr",
    "gossip",
    "gpipe",
    "halos",
    "hogwild",
    "hybrid",
    "int8_sgd",
    "interleaved",
    "islands",
    "local_sgd",
    "noloco",
    "one_bit_adam",
    "one_bit_sgd",
    "one_f_one_b",
    "parameter_averaging",
    "pipedream",
    "pipedream_2bw",
    "pipelined_backprop",
    "post_local_sgd",
    "power_sgd",
    "qsgd",
    "quasi_global_momentum",
    "robust_sgd",
    "shared_memory",
    "sign_sgd",
    "slowmo",
    "softsync",
    "sparse_loco",
    "sparta",
    "split",
    "ssp",
    "staleness_aware",
    "stochastic_gradient_push",
    "streaming_diloco",
    "sync_sgd",
    "synthetic_gradients",
    "terngrad",
    "threshold_sgd",
    "top_k_sgd",
    "zero_bubble",
    "zero_one_adam",
]

globals().update({name: typed(globals()[name]) for name in __all__})
