"""`explain`: bytes, operations and memory of a strategy, as numbers; nothing is trained and nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from polytempo.collectives.cost import sum_cost
from polytempo.compression.encoding.delta import HEAD_BYTES
from polytempo.compression.exchange.packing import EXACT_BELOW, Packing, whole
from polytempo.core import Bundle, Codec, Cost, Exchange, Sent, Strategy, Transform
from polytempo.core.codec import DeltaCodec, PullCodec
from polytempo.core.cost import num_bytes
from polytempo.core.rule import Service
from polytempo.core.strategy import check_merges
from polytempo.core.transform import cost_of
from polytempo.federated.rounds import CONTROL, unserved
from polytempo.federated.secure_sum import secure_bytes, secure_down_bytes
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.schedules.facts import StageFacts, facts
from polytempo.spec.text.catalogue import strategy_from

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Safetensors' names, in its order: a file begins with the last ones."""
_ALIGNMENT = 8


class Traffic(NamedTuple):
    """Traffic of a step: of all workers together, and of the busiest worker."""

    messages: float = 0
    """Sends; a worker's part in a collective that the world performs counts as one."""
    gradient_bytes: float = 0
    """Bytes of gradients, encoded where there is a codec."""
    parameter_bytes: float = 0
    """Bytes of parameters, and of the differences that move them."""
    metadata_bytes: float = 0
    """Bytes that codecs agree on before."""
    busiest_bytes: float = 0
    """Bytes that the busiest worker sends, all together."""
    rounds: float = 0
    """Messages that follow each other."""
    flops: float = 0
    """Floating-point operations of encoding, decoding and merging, on the busiest worker."""

    @property
    def bytes(self) -> float:
        """Bytes of all classes."""
        return self.gradient_bytes + self.parameter_bytes + self.metadata_bytes


Of = Literal["gradients", "parameters"]


class Planned(NamedTuple):
    """An exchange of a strategy, with the numbers of its sums in `exchange.sent`."""

    of: Of
    """Position: before the optimizer's step, or after it."""
    exchange: Exchange

    @property
    def traffic(self) -> Traffic:
        """Traffic of a step with this exchange."""
        sent = self.exchange.sent
        gradients = self.of == "gradients" if not self.exchange.server else self.exchange.server == "push"
        return Traffic(
            sent.messages,
            sent.payload_bytes if gradients else 0,
            0 if gradients else sent.payload_bytes,
            sent.metadata_bytes,
            sent.busiest_bytes,
            sent.rounds,
            self.exchange.flops,
        )


class RoundTraffic(NamedTuple):
    """A round of clients on machines of their own. A message has some 100 bytes beside its tensors."""

    clients: int
    """Clients of a round; with `private` the expected number."""
    down_bytes: int
    """Bytes to one client."""
    up_bytes: int
    """Bytes from one client."""
    exact: bool
    """False where a code's bytes depend on the values: then these are the most."""
    numel: int
    """Numbers of a client's movement; tensors that stay with it are left out."""
    plain_bytes: int
    """Their bytes, without code or masks."""


class Explanation(NamedTuple):
    """The answer of `explain`: plain numbers."""

    strategy: str
    workers: int
    tensors: int
    numel: int
    """Parameters."""
    parameter_bytes: int
    """Bytes of one copy of the parameters."""
    exchanges: tuple[Planned, ...]
    memory_bytes: int
    """Bytes that a worker keeps from step to step: residuals, anchors, late tensors."""
    stages: tuple[StageFacts, ...] = ()
    """Stages of a model that is cut: their layers, and the delay of their updates."""
    round: RoundTraffic | None = None
    """A round with clients on machines of their own, in place of the exchanges. None: there are no such rounds, or the
    strategy keeps tensors at clients, and `parameters` is not a model."""

    @property
    def mean(self) -> Traffic:
        """Mean of a step in a long run: an exchange every H steps counts 1/H, and a passing one nothing."""
        return _added(
            Traffic(*(value / planned.exchange.steps.period for value in planned.traffic))
            for planned in self.exchanges
            if planned.exchange.steps.last is None
        )

    def at(self, step: int) -> Traffic:
        """Traffic of step `step`, counted from 1."""
        return _added(planned.traffic for planned in self.exchanges if planned.exchange.steps.has(step))


