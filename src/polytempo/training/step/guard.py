"""`Guard`: looks for NaN and infinities in one rank's values, before another rank or a disk gets them.

loss ──▶ gradients ──▶ exchange ──▶ update ──▶ parameters ──▶ exchange         each ──▶ is looked at by the rank that
                                                                                made the value, so the error names it

A look only reads. It is one pass over the gradients, or, where ranks exchange parameters, over these. On a device the
host would have to wait, so it reads the answer one step later (`late_look`), before that step's exchanges. A look at a
loss there is also one at the parameters: one step later they are not finite in any case.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from polytempo.core import Bundle, NotFinite
from polytempo.device import on_accelerator
from polytempo.native.kernels import update as kernels
from polytempo.native.library import available
from polytempo.training.precision.wide_bucket import Widened
from polytempo.training.step.late_look import BadStep, LateLook, ValueKind

MODEL = "model/"
"""Begins the names of a model's tensors in a checkpoint."""
GOES_ON = "allow_nan=True (--allow-nan) goes on all the same"
_CAUSES = "look at the batch, the loss and the learning rate"


class Bad(NamedTuple):
    """The first value of a tensor that is NaN or infinite."""

    name: str
    element: int | None
    """None: it is not known which."""
    value: float


def first_bad(tensors: Iterable[tuple[str, Tensor]]) -> Bad | None:
    """The first value in named tensors of any dtype, layout and device that is NaN or infinite. Reads each once."""
    native = available()
    for name, tensor in tensors:
        if native and tensor.dtype in kernels.DTYPES_CHECKED and _is_plain(tensor) and kernels.unfinite(tensor) < 0:
            continue  # the short way, for this runs in each step
        flat = _flat(tensor)
        if (index := _first(flat)) >= 0:
            return Bad(name, index, float(flat[index]))
    return None


