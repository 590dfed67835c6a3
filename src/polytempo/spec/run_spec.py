"""`RunSpec`: a run as a value. Defaults that come from the job are worked out here, once, and nowhere else.

pt.run(job, strategy, workers, …) ──▶ RunSpec ──▶ the programs of its processes, in either world
                                        │ ▲
                              to_json() ▼ │ from_json()      for another process, or another host
                                        JSON
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from polytempo.core import Promise, Strategy, is_idle
from polytempo.core.calls.refusals import refuse
from polytempo.data.plan import slices
from polytempo.spec.batch_growth import Geometric, NormTest
from polytempo.spec.callbacks.reading import unnamed
from polytempo.spec.job import Job, check_job
from polytempo.spec.precision import Precision
from polytempo.spec.rates.schedules import RunLength, for_run
from polytempo.spec.run_options import RunOptions
from polytempo.spec.text.catalogue import parse_strategy
from polytempo.spec.topology import Topology, num_added

FORMAT: Literal["polytempo-run-spec"] = "polytempo-run-spec"
VERSION: Literal[1] = 1
_UNTIL_EPOCHS = 10
"""A run that ends when a measure is reached gives up after so many times the job's epochs."""
_RANKS = 2
_NUMBERS = ("name", "lr", "batch_size", "epochs")
"""Values of a job that a program may change after it has found the job by name: they travel with the run."""
_FUNCTIONS = ("model", "data", "loss", "optimizer", "correct", "predictions", "schedule", "weight")