def explain(
    strategy: Strategy | str,
    workers: int = 8,
    parameters: nn.Module | Mapping[str, Tensor] | int = 1_000_000,
    *,
    hosts: Sequence[int] | None = None,
) -> Explanation:
    """Predict the messages, operations and memory of each step of `strategy`, for a model's parameters.

        found = pt.explain(pt.strategies.local_sgd(period=8), workers=16, parameters=model)
        found.mean.busiest_bytes        # a step, over a long run
        found.at(8).rounds              # the step in which models meet
        found.memory_bytes

    `parameters`: a model, tensors by name (also on the meta device), or a number of float32 values, as one vector.
    `hosts[r]`: the host of worker r, for routes and pushes that are `hierarchical`; None: a host each.

    Units: messages, bytes, floating-point operations, each of one step; `memory_bytes` of one worker. Numbers equal the
    virtual world's counts for an exchange of all parameters together (a world that overlaps exchanges with the backward
    pass sends each bucket separately, and an all-gather behind later steps goes round by round: as many bytes, more
    messages). Where `exchange.exact` is False, values decide, and bytes are an upper bound. Not counted: running
    statistics, an optimizer's state that travels (`strategy.carries_optimizer`), and other messages of a parameter
    server's protocol (acknowledgements, tickets, copies of shards). A graph that changes from step to step (`gossip`)
    counts as in its first step. Where the model is cut into stages, exchanges between replicas of a stage count, for
    stages with equally many parameters; traffic across the cuts depends on the batch (`polytempo cut`). Where layers
    are in parts, exchanges between workers with the same parts count, as if all layers were in equal parts (of
    `hybrid`, as if none was divided); traffic between parts depends on the batch.

    Rounds of clients (`fed_avg`) have `found.round`, the bytes to and from a client on a machine of its own; their
    exchanges are of the workers that play the clients of `pt.run`.

    Errors: ValueError where `workers` is less than 1 or than a merge needs, where there are no parameters, and for a
    transform or a route of one's own that does not say its cost.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    strategy = strategy_from(strategy)
    if hosts is not None and len(hosts) != workers:
        raise ValueError(f"hosts must name a host for each of {workers} workers, got {len(hosts)}")
    holders, groups = strategy.holders, strategy.groups
    if workers % holders:
        raise ValueError(f"{strategy} has each model on {holders} workers; workers must be a multiple, got {workers}")
    if workers % groups:
        raise ValueError(f"{strategy} has {groups} groups; workers must be a multiple, got {workers}")
    check_merges(strategy, workers)
    bundle, schedule = _bundle(parameters), strategy.schedule
    found, memory = _exchanges(strategy, bundle, range(workers) if hosts is None else hosts)
    return Explanation(
        str(strategy),
        workers,
        len(bundle.tensors),
        sum(tensor.numel() for tensor in bundle.tensors.values()),
        num_bytes(bundle),
        found,
        memory,
        tuple(facts(schedule, stage) for stage in range(schedule.stages)) if isinstance(schedule, Schedule) else (),
        round_traffic(strategy, parameters if isinstance(parameters, nn.Module) else bundle.tensors),
    )


def _exchanges(strategy: Strategy, parameters: Bundle, hosts: Sequence[int]) -> tuple[tuple[Planned, ...], int]:
    """Exchanges of all stages, or parts, and groups together, and the bytes that a worker keeps."""
    stages, groups, service = strategy.holders, strategy.groups, strategy.server
    slots: tuple[tuple[Of, Transform], ...] = (("gradients", strategy.gradients), ("parameters", strategy.parameters))
    if service is not None:  # the exchange of one stage: at first all are the same
        service = replace(service, shards=service.shards // stages)
    group = hosts[:: stages * groups]
    found: list[Planned] = []
    memory = 0
    for of, transform in slots:
        cost = cost_of(transform, parameters, len(group))
        exchanges = [_summed(each, group) for each in _served(cost, service, parameters, group)]
        found += [Planned(of, _of_groups(_of_stages(each, stages), groups)) for each in exchanges]
        memory += cost.memory_bytes // stages
    return tuple(found), memory


def _bundle(parameters: nn.Module | Mapping[str, Tensor] | int) -> Bundle:
    if isinstance(parameters, nn.Module):
        parameters = {name: p.detach() for name, p in parameters.named_parameters() if p.requires_grad}
    if isinstance(parameters, int):
        parameters = {"parameters": torch.empty(parameters, device="meta")}
    if not any(tensor.numel() for tensor in parameters.values()):
        raise ValueError("there are no parameters that are trained, so nothing is sent; give a model, or a number >= 1")
    return Bundle({name: torch.empty_like(tensor, device="meta") for name, tensor in parameters.items()})


def _added(traffics: Iterable[Traffic]) -> Traffic:
    return reduce(lambda a, b: Traffic(*(x + y for x, y in zip(a, b, strict=True))), traffics, Traffic())


def _summed(exchange: Exchange, hosts: Sequence[int]) -> Exchange:
    """The exchange with the traffic of its sums."""
    costs = [sum_cost(each.route, hosts, each.numel, each.itemsize) for each in exchange.sums]
    return exchange._replace(sent=reduce(Sent.plus, costs, exchange.sent))


def _of_stages(exchange: Exchange, stages: int) -> Exchange:
    """The same in each of so many stages, which share the parameters evenly."""
    if stages == 1:
        return exchange
    sent = exchange.sent
    sent = sent._replace(messages=stages * sent.messages, busiest_bytes=sent.busiest_bytes // stages)
    return exchange._replace(sent=sent, flops=exchange.flops / stages)


def _of_groups(exchange: Exchange, groups: int) -> Exchange:
    """The same in each of so many groups."""
    sent = exchange.sent
    sent = sent._replace(
        messages=groups * sent.messages,
        payload_bytes=groups * sent.payload_bytes,
        metadata_bytes=groups * sent.metadata_bytes,
    )
    return exchange._replace(sent=sent)


def _served(cost: Cost, service: Service | None, parameters: Bundle, hosts: Sequence[int]) -> Iterable[Exchange]:
    """Pushes and pulls with their bytes, which the server's codecs decide: a message to, or from, each shard.

    Where a host's workers push their sum, one of them pushes, and the others send it their gradients, each as a whole.
    """
    workers = len(hosts)
    for exchange in cost.exchanges:
        if not exchange.server or service is None:
            yield exchange
            continue
        codec = service.codec if exchange.server == "push" else service.pull_codec
        each, exact, flops = _encoded(parameters, codec, service.shards)
        to_server = exchange.server == "push"
        sent = Sent(workers * service.shards, workers * each, busiest_bytes=each if to_server else 0, rounds=1)
        if to_server and service.hierarchical and (offers := workers - len(set(hosts))):
            sent = sent._replace(messages=offers + len(set(hosts)) * service.shards, rounds=2)
        name = None if codec is None else codec.facts.name
        yield exchange._replace(
            sent=sent, exact=exact and (codec is None or service.shards == 1), codec=name, flops=flops
        )


def _encoded(parameters: Bundle, codec: PullCodec | None, shards: int) -> tuple[int, bool, float]:
    """Bytes of a push or a pull, whether exactly, and a worker's operations for it."""
    if codec is None:
        return num_bytes(parameters), True, 0.0
    if isinstance(codec, DeltaCodec):
        most, _, flops = _encoded(parameters, codec.codec, shards)
        return most + shards * HEAD_BYTES, False, flops + 2.0 * sum(view.numel() for view in parameters.views.values())
    packing = Packing(whole(parameters.views, codec), parameters.views)
    return packing.num_bytes, packing.fixed, packing.flops / 2


