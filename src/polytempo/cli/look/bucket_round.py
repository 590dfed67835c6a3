"""A round, or a push, of workers that share an object store alone, for `polytempo explain --bucket`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polytempo.cli.options.show import size
from polytempo.core import Bundle, Strategy
from polytempo.core.transform import cost_of
from polytempo.server.worker.encoded_pushes import movement_bytes
from polytempo.spec.text.catalogue import parse_cluster
from polytempo.training.own_loop.store_log_loop import pushes_movements
from polytempo.training.own_loop.store_loop import check_rare
from polytempo.worlds.object_store.round_cost import push_cost, round_cost


def bucket_round(strategy: Strategy, model: nn.Module, workers: int, cluster: str | None) -> dict[str, Any]:
    """The numbers of a round by name; its time on the links of a `cluster`. `Incompatible` (PT29xx) as at a run."""
    parameters = Bundle({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    if pushes_movements(strategy):
        period = cost_of(strategy.parameters, parameters, workers).exchanges[0].steps.period
        assert strategy.server is not None, "it pushes movements"
        cost = push_cost(movement_bytes(parameters, strategy.server.codec), workers)
    else:
        timed = check_rare(strategy, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
        period, cost = timed.period, round_cost(timed.meeting, parameters, workers)
    found: dict[str, Any] = {"period": period, **cost._asdict()}
    if cluster is not None:
        network = parse_cluster(cluster).network
        found["seconds"] = cost.seconds(network.bytes_per_s, network.latency_s)
    return {"bucket": found}


def bucket_lines(found: dict[str, Any]) -> Iterator[str]:
    """The same in words."""
    yield f"every {found['period']} steps: {found['puts']:,} puts and at least {found['gets']:,} gets of all workers"
    yield f"  a worker sends {size(found['sent_bytes'])} and receives {size(found['received_bytes'])}"
    sent, received = found["merger_sent_bytes"], found["merger_received_bytes"]
    if (sent, received) != (found["sent_bytes"], found["received_bytes"]):
        yield f"  the worker that merges sends {size(sent)} and receives {size(received)}"
    yield f"  {found['after_one_another']:,} requests follow each other"
    if "seconds" in found:
        yield f"  {found['seconds']:.3g} s over the cluster's links, without pauses between looks"
