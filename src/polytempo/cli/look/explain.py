"""`polytempo explain`: the numbers of `pt.explain` as lines to read, or as JSON; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polytempo.cli.look.bucket_round import bucket_lines, bucket_round
from polytempo.cli.look.device_ways import as_data as device_ways_as_data
from polytempo.cli.look.device_ways import device_lines, device_ways
from polytempo.cli.look.look_options import ExplainOptions
from polytempo.cli.look.secure_lines import cost_of, secure_lines
from polytempo.cli.options.measured_hosts import say_beyond_measured
from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, size
from polytempo.cli.options.values import count
from polytempo.cluster import Cluster
from polytempo.core import Strategy
from polytempo.core.cost import Reason
from polytempo.partition.hybrid.divided_names import DividedNames
from polytempo.partition.tensor.way import SplitLayers
from polytempo.partition.wires import AS_THEY_ARE, Wires
from polytempo.planner.by_speed import parts_by_speed, refusal_by_speed
from polytempo.planner.run_price import Pricer
from polytempo.planner.search_space import PlannedRun
from polytempo.runs.simulated.asked_device import here, on_asked_device, on_suited_device
from polytempo.runs.simulated.simulate import simulate
from polytempo.runs.simulated.simulation_checks import needs_values
from polytempo.spec.explanation import Explanation, Planned, RoundTraffic, Traffic
from polytempo.spec.explanation import explain as explained
from polytempo.spec.job import Job
from polytempo.spec.job_calls import model_of
from polytempo.spec.run_options import RunOptions
from polytempo.spec.text.catalogue import parse_cluster, parse_strategy
from polytempo.training.pipeline.pipeline_stage import schedule_of

_INPUTS, _OUTPUTS = 784, 10
_STEPS = 16
_SLOTS = {
    "gradients": "gradients, before the optimizer's step",
    "parameters": "parameters, after the optimizer's step",
}
_BECAUSE: dict[Reason, str] = {
    "asked": "the strategy asks for that route",
    "sum": "the wires are numbers, and their sum decodes to the sum of the tensors",
    "stripes": "codes cannot be added, but the owner of a stripe can decode, add and encode again",
    "merge": "the merge compares the tensors of all ranks",
    "sparse": "wires of different ranks hold different entries, so a sum would be denser than each",
    "memory": "the codec remembers more than a residual, which cannot be cut into stripes",
    "wires": "every rank decodes every other's wire, once, and nothing is encoded twice",
}


class Section(NamedTuple):
    """A heading, and lines below it."""

    title: str
    lines: list[str]


def explain(asked: ExplainOptions) -> None:
    """Print the traffic of each step of the strategy, for a job's model or a perceptron of so many parameters."""
    name = asked.job or "digits"
    made = parse_strategy(asked.strategy)
    with torch.device("meta"):
        model = model_of(found_job(name)) if asked.parameters is None else perceptron(count(asked.parameters))
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"--job {name}: its model has no parameters that are trained, so nothing is sent")
    found = explained(made, asked.workers, model)
    times = None
    if asked.cluster is not None:
        times = _step_times(made, asked.workers, name, asked.cluster, asked.device)
    bucket = bucket_round(made, model, asked.workers, asked.cluster) if asked.bucket else None
    ways, summed = device_ways(asked.device), cost_of(made, found)
    if asked.json:
        secure = {} if summed is None else {"secure": summed._asdict()}
        on_device = {} if ways is None else {"device": device_ways_as_data(ways, made, found)}
        show_json(
            as_data(made, found)
            | {"model": asked.parameters or name}
            | on_device
            | secure
            | (bucket or {})
            | (times or {})
        )
        return
    model_name = f"a perceptron of {found.numel:,}" if asked.parameters else f"{name}: {found.numel:,}"
    who = "1 worker" if asked.workers == 1 else f"{asked.workers} workers"
    print(f"{made.name}, {who}")
    print(f"{model_name} parameters in {found.tensors} tensors, {size(found.parameter_bytes)}")
    last = [] if ways is None else [Section(f"on {ways.kind}", list(device_lines(ways, made, found)))]
    if bucket is not None:
        last.append(Section("a round in a bucket", list(bucket_lines(bucket["bucket"]))))
    if summed is not None:
        last.append(Section("secure sums", list(secure_lines(summed))))
    for section in [*sections(made, found), *last]:
        print(f"\n{section.title}")
        print(*(f"  {line}" for line in section.lines), sep="\n")
    if times is not None:
        took, share = 1e3 * times["step_s"], times["communication_share"]
        print(f"\na step on {times['cluster']}\n  {took:.3g} ms, {share:.0%} of them in communication")
        if times["by_speed"] is not None:
            print(f"  {_by_speed(times['by_speed'])}")