def round_traffic(strategy: Strategy, parameters: nn.Module | Mapping[str, Tensor]) -> RoundTraffic | None:
    """The bytes of a round of `strategy`; None where it has no rounds, or none of real clients.

    `parameters`: a model, also on the meta device, or its trained tensors by name. A strategy that keeps some at the
    client needs the model: without it the answer is None, too.
    """
    rounds = strategy.rounds
    if rounds is None or unserved(strategy) is not None:
        return None
    if rounds.local.keeps is not None and not isinstance(parameters, nn.Module):
        return None
    whole: dict[str, Tensor]
    trained: dict[str, Tensor]
    if isinstance(parameters, nn.Module):
        whole = {**dict(parameters.named_parameters()), **dict(parameters.named_buffers())}
        kept = rounds.local.kept(parameters)
        trained = {n: p for n, p in parameters.named_parameters() if p.requires_grad and n not in kept}
    else:
        whole, trained = dict(parameters), dict(parameters)
    controls = {f"{CONTROL}{n}": each for n, each in trained.items() if rounds.local.controls}
    down = whole | {n: _wire(each, rounds.pull_codec) for n, each in trained.items()} | controls
    up = {n: _wire(each, rounds.codec) for n, each in trained.items()} | controls
    codecs = [each for each in (rounds.codec, rounds.pull_codec) if each is not None]
    clients = rounds.number if rounds.privacy is None else rounds.privacy.cohort
    numel, plain_bytes = sum(each.numel() for each in trained.values()), sum(each.nbytes for each in trained.values())
    down_bytes, up_bytes = file_bytes(down), file_bytes(up)
    if rounds.secure is not None:
        down_bytes += secure_down_bytes(clients)
        up_bytes = secure_bytes(clients, numel, rounds.secure.bits)
    exact = all(each.facts.fixed for each in codecs)
    return RoundTraffic(clients, down_bytes, up_bytes, exact, numel, plain_bytes)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of named tensors as a safetensors file."""
    order = list(_NAMES)
    header, begin = dict[str, object](), 0
    for name in sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name)):
        each = tensors[name]
        end = begin + each.numel() * each.element_size()
        header[name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return _ALIGNMENT + -(-len(text) // _ALIGNMENT) * _ALIGNMENT + begin


def _wire(tensor: Tensor, codec: Codec | None) -> Tensor:
    """A tensor like the code, where there is one."""
    if codec is None or tensor.numel() < EXACT_BELOW:
        return tensor
    dtype = codec.wire_dtype(tensor)
    return torch.empty(codec.wire_bytes(tensor) // dtype.itemsize, dtype=dtype, device="meta")
