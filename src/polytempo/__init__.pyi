"""The public face: each name once, with its home. `__init__.py` reads this file, and loads a name when it is used."""

from polytempo import aggregation as aggregation
from polytempo import cluster as cluster
from polytempo import collectives as collectives
from polytempo import compression as compression
from polytempo import core as core
from polytempo import data as data
from polytempo import engines as engines
from polytempo import errors as errors
from polytempo import interop as interop
from polytempo import jobs as jobs
from polytempo import large_batch as large_batch
from polytempo import partition as partition
from polytempo import strategies as strategies
from polytempo import synchronization as synchronization
from polytempo import trackers as trackers
from polytempo import training as training
from polytempo import worlds as worlds
from polytempo.core.strategy import Strategy as Strategy
from polytempo.engines.join.init import init as init
from polytempo.engines.local_engine import launch as launch
from polytempo.runs.compare import compare as compare
from polytempo.runs.elastic.elastic_loop import elastic as elastic
from polytempo.runs.own_loop.attach import attach as attach
from polytempo.runs.own_loop.pipeline import pipeline as pipeline
from polytempo.runs.programs.run_lbfgs import lbfgs as lbfgs
from polytempo.runs.programs.run_schedule import schedule as schedule
from polytempo.runs.run import run as run
from polytempo.runs.simulated.simulate import simulate as simulate
from polytempo.server.rules.staleness import power as power
from polytempo.spec.explanation import explain as explain
from polytempo.spec.job import Data as Data
from polytempo.spec.job import Job as Job
from polytempo.spec.job import of_batch as of_batch
from polytempo.spec.loss_divisor import divided_by as divided_by
from polytempo.spec.precision import precision as precision
from polytempo.spec.result import Result as Result
from polytempo.spec.run_options import RunOptions as RunOptions
from polytempo.spec.text.catalogue import parse_strategy as parse_strategy
from polytempo.spec.then import then as then
from polytempo.training.observe.loop_score import score as score
from polytempo.training.own_loop.shard import shard as shard
from polytempo.training.parts.hybrid import hybrid as hybrid
from polytempo.training.parts.split import split as split
from polytempo.training.trainer import Trainer as Trainer

__version__: str
