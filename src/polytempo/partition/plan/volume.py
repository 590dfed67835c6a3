"""The volumes of a model's layers: |W|, the numbers of its weights, and |D|, the numbers of its inputs.

    |W| = Σ over layers  inputs · outputs · kernel         |D| = B · Σ over layers  the layer's inputs of a sample

They are read off a forward pass on fake tensors, so any model that runs has them, and none is computed. Biases do not
count in |W|, as in the source; a worker sends them, too.

Source: F. Iandola et al., "FireCaffe", 2016, equations 1 and 2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._pytree import tree_leaves

from polytempo.device import kept_random_states
from polytempo.partition.cut import fake, fake_state
from polytempo.partition.hybrid.hybrid_model import divisible_features

Kind = Literal["convolution", "linear", "embedding", "attention", "other"]


@dataclass(frozen=True)
class LayerVolume:
    """One layer. Numbers of a sample are means over the samples that the model was traced with."""

    name: str
    kind: Kind
    weights: int
    """Numbers of weights, without biases. Weights shared with an earlier layer count there alone."""
    biases: int = 0
    inputs: float = 0.0
    """Numbers that the layer is given of one sample."""
    outputs: float = 0.0
    """Numbers that it makes of one sample."""
    products: float = 0.0
    """Multiplications of one sample, forward."""
    itemsize: int = 4
    """Bytes of a number of the weights."""
    input_itemsize: int = 4
    """Bytes of a number that the layer is given: 8 for an embedding's indices."""
    gradient: bool = True
    """True if its input needs a gradient: the model's own input does not."""
    features: int = 0
    """Outputs that model parallelism can divide; 0: it cannot divide this layer."""
    tied: bool = False
    """True if another layer has the same weights."""

    @property
    def flops(self) -> float:
        """Floating-point operations of one sample, forward and backward: 6 for each product of forward."""
        return 6.0 * self.products

    @property
    def weight_bytes(self) -> int:
        """|W|, and as many of ∇W."""
        return self.weights * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of weights and biases."""
        return (self.weights + self.biases) * self.itemsize

    def input_bytes(self, batch_size: int) -> float:
        """|D| of so many samples."""
        return self.inputs * batch_size * self.input_itemsize

    def flops_per_byte(self, batch_size: int, overlap: float = 1.0) -> float:
        """Operations of a worker with so many samples for each byte that data parallelism has it send.

            6 · B · products / (bytes of weights · (2 - overlap))  =  1.5 · B · width · height     of a convolution

        The factor is for 4 bytes a number at `overlap` 1, for any kernel and features. `overlap` is the part of sending
        that happens while the worker receives.

        Source: D. Das et al., "Distributed deep learning using synchronous stochastic gradient descent", 2016.
        """
        return self.flops * batch_size / (self.weight_bytes * (2.0 - overlap))


def volumes(model: nn.Module, sample: Any) -> tuple[LayerVolume, ...]:
    """The layers with parameters, in the order of the model's first calls; layers without a call come last.

    `sample`: the model's inputs, a tensor, a tuple of inputs, or a mapping of keywords; samples are in the first
    dimension of the first tensor. The inputs of several calls of a layer are added.

    Errors: ValueError for a sample without tensors, for a model without parameters, and for a model that does not run
    on the sample, or takes a path that depends on values.
    """
    args, kwargs = (sample if isinstance(sample, tuple) else (sample,)), dict[str, Any]()
    if isinstance(sample, Mapping):
        args, kwargs = (), dict(sample)
    tensors = [each for each in tree_leaves([args, kwargs]) if isinstance(each, Tensor) and each.dim()]
    if not tensors or not len(tensors[0]):
        raise ValueError("the sample has no tensor with samples; give the model's inputs, as in sample=x")
    listener = _Listener(model, len(tensors[0]))
    try:
        listener.run(model, args, kwargs)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the model's layers cannot be seen on the sample, without values: {type(error).__name__}: {said}"
        ) from error
    if not listener.found:
        raise ValueError("the model has no layers with parameters, so there is nothing to plan")
    called = [name for name in listener.calls if name in listener.found]
    return tuple(listener.found[name] for name in dict.fromkeys([*called, *listener.found]))


class _Listener:
    """Hears the inputs of each layer of a model."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self.samples = samples
        self.found: dict[str, LayerVolume] = {}
        self.layers: dict[str, nn.Module] = {}
        self.calls: list[str] = []
        seen: dict[int, str] = {}
        for name, module in _layers(model):
            parameters = dict(module.named_parameters(recurse=isinstance(module, nn.MultiheadAttention)))
            other = next((seen[id(p)] for p in parameters.values() if id(p) in seen), None)
            new = {path: p for path, p in parameters.items() if id(p) not in seen}
            seen |= {id(p): name for p in new.values()}
            self.layers[name] = module
            kind = _kind(module)
            biases = sum(p.numel() for path, p in new.items() if kind != "other" and path.endswith("bias"))
            numbers = sum(p.numel() for p in new.values())
            itemsize = next(iter(parameters.values())).element_size()
            self.found[name] = LayerVolume(
                *(name, kind, numbers - biases, biases),
                itemsize=itemsize,
                features=divisible_features(module),
                tied=other is not None,
            )
            if other is not None:
                self.found[other] = replace(self.found[other], tied=True)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        hooks = [
            module.register_forward_hook(self._hook(name), with_kwargs=True) for name, module in self.layers.items()
        ]
        try:
            state = fake_state(model, mode)
            with kept_random_states(), _told_once(), mode, torch.enable_grad():
                functional_call(model, state, fake(args, mode), fake(kwargs, mode))
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def heard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._add(name, module, [t for t in tree_leaves([args, kwargs]) if isinstance(t, Tensor)], output)

        return heard

    def _add(self, name: str, module: nn.Module, given: list[Tensor], output: Any) -> None:
        before = self.found[name]
        made = next(each for each in tree_leaves(output) if isinstance(each, Tensor))
        inputs, products = _counts(module, given, made)
        first = name not in self.calls
        self.calls.append(name)
        self.found[name] = replace(
            before,
            inputs=before.inputs + inputs / self.samples,
            outputs=before.outputs + (made.numel() / self.samples if inputs else 0.0),
            products=before.products + products / self.samples,
            input_itemsize=given[0].element_size(),
            gradient=given[0].requires_grad or (before.gradient and not first),
        )