@dataclass(frozen=True)
class RunSpec:
    """A job, a strategy, how many workers, and the options. Make it by `RunSpec.of`.

    `options` are as they were given: a None there was left to the job, and its value stands here.
    """

    job: Job
    strategy: Strategy
    workers: int
    options: RunOptions
    lr: float
    """The learning rate that the job's optimizer is made with."""
    batch_size: int
    """Samples per worker and step, or of all that hold one model; rounded up where the options give a global batch."""
    epochs: float | None
    """The run ends after so many; None: its `steps` alone say when."""

    @classmethod
    def of(cls, job: Job, strategy: Strategy, workers: int, options: RunOptions) -> RunSpec:
        """The run of `job` by `strategy` with so many `workers`."""
        job = _scheduled(check_job(job), options)
        _check_features(job, strategy, workers, options)
        if options.profile is not None:
            options.profile.check(workers, options.steps)
        if strategy.rounds is not None:  # an item of the data is a client
            options = replace(options, batch_size=None, global_batch_size=strategy.slices)
        if strategy.before is not None:  # a first run that cannot be is refused before anything begins
            cls.of(job, strategy.before.strategy, workers, _of_first(options, strategy.before.steps))
        each = options.batch_size or job.batch_size
        if options.global_batch_size is not None:
            each = -(-options.global_batch_size // max(1, workers // strategy.holders))
        if options.accumulate > each:
            refuse({"accumulation", "few samples"}, accumulate=options.accumulate, samples=each)
        by_steps = options.epochs is None and options.steps is not None
        epochs = None if by_steps else options.epochs or job.epochs * (_UNTIL_EPOCHS if options.until else 1)
        return cls(
            job=_in_run(job, strategy, epochs, options),
            strategy=strategy,
            workers=workers,
            options=options,
            lr=options.lr or job.lr,
            batch_size=each,
            epochs=epochs,
        )

    @property
    def first(self) -> RunSpec | None:
        """The run that this one starts from, without a folder; None if it is alone. See `then`."""
        before = self.strategy.before
        if before is None:
            return None
        return RunSpec.of(self.job, before.strategy, self.workers, _of_first(self.options, before.steps))

    @property
    def seed(self) -> int:
        """The seed of all random numbers of the run."""
        return self.options.seed

    def passes(self, samples: int) -> list[int]:
        """The samples of each pass over a worker's batch: of its micro-batches, where gradients are accumulated."""
        return [stop - start for start, stop in slices(samples, min(samples, self.options.accumulate))]

    @property
    def replicas(self) -> int:
        """Number of models, each of one worker or of several that hold it together."""
        return self.workers // self.strategy.holders

    @property
    def global_batch_size(self) -> int:
        """Samples of a step of all workers together, at the run's first number of workers."""
        return self.options.global_batch_size or self.workers * self.batch_size

    def topology(self, hosts: Sequence[int] = ()) -> Topology:
        """The run's nodes. `hosts`: the host of each; empty: one host."""
        service = self.strategy.server
        if service is None:
            return Topology.collective(self.workers, hosts)
        added = num_added(service.shards, self.options.reshape)
        return Topology.served(
            self.workers, service.shards, service.replicas, added, hosts, stages=self.strategy.stages
        )

    def __str__(self) -> str:
        """The text in progress: "digits, local_sgd(period=8), 4 workers"."""
        return f"{self.job.name}, {self.strategy}, {self.workers} workers"

    def to_json(self) -> str:
        """The run as text; `from_json` makes it in another process.

        Errors: ValueError for a job, or a strategy, that was made in a program, so that no other process can find it.
        """
        try:
            named = str(parse_strategy(str(self.strategy))) == str(self.strategy)
        except ValueError:
            named = False
        if not named:
            raise ValueError(
                f"strategy {self.strategy} cannot be made by its name, and the run's processes are to make it by "
                "its name; give one of pt.strategies, or run it with engine=pt.engines.local()"
            )
        if lacking := unnamed(self.options.callbacks):
            refuse({"unnamed callback"}, callbacks=", ".join(lacking))
        if self.job.origin is None:
            raise ValueError(
                f"job {self.job.name} is made of functions that this process alone has, and the run's processes are to "
                'find it by name; write the job into a file, and give pt.jobs.find("path/to/file.py:job"), or run it '
                "with engine=pt.engines.local()"
            )
        numbers = {name: getattr(self.job, name) for name in _NUMBERS}
        job = _JobText(origin=self.job.origin, functions=functions_of(self.job), **numbers)
        options = self.options.as_plain()
        text = _SpecText(job, str(self.strategy), self.workers, options, self.lr, self.batch_size, self.epochs)
        return msgspec.json.encode(text).decode()

    @classmethod
    def from_json(cls, text: str, find_job: Callable[[str], Job]) -> RunSpec:
        """The run that `to_json` wrote. `find_job` knows the jobs' names, as `jobs.find` does.

        Errors: ValueError for another text, and where a name stands for another job here than there.
        """
        try:
            told = msgspec.json.decode(text, type=_SpecText)
        except msgspec.DecodeError as error:
            raise ValueError(f"this is not a {FORMAT} of version {VERSION} ({error}): {text[:80]!r}") from None
        options = RunOptions(**told.options)
        strategy = replace(parse_strategy(told.strategy), before=None)  # the launcher has seen to that
        return cls(
            job=_in_run(_found(told.job, find_job, options), strategy, told.epochs, options),
            strategy=strategy,
            workers=told.workers,
            options=options,
            lr=told.lr,
            batch_size=told.batch_size,
            epochs=told.epochs,
        )


class _JobText(msgspec.Struct, forbid_unknown_fields=True):
    """A job by name, the numbers that a program may have changed, and where its functions are written."""

    origin: str
    name: str
    lr: int | float
    batch_size: int
    epochs: int | float
    functions: dict[str, str]


class _SpecText(msgspec.Struct, forbid_unknown_fields=True):
    """A `RunSpec` as JSON."""

    job: _JobText
    strategy: str
    workers: int
    options: dict[str, Any]
    lr: int | float
    batch_size: int
    epochs: int | float | None
    format: Literal["polytempo-run-spec"] = FORMAT
    version: Literal[1] = VERSION


def _of_first(options: RunOptions, steps: int) -> RunOptions:
    """The options of the first of two runs: to its last step, with a checkpoint there."""
    every = options.checkpoint_every or steps
    folder = options.out or Path()  # which one is known when it begins
    profile = options.profile if options.profile is not None and options.profile.first < steps else None
    options = replace(options, steps=steps, epochs=None, until={}, checkpoint_every=every, out=folder, ema=None)
    return replace(options, profile=profile)


def check_precision(precision: Precision, strategy: Strategy) -> None:
    """`Incompatible` where a model of 16-bit parameters cannot be trained by `strategy`."""
    refuse(strategy.features | _features_of(precision), strategy=strategy, precision=precision)


def _check_features(job: Job, strategy: Strategy, workers: int, options: RunOptions) -> None:
    """`Incompatible` if features of the strategy and of the options exclude each other."""
    growth, measured = options.batch_growth, options.looks_every is not None
    asked = {
        "elastic": options.elastic,
        "local scaling": options.scaling == "local",
        "global batch": options.global_batch_size is not None,
        "accumulation": options.accumulate > 1,
        "clipping": options.clip_norm is not None,
        "sums at a server": strategy.server is not None and strategy.server.rule.waits_for_several,
        "average": options.ema is not None,
        "reshape": bool(options.reshape),
        "restore": options.on_drift == "restore",
        "threads": options.inter_threads > 1,
        "device": options.device not in ("auto", "cpu"),
        "noise scale": measured,
        "one worker": measured and strategy.server is None and workers // strategy.groups < 2,
        "batch growth": bool(growth),
        "norm test": isinstance(growth, NormTest),
        "growth by steps": isinstance(growth, Geometric),
        "job schedule": job.schedule is not None,
        "weight": job.weight is not None,
        "no folder": options.out is None,
        "clients": options.clients is not None,
        "sampling": options.sampling is not None,
        "client test": options.client_test is not None,
        "no rounds": strategy.rounds is None,
        "no accountant": "noise" in strategy.features and find_spec("dp_accounting") is None,
        "batch size": options.batch_size is not None or options.global_batch_size is not None,
        "folder at a URL": ":" in str(options.out),
        "profile": options.profile is not None,
    }
    refuse(
        strategy.features
        | balance_features(strategy, options.balance)
        | _features_of(options.precision)
        | _needs_of(options)
        | {name for name, has in asked.items() if has},
        strategy=strategy,
        job=job.name,
        growth=growth,
        option="noise_scale" if options.noise_scale is not None else "batch_growth",
        **vars(options),
    )


def balance_features(strategy: Strategy, balance: Literal["equal", "speed"]) -> set[str]:
    """Names of features for `core.calls.refusals`; none for equal parts. `own steps`: no mean in each step."""
    if balance == "equal":
        return set()
    found = {"balance"}
    if strategy.server is None and strategy.one_copy is None:
        if is_idle(strategy.gradients, _RANKS) or not is_idle(strategy.parameters, _RANKS):
            found.add("own steps")
        if Promise.WEIGHS not in strategy.gradients.promises:
            found.add("counts alike")
    return found


def _needs_of(options: RunOptions) -> set[str]:
    """Features that the run's callbacks need."""
    return {need for each in options.callbacks for need in getattr(each, "needs", ())}


def _features_of(precision: Precision | None) -> frozenset[str]:
    if precision is None:
        return frozenset()
    scaled = {"loss scale"} if precision.loss_scale is not None else set()
    scaled |= {"quantised"} if precision.is_quantised else {"autocast"} if precision.is_autocast else set()
    return frozenset({"precision", *scaled, *({"dynamic loss scale"} if precision.is_dynamic else set())})


def _scheduled(job: Job, options: RunOptions) -> Job:
    """The job with the schedule of the options, if they have one."""
    return job if options.schedule is None else replace(job, schedule=options.schedule)


def _in_run(job: Job, strategy: Strategy, epochs: float | None, options: RunOptions) -> Job:
    """The job with its schedule for a run of that length. Rounds with clients are counted in steps alone. Steps of a
    batch that grows are fewer than the steps of a schedule, which follows the epochs."""
    length = RunLength(None if strategy.rounds is not None else epochs, options.steps)
    if options.batch_growth and options.steps is not None:
        length = RunLength(None, None)
    return job if job.schedule is None else replace(job, schedule=for_run(job.schedule, length))


def _found(told: _JobText, find_job: Callable[[str], Job], options: RunOptions) -> Job:
    """The job that is named, with its numbers."""
    found = _scheduled(find_job(told.origin), options)
    own = functions_of(found)
    for name in [*own, *(told.functions.keys() - own.keys())]:
        here, there = own.get(name, "none"), told.functions.get(name, "none")
        if there != here:
            raise ValueError(
                f"job {told.origin} has another {name} where the run was begun ({there}) than where it is found by "
                f"name ({here}); give that job a name of its own in a file"
            )
    return replace(found, **{name: getattr(told, name) for name in _NUMBERS})


def functions_of(job: Job) -> dict[str, str]:
    """The place of each function of a job: {"model": "polytempo.jobs.digits.model, line 18", …}."""
    metrics = {f"metric {name}": _written(metric) for name, metric in job.metrics.items()}
    return {name: _written(getattr(job, name)) for name in _FUNCTIONS} | metrics


def _written(function: object) -> str:
    function = getattr(function, "function", function)  # of `of_batch`
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name}, line {code.co_firstlineno}"
