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
from polytempo.data.side_by_side import side_by_side
from polytempo.data.streams.counted import counted
from polytempo.data.streams.sharded_data import InMemoryShards, ShardedData
from polytempo.data.streams.sources.hugging_face import huggingface
from polytempo.data.streams.sources.json_lines import json_lines
from polytempo.data.streams.sources.mapped import filtered, mapped
from polytempo.data.streams.sources.mixture import mixture
from polytempo.data.streams.sources.packed import document_mask, packed
from polytempo.data.streams.sources.parquet import parquet
from polytempo.data.streams.sources.tar_samples import webdataset
from polytempo.data.streams.sources.token_files import tokens

__all__ = [
    "DataShard",
    "InMemoryShards",
    "Pick",
    "ShardedData",
    "SparseRows",
    "Sparsity",
    "Split",
    "characters",
    "counted",
    "csv_classes",
    "csv_regression",
    "digits",
    "document_mask",
    "filtered",
    "from_spark",
    "huggingface",
    "images",
    "json_lines",
    "libsvm",
    "libsvm_rows",
    "mapped",
    "mixture",
    "mnist",
    "packed",
    "parquet",
    "plan",
    "read_characters",
    "read_idx",
    "read_parts",
    "scheduled",
    "side_by_side",
    "sparsity",
    "tokens",
    "webdataset",
]