@contextmanager
def _told_once() -> Iterator[None]:
    """Silence torch's log of a stack for an error that is raised anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with parameters; an attention is one, with all its submodules."""
    found: list[tuple[str, nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside = (*inside, f"{name}." if name else "")
            found.append((name, module))
        elif any(True for _ in module.parameters(recurse=False)):
            found.append((name, module))
    return found


def _kind(module: nn.Module) -> Kind:
    match module:
        case _ConvTransposeNd():
            return "other"
        case _ConvNd():
            return "convolution"
        case nn.Linear():
            return "linear"
        case nn.Embedding():
            return "embedding"
        case nn.MultiheadAttention():
            return "attention"
    return "other"


def _counts(module: nn.Module, given: list[Tensor], made: Tensor) -> tuple[int, int]:
    """Numbers that a call of the layer is given, and its products. Of other kinds of layers none are counted."""
    match module:
        case _ConvTransposeNd():
            return 0, 0
        case _ConvNd():
            return given[0].numel(), made.numel() * module.in_channels // module.groups * prod(module.kernel_size)
        case nn.Linear():
            return given[0].numel(), made.numel() * module.in_features
        case nn.Embedding():
            return given[0].numel(), 0
        case nn.MultiheadAttention():
            return _attention(module, given, made)
    return 0, 0


def _attention(module: nn.MultiheadAttention, given: list[Tensor], made: Tensor) -> tuple[int, int]:
    """Numbers of query, key and value, each once if it is a tensor of its own, and of the last projection's input."""
    query, key, value = (given[i] if i < len(given) else given[0] for i in range(3))
    width, batch_dim = module.embed_dim, 0 if module.batch_first else 1
    own = {id(each): each.numel() for each in (query, key, value)}
    length = key.shape[1 - batch_dim] if key.dim() > 2 else key.shape[0]
    projected = query.numel() * width + key.numel() * width + value.numel() * width + made.numel() * width
    return sum(own.values()) + made.numel(), projected + 2 * query.numel() * length
