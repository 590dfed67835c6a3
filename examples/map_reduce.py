"""Parameter averaging as map and reduce: partitions train copies of the model, and a tree of sums averages them.

Here partitions are lists. An RDD of Spark or a Bag of dask takes their place in the same call:

    map_reduce(job, session.sparkContext.parallelize(samples, 4), rounds=10)
    map_reduce(job, dask.bag.from_sequence(samples, npartitions=4), rounds=10)
"""

from __future__ import annotations

import torch

import polytempo as pt
from polytempo.interop import map_reduce
from polytempo.jobs.digits import job

train, test = pt.data.digits()
samples = [train[i] for i in range(len(train))]
for workers in (1, 2, 4):
    partitions = [samples[first::workers] for first in range(workers)]
    averaged = map_reduce(job, partitions, rounds=6)
    with torch.no_grad():
        right = averaged.model.eval()(test.tensors[0]).argmax(1) == test.tensors[1]
    losses = ", ".join(f"{loss:.3f}" for loss in averaged.losses)
    print(f"{workers} partition(s): mean loss of each round {losses}; accuracy {right.float().mean():.1%}")
