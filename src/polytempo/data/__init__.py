"""Data: readers, and `DataShard`, which deals a data set to workers."""

from polytempo.data import scheduled
from polytempo.data.csv_regression import csv_regression
from polytempo.data.digits import digits
from polytempo.data.idx import mnist, read_idx
from polytempo.data.libsvm import libsvm
from polytempo.data.parts import read_parts
from polytempo.data.plan import Pick, plan
from polytempo.data.rows import SparseRows, libsvm_rows
from polytempo.data.shard import DataShard
from polytempo.data.spark_frame import from_spark
from polytempo.data.sparsity import Sparsity, sparsity
from polytempo.data.split import Split
from polytempo.data.text import characters, read_characters

__all__ = [
    "DataShard",
    "Pick",
    "SparseRows",
    "Sparsity",
    "Split",
    "characters",
    "csv_regression",
    "digits",
    "from_spark",
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
