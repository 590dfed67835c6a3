"""`pipeline`: a model that has its layers on several ranks, trained in a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from polytempo.core import Codec, Strategy
from polytempo.core.system.url_path import Place
from polytempo.partition.cutting import By
from polytempo.partition.schedules.action import Schedule
from polytempo.partition.wires import Wires
from polytempo.runs.own_loop.loop_link import LoopServerStart
from polytempo.runs.own_loop.served_pipeline import ServedPipeline
from polytempo.runs.own_loop.watching import Watching, watching
from polytempo.spec.text.catalogue import codec_of, strategy_from
from polytempo.spec.text.profiled_steps import ProfiledSteps
from polytempo.training.observe.callback_host import CallbackHost
from polytempo.training.pipeline.pipeline import Pipeline, strategy_of
from polytempo.training.pipeline.pipeline_stage import Loss
from polytempo.worlds import ProcessWorld, current

P = TypeVar("P", Pipeline, ServedPipeline)


def pipeline(
    model: nn.Module,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    loss: Loss,
    schedule: Schedule | Strategy | str,
    *,
    sample: Any,
    by: By | Sequence[str] = "operations",
    inner: Strategy | str | None = None,
    max_norm: float | None = None,
    activations: Codec | str | None = None,
    gradients: Codec | str | None = None,
    seed: int = 0,
    on_drift: Literal["stop", "ignore"] = "stop",
    out: Place | str | None = None,
    trackers: Sequence[object] | str = (),
    profile: ProfiledSteps | str | None = None,
    callbacks: Sequence[object] | str = (),
    world: ProcessWorld | None = None,
) -> Pipeline | ServedPipeline:
    """Cut `model` into the stages of `schedule`, and return this rank's stage.

        pt.init()
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        schedule = pt.strategies.one_f_one_b(stages=2, micro_batches=8)
        pipe = pt.pipeline(model, sgd, nn.functional.cross_entropy, schedule, sample=x)
        for x, y in loader:
            loss = pipe.step(x, y)

    `schedule` is a strategy with stages, or a schedule of `pt.partition.schedules`. Every rank makes the whole model,
    takes rank 0's parameters, and keeps its stage. Rank r is stage r mod K of replica r // K, unless
    `pt.init(mesh={"data": …, "stage": …})` says otherwise. Give all stages of a replica the same batches, and replicas
    different ones, as `pt.shard` deals them after that `pt.init`; gradients of replicas go by `inner` (`sync_sgd()`).

    With an `inner` strategy `split(rules, parts=2)`, also inside of a strategy with stages, two ranks hold each stage,
    and its layers are split between them (`pt.split`): a mesh of data, stages and parts of layers.

    With an `inner` that has a parameter server (`downpour()`, …) each stage has its own, which rank 0 starts beside
    itself; rank r is stage r // D of replica r mod D, of D replicas. `pt.shard(loader)` deals batches by tickets, the
    same to all stages of a replica; see `ServedPipeline`.

    `sample` holds the model's arguments, a tensor or a tuple; `by` is the way of cutting (see `partition.cut`).
    `max_norm` clips by the whole model's gradient's norm, under schedules that wait. Gradients of tied weights are
    summed. `activations` and `gradients` are codecs (`pt.compression`), also as text such as "int8", for tensors from
    stage to stage, and for their gradients back (`partition.wires`); None: as they are.

    `on_drift`: replicas of a stage that must hold equal parameters compare hashes of them (`training.drift_watch`), and
    raise `Drifted` where these differ; "ignore" compares nothing. `pipe.state_dict()` is the whole model.

    `out`, `trackers`, `profile`, `callbacks`: as in `attach`. The rank that gets the loss from `step` writes the
    folder: `pipe.log(loss=loss)`. Rank 0 calls the callbacks, all stages follow after the same step: `pipe.stopped`,
    `pipe.asked()`; `pipe.evaluated(values)` gives them the loop's scores. `pipe.detach()` ends all of it.

    Errors: ValueError where the ranks are not a multiple of the stages, a late schedule shares weights between stages,
    or a codec has a memory or wires of varying length; `Mismatch` where ranks disagree.
    """
    _check_drift(on_drift)
    inner = None if inner is None else strategy_from(inner)
    whole, world = strategy_of(schedule, inner, Wires(codec_of(activations), codec_of(gradients))), world or current()
    shown = watching(whole, out, trackers, callbacks, profile, features={"pipeline"})
    if whole.server is not None:
        given = model, optimizer, loss, whole, inner or whole, sample, by, max_norm, seed
        return _shown(
            ServedPipeline(world, *given, LoopServerStart(world), shown.callbacks), world, model, whole, shown
        )
    made = Pipeline(world, model, optimizer, loss, whole, sample, by, max_norm, seed, shown.callbacks)
    made.watch(on_drift)
    return _shown(made, world, model, whole, shown)


def _check_drift(on_drift: str) -> None:
    if on_drift not in ("stop", "ignore"):
        raise ValueError(
            f"on_drift={on_drift!r}: messages under way in a replica of a stage that has drifted could not be "
            'restored; give on_drift="stop" or "ignore"'
        )


def _shown(made: P, world: ProcessWorld, model: nn.Module, strategy: Strategy, shown: Watching) -> P:
    here = ref(made)
    shown.begin(made, world, model, strategy, writes=made.writes, step=lambda: getattr(here(), "steps", 0))
    if shown.callbacks:
        made.begin_callbacks(CallbackHost(shown.callbacks, shown.folder))
    return made
