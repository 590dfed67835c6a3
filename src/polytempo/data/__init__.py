"""The assignment of samples: readers, and `DataShard`, with each rank's batches and their shares of the mean."""

from polytempo.data import scheduled
from polytempo.data.plan import Pick, plan
from polytempo.data.readers import Split
from polytempo.data.readers.csv_regression import csv_classes, csv_regression
from polytempo.data.readers.idx import digits, mnist, read_idx
from polytempo.data.readers.images import images
from polytempo.data.readers.libsvm import libsvm
from polytempo.data.readers.parts import read_parts
from polytempo.data.readers.spark_frame import from_spark
from polytempo.data.readers.text import characters, read_characters
from polytempo.data.rows import SparseRows, Sparsity, libsvm_rows, sparsity
from polytempo.data.shard import DataShard
from polytempo.data.streams.sharded_data import InMemoryShards, ShardedData

__all__ = [
    "DataShard",
    "InMemoryShards",
    "Pick",
    "ShardedData",
    "SparseRows",
    "Sparsity",
    "Split",
    "characters",
    "csv_classes",
    "csv_regression",
    "digits",
    "from_spark",
    "images",
    "libsvm",
    "libsvm_rows",
    "mnist",
    "plan",
    "read_characters",
    "read_idx",
    "read_parts",
    "scheduled",
    "sparsity",
]
