"""`accelerate` and `transformers`: a strategy of ours in an `Accelerator`, and in a `Trainer` with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from polytempo.core import Strategy
from polytempo.runs.frameworks.prepared_loop import LoopKeywords, PreparedLoop
from polytempo.training.hooks.handle import Handle


def accelerate(accelerator: Any, strategy: Strategy | str, **options: Unpack[LoopKeywords]) -> Any:
    """Let `accelerator` train by `strategy` in place of DistributedDataParallel; returns the same object.

        pt.init()                                                         # before the Accelerator
        accelerator = pt.accelerate(Accelerator(cpu=True), "diloco(period=100)")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    The parameters are `pt.attach`'s in the same loop, bit for bit, with `accumulate`, `clip_grad_norm_` and a
    GradScaler. `prepare` attaches once it has seen the model and its optimizer, together or one after the other; the
    model gets no wrapper. Loaders are accelerate's: with `even_batches` it repeats samples where
    an epoch does not divide. `with accelerator.consensus():` lends the ranks' common model, to be scored; `save_state`,
    `save_model` and `get_state_dict` take that model, so all ranks call them. `save_state` writes each rank's state
    into `polytempo.safetensors` beside accelerate's files, and `load_state` on as many ranks goes on to the same bits.
    `accelerator.handle` is the handle of `pt.attach`. Options: as of `pt.attach`.

    Errors: Incompatible (PT2701 to PT2708) for parameter servers, Hogwild!, several optimizers, several models,
    clipping by value or by another norm under `shared_memory`, a checkpoint of another number of ranks that differ,
    and an Accelerator with DeepSpeed, FSDP or Megatron.
    """
    loop = PreparedLoop("accelerate", strategy, **options)
    return _adopt(accelerator, loop)


def transformers(trainer: Any, strategy: Strategy | str, **options: Unpack[LoopKeywords]) -> Any:
    """Let `trainer`, a `transformers.Trainer` or of a class below it, train by `strategy`; returns the same object.

        pt.init()                                                         # before the TrainingArguments
        trainer = pt.transformers(Trainer(model, TrainingArguments(use_cpu=True), …), "local_sgd(period=8)")
        trainer.train()

    It is `pt.accelerate` on the trainer's Accelerator: accumulation, clipping, warm-up and schedules are the
    Trainer's. `evaluate`, `predict` and saved models have the ranks' common model, and after `train` so has
    `trainer.model`. A checkpoint has each rank's state in `polytempo.safetensors`, and `resume_from_checkpoint` goes on
    from it. Errors: `accelerate`'s, and ValueError for a trainer that trains on one of several ranks.
    """
    loop = PreparedLoop("transformers", strategy, **options)
    _adopt(trainer.accelerator, loop)
    trainer.loop = loop
    trainer.__class__ = _mixed(type(trainer), _StrategicTrainer)
    return trainer


def _adopt(accelerator: Any, loop: PreparedLoop) -> Any:
    if str(accelerator.distributed_type.value) not in _KNOWN:
        loop.refuse("other parallelism")
    accelerator.loop = loop
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: loop.save(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: setattr(accelerator, "loaded_from", folder))
    accelerator.__class__ = _mixed(type(accelerator), _StrategicAccelerator)
    return accelerator


_KNOWN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")
"""Types of an Accelerator that would wrap a model in DistributedDataParallel, or leave it alone."""


def _mixed(base: type, mixin: type) -> type:
    """The class `base` with the methods of `mixin` before its own."""
    return base if issubclass(base, mixin) else type(base.__name__, (mixin, base), {"__module__": base.__module__})


class _StrategicAccelerator:
    """The methods of an Accelerator that a strategy changes."""

    loop: PreparedLoop
    loaded_from: str
    _models: list[nn.Module]
    _optimizers: list[Any]
    scaler: Any

    @property
    def handle(self) -> Handle | None:
        """The handle of `pt.attach`; None before `prepare`."""
        return self.loop.handle

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and attach the strategy once there are a model and its optimizer."""
        found = super().prepare(*args, **kwargs)  # type: ignore[misc]
        if self.loop.handle is None or any(isinstance(each, nn.Module | Optimizer) for each in args):
            self._attach()
        return found

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Prepare without a wrapper."""
        return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[misc]

    def _attach(self) -> None:
        optimizers = [each.optimizer for each in self._optimizers]
        if not optimizers:
            return
        if len(optimizers) > 1:
            self.loop.refuse("several optimizers")
        held = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
        trained = [model for model in self._models if any(id(p) in held for p in model.parameters())]
        if len(trained) > 1:
            self.loop.refuse("several models")
        attached = self.loop.handle
        if trained and (attached is None or attached.replica.optimizer is not optimizers[0]):
            self.loop.attach(trained[0], optimizers[0], self.scaler)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Accumulate gradients inside."""
        with self.loop.no_sync():
            yield

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Lend the ranks' common model to the block. All ranks call it."""
        with self.loop.common():
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip; under `shared_memory` by the handle, because `.grad` is this rank's own."""
        if self.loop.clips_itself(norm_type) and self.loop.handle is not None:
            return self.loop.handle.clip_grad_norm_(max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each value, where `.grad` is the gradient of the step."""
        if self.loop.clips_itself():
            self.loop.refuse("other clipping")
        super().clip_grad_value_(parameters, clip_value)  # type: ignore[misc]

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The tensors of the ranks' common model. All ranks call it."""
        with self.loop.common():
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load accelerate's state, and then this rank's own."""
        super().load_state(*args, **kwargs)  # type: ignore[misc]
        self.loop.load(self.loaded_from)

    def free_memory(self, *objects: Any) -> Any:
        """Forget the model, with the strategy on it."""
        self.loop.drop()
        return super().free_memory(*objects)  # type: ignore[misc]


class _StrategicTrainer:
    """The methods of a `transformers.Trainer` that a strategy changes."""

    loop: PreparedLoop
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make another Accelerator, as a search does, with the same strategy."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _adopt(self.accelerator, self.loop)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the ranks' common model."""
        try:
            found = super().train(*args, **kwargs)  # type: ignore[misc]
            self.loop.settle()
        finally:
            self.loop.drop()
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Score, or predict by, the ranks' common model."""
        with self.loop.common():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the ranks' common model. All ranks call it."""
        with self.loop.common():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        self.loop.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self.loop.load(checkpoint)
