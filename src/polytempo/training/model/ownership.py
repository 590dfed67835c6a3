"""`Ownership`: the attached optimizer alone moves the parameters of an attached model.

attach(model, a)     b.step() on one of the model's parameters     refused: no rank would hear of it
                     b.step() that calls a.step(), as a wrapper does    goes on, and so does the reverse
                     DDP(model)(x), and attach(DDP(model), a)      refused: gradients would be averaged twice
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from polytempo.training.hooks.weak_hook import WeakHook

_owned: WeakKeyDictionary[nn.Module, Ownership] = WeakKeyDictionary()


class Ownership:
    """The optimizer that a model is attached with, and the number of its steps. It keeps neither alive."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer, self._model = ref(optimizer), ref(model)
        self._stepping = False
        self._num_steps = 0
        self._steps_before: dict[int, int] = {}
        """Steps so far at the beginning of another optimizer's step."""
        if not _hooks:
            _hooks.extend([register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)])
        _owned[model] = self
        hook = WeakHook(self._called)
        self._watches = [module.register_forward_pre_hook(hook) for module in called_modules(model)]

    def end(self) -> None:
        """Let any optimizer move the model."""
        for watch in self._watches:
            watch.remove()
        model = self._model()
        if model is not None and _owned.get(model) is self:
            del _owned[model]

    def before(self, optimizer: Optimizer) -> None:
        """This optimizer begins a step."""
        if optimizer is self.optimizer():
            self._stepping = True
        else:
            self._steps_before[id(optimizer)] = self._num_steps

    def after(self, optimizer: Optimizer) -> None:
        """This optimizer has made a step."""
        if optimizer is self.optimizer():
            self._stepping = False
            self._num_steps += 1
        elif self._steps_before.pop(id(optimizer), None) == self._num_steps and not self._stepping:
            self._check(optimizer)

    def _called(self, module: nn.Module, *_: Any) -> None:
        wrapper: nn.Module | None = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and any(each is module for each in wrapper.modules()):
            raise RuntimeError(
                "an attached model is called by DistributedDataParallel, and both would average its gradients; call "
                "the model itself, or call detach() on its handle and train it with DistributedDataParallel alone"
            )

    def _check(self, optimizer: Optimizer) -> None:
        model, own = self._model(), self.optimizer()
        held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if model is None or not any(id(parameter) in held for parameter in model.parameters()):
            return
        with_what = "an optimizer that is gone" if own is None else f"another optimizer ({type(own).__name__})"
        raise RuntimeError(
            f"{type(optimizer).__name__} has moved parameters of a model that is attached with {with_what}, and other "
            "ranks do not hear of it; attach the optimizer that makes the steps, one for all parameters of the model "
            "(settings that differ go into parameter groups), or call detach() on the handle first"
        )


_hooks: list[Any] = []


def check_hooks(optimizer: Optimizer) -> None:
    """Raise TypeError where a step of `optimizer` calls no hooks, so that nothing would happen after it."""
    if not getattr(type(optimizer).step, "hooked", False) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{type(optimizer).__name__}.step() calls no hooks, because its __init__ does not call "
            "torch.optim.Optimizer's; attach the optimizer that it wraps, and calls the step() of"
        )


def check_bare(model: nn.Module) -> None:
    """Raise ValueError for a model that torch averages or shards over its ranks already, as a whole or in part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a second to load, and a sharded model has loaded it
    shards = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{where} is wrapped by DistributedDataParallel, and both would average its gradients; attach the "
                "bare model, or keep DistributedDataParallel and give it a hook: "
                "ddp.register_comm_hook(None, pt.interop.comm_hook(codec, model))"
            )
        if isinstance(module, shards):
            raise ValueError(
                f"{where} is sharded by FSDP, and attach would average shards of different parameters with each other; "
                'attach a whole model, or train with FSDP alone, after dist.init_process_group("polytempo")'
            )


def called_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are given batches: the model, or its parts where it is a mere list of them."""
    return list(model.children()) if isinstance(model, nn.ModuleList | nn.ModuleDict) else [model]


def _owners(optimizer: Optimizer) -> list[Ownership]:
    """The owners of this optimizer's model, or all if it has none."""
    owners = list(_owned.values())
    return [owner for owner in owners if owner.optimizer() is optimizer] or owners


def _before(optimizer: Optimizer, *_: Any) -> None:
    for owner in _owners(optimizer):
        owner.before(optimizer)


def _after(optimizer: Optimizer, *_: Any) -> None:
    for owner in _owners(optimizer):
        owner.after(optimizer)
