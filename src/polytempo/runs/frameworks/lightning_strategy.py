"""`lightning`: a strategy of ours as the `strategy` of Lightning's `Trainer`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Unpack

from torch.utils.data import DataLoader, DistributedSampler

from polytempo.core import Strategy
from polytempo.engines.join.init import backend_name
from polytempo.runs.frameworks.prepared_loop import LoopKeywords, PreparedLoop
from polytempo.training.own_loop.shard import shard

_KEY = "polytempo"
"""The place of the ranks' states in a checkpoint of Lightning."""


def lightning(
    strategy: Strategy | str, *, process_group_backend: str | None = None, **options: Unpack[LoopKeywords]
) -> Any:
    """A `Strategy` of Lightning that trains by `strategy`; a `DDPStrategy` otherwise, launchers included.

        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=pt.lightning("local_sgd(period=8)"))
        trainer.fit(module, loader)

    The parameters are `pt.attach`'s in a loop over `pt.shard(loader)`, bit for bit: with `accumulate_grad_batches`,
    `gradient_clip_val`, `precision` and schedules. A training `DataLoader` is dealt by `pt.shard`, so each sample is
    used once an epoch, and counts once where the last batch is uneven; loaders with a sampler of their own, and
    streams, stay as Lightning deals them. Validation, and each checkpoint's `state_dict`, have the ranks' common
    model; after `fit` the module is that model. A checkpoint holds each rank's state, too: on as many ranks `fit` goes
    on from it to the same bits, in the middle of an epoch as well.

    `process_group_backend`: by default shared memory ("polytempo") for CPUs of one host, else gloo, and NCCL for CUDA.
    Other options: as of `pt.attach`.

    Errors: Incompatible (PT2701 to PT2706) for parameter servers, Hogwild!, manual optimization, several optimizers,
    clipping by value under `shared_memory`, and a checkpoint of another number of ranks that differ.

    Cost: of a checkpoint, each rank's parameters and optimizer state once on rank 0, where ranks may differ.
    """
    return _strategy_class()(PreparedLoop("Lightning", strategy, **options), process_group_backend)


@cache
def _strategy_class() -> Any:
    base: Any = import_module("lightning.pytorch.strategies").DDPStrategy
    return type("PolytempoStrategy", (_StrategicDDP, base), {"__module__": __name__})


class _StrategicDDP:
    """`DDPStrategy` with a strategy of ours in the place of DistributedDataParallel."""

    strategy_name = "polytempo"
    num_nodes: int
    optimizers: list[Any]
    lightning_module: Any
    precision_plugin: Any
    _process_group_backend: str | None

    def __init__(self, loop: PreparedLoop, backend: str | None) -> None:
        super().__init__(process_group_backend=backend)  # type: ignore[call-arg]
        self.loop = loop

    # ------------------------------------------------------------------ the beginning and the end

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or backend_name(one_host=self.num_nodes == 1)

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        """Attach the strategy, once the model and its optimizer are where they compute."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn.value == "fit":
            self._attach(self.lightning_module, self.precision_plugin)

    def _attach(self, module: Any, precision: Any) -> None:
        if not module.automatic_optimization:
            self.loop.refuse("manual optimization")
        if len(self.optimizers) != 1:
            self.loop.refuse("several optimizers")
        handle = self.loop.attach(module, self.optimizers[0], getattr(precision, "scaler", None))
        if self.loop.clips_itself():
            precision.clip_grad_by_norm = lambda _, clip_val: handle.clip_grad_norm_(clip_val)
            precision.clip_grad_by_value = lambda *_: self.loop.refuse("other clipping")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Deal a training loader by `pt.shard`, where Lightning would repeat samples to fill up."""
        sampler = getattr(dataloader, "sampler", None)
        training = self.lightning_module.trainer.training
        if training and isinstance(dataloader, DataLoader) and type(sampler) is DistributedSampler:
            return shard(dataloader, seed=sampler.seed)
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def on_train_end(self) -> None:
        """Leave the ranks' common model in the module."""
        super().on_train_end()  # type: ignore[misc]
        self.loop.settle()

    def teardown(self) -> None:
        """Take the hooks off, also after an error."""
        self.loop.drop()
        super().teardown()  # type: ignore[misc]

    # ------------------------------------------------------------------ steps and scores

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the batch, because Lightning calls a method of the module, and not the module."""
        if self.loop.handle is not None:
            self.loop.handle.begin_inputs(*args)
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def block_backward_sync(self) -> Any:
        """Accumulate gradients inside."""
        return self.loop.no_sync()

    def on_validation_start(self) -> None:
        """Lend the ranks' common model."""
        self.loop.lend()
        super().on_validation_start()  # type: ignore[misc]

    def on_validation_end(self) -> None:
        """Put this rank's model back."""
        super().on_validation_end()  # type: ignore[misc]
        self.loop.give_back()

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The ranks' common model."""
        with self.loop.common():
            found: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Put the ranks' states into a checkpoint of the training."""
        if self.loop.handle is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = self.loop.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Go on from the ranks' states. A checkpoint of another strategy of Lightning has none."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if _KEY in checkpoint:
            self.loop.load_state_dict(checkpoint[_KEY])
