"""`DistributedOptimizer` for Keras: an optimizer with gradients of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from polytempo.horovod.keras.library import keras
from polytempo.horovod.torch.collectives import Average, ReductionOp, Sum, encoded_allreduce_async
from polytempo.horovod.torch.compression import AnyCompression, CodecCompression, Compression
from polytempo.horovod.torch.handles import synchronize
from polytempo.horovod.torch.operations import grouped_allreduce
from polytempo.horovod.torch.process_state import ProcessSet, global_process_set


class _GradientExchange:
    """The gradients of one optimizer: summed over passes, then reduced over ranks as one."""

    def __init__(
        self,
        name: str,
        compression: AnyCompression,
        op: ReductionOp,
        predivide: float,
        passes: int,
        divisor: int,
        process_set: ProcessSet,
    ) -> None:
        self.name, self.op, self.process_set = name, op, process_set
        self.factors = (1.0 / predivide, predivide / divisor)
        self.compression = compression
        self.codec = compression.lasting() if isinstance(compression, CodecCompression) else None
        self.passes, self._count = passes, 0
        self._sums: list[Tensor | None] = []

    def add(self, grads: Sequence[Tensor | None]) -> bool:
        """Add the gradients of a pass. Returns True with the last pass of a step."""
        if not self._count:
            self._sums = list(grads) if self.passes == 1 else [g if g is None else g.detach().clone() for g in grads]
        else:
            self._sums = [_sum(before, grad) for before, grad in zip(self._sums, grads, strict=True)]
        self._count = (self._count + 1) % self.passes
        return self._count == 0

    def reduced(self) -> list[Tensor | None]:
        """The gradients of all ranks, in new tensors. A variable without a gradient has none on all ranks."""
        given, self._sums = self._sums, []
        mine = [grad.detach() for grad in given if grad is not None]
        if not mine:
            return given
        if self.codec is None:
            found = grouped_allreduce(
                mine, None, self.name, self.compression, self.op, *self.factors, process_set=self.process_set
            )
        else:
            options = (self.op, self.factors, self.process_set, self.codec)
            found = synchronize(encoded_allreduce_async(mine, f"encoded.{self.name}", *options))
        answers = iter(found)
        return [None if grad is None else next(answers) for grad in given]


def _sum(before: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if before is None or grad is None:
        return before if grad is None else grad.detach().clone()
    return before.add_(grad.detach())


class _ReducedGradients:
    """A base before an optimizer's own class: `apply`, which all ways to update variables lead to."""

    _exchange: _GradientExchange

    def apply(self, grads: Iterable[Tensor | None], trainable_variables: Any = None) -> None:
        if self._exchange.add(list(grads)):
            super().apply(self._exchange.reduced(), trainable_variables)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A Keras optimizer with gradients of all ranks: `apply` and `apply_gradients` first average them, as one exchange.

    The answer is of a subclass of the optimizer's own class, with its name, and shares its variables, so a saved model
    loads without this library. Clipping, weight decay and the accumulation of Keras see averaged gradients. With
    `backward_passes_per_step=n` only every n-th call updates variables, by the sum of n gradients, or their mean
    (`average_aggregated_gradients`). With Average a gradient is multiplied by 1/`gradient_predivide_factor` before the
    sum and by the factor after it. `compression`: a cast, or a codec, which sends omitted parts later. `name`: the name
    of the exchange, the same on all ranks; "Distributed" and the class by default.

    `device_dense`, `device_sparse`, `sparse_as_dense`, `num_groups` and `groups` have no effect: tensors stay on their
    device, Keras computes dense gradients on torch, and all gradients are one group.

    Errors: ValueError for operations other than Average and Sum, and for an optimizer that is distributed already.
    """
    chosen = ReductionOp(op)
    if chosen not in (Average, Sum):
        raise ValueError(f"op={chosen.name} is not for gradients of Keras; use Average or Sum")
    if gradient_predivide_factor != 1.0 and chosen is not Average:
        raise ValueError("gradient_predivide_factor is for op=Average alone")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be at least 1")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer must be one of keras.optimizers, and is {optimizer!r}")
    if isinstance(optimizer, _ReducedGradients):
        raise ValueError("this optimizer is distributed already; give DistributedOptimizer the plain one")
    own = type(optimizer)
    made: Any = type(own.__name__, (_ReducedGradients, own), {"__module__": own.__module__})
    distributed = object.__new__(made)
    divisor = backward_passes_per_step if average_aggregated_gradients else 1
    exchange = _GradientExchange(
        name or f"Distributed{own.__name__}",
        compression,
        chosen,
        gradient_predivide_factor,
        backward_passes_per_step,
        divisor,
        process_set,
    )
    distributed.__dict__.update(optimizer.__dict__, _exchange=exchange)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: AnyCompression = Compression.none,
) -> Any:
    """A saved model (a file `.keras`) with its optimizer distributed; the optimizer's state is the saved one.

    `custom_optimizers`: optimizer classes of your own, which Keras looks up by name, as it does `custom_objects`.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