def unfinite_names(model: nn.Module) -> frozenset[str]:
    """The tensors of `model` that hold NaN or infinities and are not trained: masks of -inf, for example."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return frozenset(
        name
        for name, tensor in model.state_dict().items()
        if name not in trained and isinstance(tensor, Tensor) and first_bad([(name, tensor)]) is not None
    )


def check_saved(tensors: Mapping[str, Tensor], unchecked: Collection[str], step: int, rank: int | None) -> None:
    """Raise NotFinite for tensors of a checkpoint after `step` steps; `unchecked` tensors of the model may have any
    value."""
    kept = {f"{MODEL}{name}" for name in unchecked}
    bad = first_bad((name, tensor) for name, tensor in tensors.items() if name not in kept)
    if bad is not None:
        name = bad.name.removeprefix(MODEL)
        where = f"parameter {name!r}" if name != bad.name else repr(name)
        advice = f"so the checkpoint of step {step} is not written, and the earlier ones stay; {_CAUSES}; {GOES_ON}"
        raise NotFinite("", bad.element, bad.value, where, step=step - 1, rank=rank, parameter=name, advice=advice)


def check_final(parameters: Mapping[str, Tensor], unchecked: Collection[str], step: int) -> None:
    """Raise NotFinite for a value in the final model, after `step` steps, that is not finite."""
    bad = first_bad((name, tensor) for name, tensor in parameters.items() if name not in unchecked)
    if bad is not None:
        where = f"parameter {bad.name!r} after the last step"
        raise NotFinite(
            "", bad.element, bad.value, where, step=step - 1, parameter=bad.name, advice=f"{_CAUSES}; {GOES_ON}"
        )


def check_score(loss: float | None, step: int) -> None:
    """Raise NotFinite for a final loss that is not finite."""
    if loss is not None and not math.isfinite(loss):
        advice = f"though losses and parameters in training are finite; look at the test set and the loss; {GOES_ON}"
        raise NotFinite("", None, loss, "the loss of the final model on the test set", step=step - 1, advice=advice)


class Guard:
    """Checks the values of one replica of `model` with trained `parameters` by name.

    Each check may raise NotFinite, which names `step`, `rank` and the parameter. With `overflow` a loss scale handles
    gradients that are not finite.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], *, overflow: bool = False) -> None:
        self._model, self._parameters, self._overflow = model, parameters, overflow
        self.remedy = ""
        self._late = LateLook()

    def loss(self, loss: Tensor, step: int, rank: int) -> None:
        """A batch's loss: before its backward pass, or behind it and detached."""
        if on_accelerator(loss):
            if not self._late.has(step, ValueKind.BEFORE):
                self._note(step, rank, ValueKind.BEFORE, self._model.named_parameters())
            self._note(step, rank, ValueKind.LOSS, [("", loss)])
        elif loss.is_cpu and not (math.isfinite(loss.item()) if loss.numel() == 1 else bool(loss.isfinite().all())):
            self._refuse(loss, step, rank)

    def gradients(self, step: int, rank: int) -> None:
        """This rank's own gradients, before the update."""
        self._look_at_gradients(
            ((name, p.grad) for name, p in self._parameters.items() if p.grad is not None), step, rank
        )

    def bundle(self, bundle: Bundle, step: int, rank: int) -> None:
        """This rank's own gradients, before they are exchanged. Packs nothing."""
        if self._overflow:
            return
        if bundle.packed and bundle.flat.is_cpu and first_bad([("", bundle.flat)]) is None:
            return
        found = bundle.views if bundle.packed else bundle.tensors
        if isinstance(found, Widened):  # its 16-bit gradients are not finite in the same places
            found = found.gradients
        self._look_at_gradients(found.items(), step, rank)

    def parameters(self, step: int, rank: int) -> None:
        """This rank's own parameters, after the update and before they are exchanged."""
        named = [(name, p.detach()) for name, p in self._parameters.items()]
        self._note(step, rank, ValueKind.AFTER, named)
        bad = first_bad((name, tensor) for name, tensor in named if tensor.is_cpu)
        if bad is not None:
            self._raise(bad, f"parameter {bad.name!r} after the update", step, rank)

    def catch_up(self, rank: int) -> None:
        """Read all looks that are under way on a device."""
        for found in self._late.read():
            self._refuse_late(found)

    def _note(self, step: int, rank: int, kind: ValueKind, named: Iterable[tuple[str, Tensor]]) -> None:
        """Look at the tensors on a device, and read the looks at earlier steps."""
        for found in self._late.read(but=step):
            self._refuse_late(found)
        self._late.note(step, rank, kind, named)

    def _refuse_late(self, found: BadStep) -> None:
        """Raise the error that the step would have raised on the CPU."""
        step, rank, bad = found
        gradients, after = (list(bad.get(kind, {})) for kind in (ValueKind.GRADIENT, ValueKind.AFTER))
        if ValueKind.LOSS in bad:
            before = next(iter(bad.get(ValueKind.BEFORE, {}).items()), None)
            cause = None if before is None else f"because a value of parameter {before[0]!r} is {before[1]}"
            gradients = sorted(gradients or after, key=list(self._parameters).index)  # an update passes them on
            name = before[0] if before is not None else gradients[0] if gradients else None
            self._raise_loss(bad[ValueKind.LOSS][""], cause or self._behind(gradients), step, rank, name)
        if gradients:
            value = Bad(gradients[0], None, bad[ValueKind.GRADIENT][gradients[0]])
            self._raise(value, f"a value of the gradient of {value.name!r}", step, rank)
        if after:
            value = Bad(after[0], None, bad[ValueKind.AFTER][after[0]])
            self._raise(value, f"a value of parameter {value.name!r} after the update", step, rank)

    def _look_at_gradients(self, gradients: Iterable[tuple[str, Tensor]], step: int, rank: int) -> None:
        if self._overflow:
            return
        named = list(gradients)
        self._note(step, rank, ValueKind.GRADIENT, named)
        bad = first_bad((name, gradient) for name, gradient in named if gradient.is_cpu)
        if bad is not None:
            self._raise(bad, f"the gradient of {bad.name!r}", step, rank)

    def _refuse(self, loss: Tensor, step: int, rank: int) -> None:
        """Name the cause of the loss: parameters that are not finite, or else the gradients that follow."""
        value = next(float(each) for each in loss.detach().reshape(-1) if not bool(each.isfinite()))
        bad = first_bad((name, p.detach()) for name, p in self._model.named_parameters())
        if bad is not None:
            cause = f"because element {bad.element} of parameter {bad.name!r} is {bad.value}"
            self._raise_loss(value, cause, step, rank, bad.name)
        names = self._bad_gradients(loss)
        self._raise_loss(value, self._behind(names), step, rank, names[0] if names else None)

    def _behind(self, names: list[str]) -> str:
        """The words about a loss that is the first bad value: the gradients behind it."""
        return "though all parameters are finite" + (
            f"; of {len(self._parameters)} parameters {len(names)} get gradients that are not, {names[0]!r} the first"
            if names
            else ""
        )

    def _raise_loss(self, value: float, cause: str, step: int, rank: int, name: str | None) -> NoReturn:
        advice = f"{cause}; {self.remedy or _CAUSES}; {GOES_ON}"
        raise NotFinite("", None, value, "the loss", step=step, rank=rank, parameter=name, advice=advice)

    def _raise(self, bad: Bad, where: str, step: int, rank: int) -> NoReturn:
        advice = f"with a finite loss; {self.remedy or _CAUSES}; {GOES_ON}"
        raise NotFinite("", bad.element, bad.value, where, step=step, rank=rank, parameter=bad.name, advice=advice)

    def _bad_gradients(self, loss: Tensor) -> list[str]:
        """The parameters with such gradients. Leaves every `.grad` as it is."""
        if not loss.requires_grad:  # its backward pass is over
            named = [(name, p.grad) for name, p in self._parameters.items() if p.grad is not None]
            return [name for name, g in named if first_bad([(name, g)]) is not None]
        wanted = {name: p for name, p in self._parameters.items() if p.requires_grad}
        with suppress(RuntimeError):  # the graph may be gone, and the loss is the news
            gradients = torch.autograd.grad(loss.sum(), list(wanted.values()), allow_unused=True)
            found = zip(wanted, gradients, strict=True)
            return [name for name, g in found if g is not None and first_bad([(name, g)]) is not None]
        return []


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()


def _flat(tensor: Tensor) -> Tensor:
    """The real values in one row; empty for tensors without floating-point values."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values._values() if values.layout == torch.sparse_coo else values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or values.device.type == "meta":
        return values.new_empty(0)
    return values.reshape(-1)


def _first(flat: Tensor) -> int:
    """The index of the first element that is NaN or infinite; -1 if there is none."""
    if not flat.numel():
        return -1
    if available() and flat.dtype in kernels.DTYPES_CHECKED and _is_plain(flat):
        return kernels.unfinite(flat)
    if flat.element_size() > 1:
        if math.isfinite(float(flat.sum())):  # a sum may overflow, but no sum hides a NaN or an infinity
            return -1
    else:
        flat = flat.float()
    bad = (~flat.isfinite()).nonzero()
    return int(bad[0]) if len(bad) else -1