def _step_times(strategy: Strategy, workers: int, job: str, cluster: str, device: str) -> dict[str, Any]:
    """Times of a simulation of some steps without computing; with computing if the strategy needs it."""
    described, made = on_asked_device(parse_cluster(cluster), device), found_job(job)
    say_beyond_measured(cluster, workers)
    with notes_on_stderr():
        meta = not needs_values(strategy, RunOptions(steps=_STEPS))
        found = simulate(made, strategy, workers, described, steps=_STEPS, meta=meta, device=here(device))
    return {
        "cluster": on_suited_device(described, strategy).name,
        "step_s": found.seconds / found.steps,
        "communication_share": found.communication_share,
        "by_speed": _dealt_by_speed(strategy, workers, made, described),
    }


def _dealt_by_speed(strategy: Strategy, workers: int, job: Job, cluster: Cluster) -> dict[str, Any] | None:
    """A step with balance="speed", or the code of the refusal; None where hosts are equally fast."""
    run = PlannedRun(strategy.name, workers, job.batch_size, workers // strategy.holders, balance="speed")
    parts = parts_by_speed(run, cluster)
    if parts is None:
        return None
    if (refusal := refusal_by_speed(strategy)) is not None:
        return {"refused": refusal.code}
    return {"parts": parts, "step_s": Pricer(job, None, cluster).price(run).step_s}


def _by_speed(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f'hosts differ, and balance="speed" is refused ({found["refused"]})'
    parts = ", ".join(map(str, found["parts"]))
    return f'with balance="speed": {1e3 * found["step_s"]:.3g} ms; parts of a batch: {parts}'


def as_data(strategy: Strategy, found: Explanation) -> dict[str, Any]:
    """The numbers by name, for JSON: bytes, messages, rounds and operations of a step, and of each exchange."""
    exchanges = [
        {
            "of": planned.of,
            "by": planned.exchange.by,
            "codec": planned.exchange.codec,
            "tensors": planned.exchange.tensors,
            "steps": planned.exchange.steps._asdict(),
            "exact": planned.exchange.exact,
            **planned.traffic._asdict(),
        }
        for planned in found.exchanges
    ]
    model: dict[str, Any] = {"tensors": found.tensors, "parameters": found.numel, "bytes": found.parameter_bytes}
    if found.stages:
        model["stages"] = [each._asdict() for each in found.stages]
        model["between_stages"] = str(schedule_of(strategy).wires)
    if strategy.parted is not None:
        model["between_layers"] = str(_between_layers(strategy))
    if found.round is not None:
        model["round"] = found.round._asdict()
    costs = {"memory_bytes": found.memory_bytes, "mean": found.mean._asdict(), "exchanges": exchanges}
    return {"strategy": found.strategy, "workers": found.workers, **model, **costs}


def sections(strategy: Strategy, found: Explanation) -> Iterator[Section]:
    """The explanation in words."""
    if strategy.before is not None:
        first, steps = strategy.before
        yield Section(
            "two runs", [f"first {steps} steps of {first}, explained by a call of its own; below is the second run"]
        )
    if strategy.server is not None:
        yield Section("a parameter server", list(_server(strategy, found)))
    elif strategy.one_copy is not None:
        yield Section("one copy", ["the parameters exist once on a host, and all of its workers write to them"])
    if strategy.parted is not None:
        yield Section("layers in parts", list(_parts(strategy)))
    if found.stages:
        yield Section(f"{len(found.stages)} stages", list(_stages(strategy, found)))
    if found.round is not None:
        yield Section("a round with clients on machines of their own", list(_round(strategy, found, found.round)))
    for of, title in _SLOTS.items():
        lines = [line for planned in found.exchanges if planned.of == of for line in _exchange(planned, found)]
        if not lines and strategy.server is None:
            lines = ["nothing is sent" if found.workers > 1 else "nothing is sent by one worker alone"]
        if lines:
            yield Section(title, lines)
    if strategy.carries_optimizer:
        yield Section(
            "optimizer",
            ["tensors of its state, such as momentum, travel, too, each with as many bytes as its parameter"],
        )
    yield Section("a worker", [*_average(found.mean), f"remembers {size(found.memory_bytes)} from step to step"])


def _server(strategy: Strategy, found: Explanation) -> Iterator[str]:
    service = strategy.server
    assert service is not None
    shards = "1 shard" if service.shards == 1 else f"{service.shards} shards"
    copies = f", each with {service.replicas} further copies" if service.replicas else ""
    yield f"the parameters live in {shards}{copies}; each shard is sent, and sends, its part of these bytes"
    if not any(planned.exchange.server == "pull" for planned in found.exchanges):
        yield "a worker pulls the parameters before its first step only"
    if service.reassigns is not None:
        slices = service.numbers_per_batch - 1
        yield "workers tell each other how far they are, and hand over slices of their batches"
        yield f"a batch has {slices} slices; it pays from {3 * slices} samples on, or with a larger grain"
        return
    yield f"{'workers' if strategy.schedule is None else 'replicas of the model'} do not send to each other"


def _parts(strategy: Strategy) -> Iterator[str]:
    """Holders of the parts, the codecs between them, and the command that shows their bytes."""
    if (wires := _between_layers(strategy)) != AS_THEY_ARE:
        yield f"layers exchange {wires}"
    if strategy.holders > 1:
        yield f"each model's layers are on {strategy.holders} workers, which get the same samples"
        yield "the bytes that they send for layers depend on the batch: see `polytempo plan split JOB`"
    else:
        yield "some layers are divided over all workers, and the gradients of their weights are sent nowhere"
        yield "the bytes that workers send for them depend on the batch: see `polytempo plan layers JOB`"


def _between_layers(strategy: Strategy) -> Wires:
    parted = strategy.parted
    return parted.wires if isinstance(parted, SplitLayers | DividedNames) else AS_THEY_ARE


def _stages(strategy: Strategy, found: Explanation) -> Iterator[str]:
    """Delay and contents of each stage, and codecs between them."""
    for number, facts in enumerate(found.stages):
        late = "is not late" if not facts.delay else f"updates {facts.delay} update{'s' * (facts.delay > 1)} late"
        versions = f"{facts.versions} version{'s' * (facts.versions > 1)} of its parameters"
        yield f"stage {number} {late}; it holds up to {facts.held} micro-batches under way and {versions}"
    wires = schedule_of(strategy).wires
    encoded = "" if wires == AS_THEY_ARE else f", {wires}"
    yield f"activations and their gradients cross the cuts{encoded}; `polytempo cut JOB` says how many bytes"


def _round(strategy: Strategy, found: Explanation, traffic: RoundTraffic) -> Iterator[str]:
    """Bytes of `polytempo serve`; workers that play the clients have other bytes."""
    rounds, most = strategy.rounds, "" if traffic.exact else "at most "
    assert rounds is not None
    ways = (("down", traffic.down_bytes, rounds.pull_codec), ("up", traffic.up_bytes, rounds.codec))
    for way, num_bytes, codec in ways:
        coded = "" if codec is None else f", by {codec.facts.name}"
        all_of_them = f"{traffic.clients} clients: {most}{size(traffic.clients * num_bytes)}"
        yield f"{way}, a client: {most}{num_bytes:,} bytes{coded}; {all_of_them}"
    yield "below are the bytes of workers that play the clients of `polytempo train`"


def _exchange(planned: Planned, found: Explanation) -> Iterator[str]:
    """Bytes of one exchange, its route, and the reason for the route."""
    exchange, traffic = planned.exchange, planned.traffic
    sent = exchange.sent
    most = "" if exchange.exact else "at most "
    what = exchange.codec or "values as they are"
    which = f" ({exchange.tensors})" if exchange.tensors else ""
    yield f"{exchange.steps}{which}: {what}, by {exchange.by}"
    if exchange.server:
        plain = found.parameter_bytes
        each = sent.payload_bytes // found.workers
        yield f"  a {exchange.server} is {most}{size(each)}{_factor(plain, each) if exchange.codec else ''}"
        return
    yield (
        f"  the busiest worker sends {most}{size(sent.busiest_bytes)}; all send {most}{size(traffic.bytes)} in "
        f"{sent.messages:,} messages, {sent.rounds:,} after one another"
    )
    if sent.metadata_bytes:
        yield f"  {size(sent.metadata_bytes)} of these are agreements of codecs: lengths of wires, or scales"
    if exchange.reason:
        yield f"  because {_BECAUSE[exchange.reason]}"
    if exchange.codec:
        ring = 2 * (found.workers - 1) / found.workers * found.parameter_bytes
        yield f"  uncompressed, by a ring, {_factor(ring, sent.busiest_bytes).removeprefix('; uncompressed ')}"


def _factor(plain: float, num_bytes: float) -> str:
    return f"; uncompressed {size(plain)}, {plain / max(1, num_bytes):.3g} times as much"


def _average(mean: Traffic) -> Iterator[str]:
    if mean.bytes:
        yield f"sends {size(mean.busiest_bytes)} a step, if it is the busiest, averaged over a long run"
    if mean.flops:
        yield f"computes {mean.flops:,.0f} operations a step to encode, decode and merge"


# ---------------------------------------------------------------------- models


def perceptron(numel: int) -> nn.Sequential:
    """784 - h - h - 10 with about `numel` parameters."""
    least = _size(1)
    if numel < least:
        raise ValueError(f"--parameters {numel}: a perceptron of 784 inputs has at least {least}")
    ends = _INPUTS + _OUTPUTS + 2
    hidden = round((-ends + (ends**2 + 4 * (numel - _OUTPUTS)) ** 0.5) / 2)
    layers = [nn.Linear(_INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, _OUTPUTS)]
    return nn.Sequential(*layers)


def _size(hidden: int) -> int:
    return hidden * (_INPUTS + hidden + _OUTPUTS + 2) + _OUTPUTS
