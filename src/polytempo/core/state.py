"""A transform's state as something that can be saved: tensors by path and parameter, and plain numbers.

State is a tree of tuples, NamedTuples and dicts. Its leaves are `Bundle`s (saved one tensor per
parameter, so the layout of buckets may change between runs), tensors, numbers, strings and None.
A leaf may also be `Late`: the answer of something still under way, which `settled` waits for; or `Residual`: a
part of the sum that a rank still holds back, which must survive a change of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from polytempo.core.bundle import Bundle
from polytempo.core.op import Work

Scalar = int | float | str | bool | None
N = TypeVar("N")


class Late(NamedTuple):
    """Part number `part` of the tuple that `work` will answer."""

    work: Work[Any]
    part: int


class Residual(NamedTuple):
    """A part of the sum over all ranks that this rank still holds back; None: nothing.

    A rank that goes on from the states of several holds the sum of theirs. The one kind of leaf that `apply` may
    overwrite in place: who may have to apply again from the same state gives it a `duplicate`.
    """

    residual: Tensor | None = None


class AnchorState(NamedTuple):
    """The parameters at the last synchronisation, and the inner transform's state."""

    anchor: Bundle
    inner: Any


class ProvisionalState(NamedTuple):
    """The state of a transform of gradients that makes provisional steps, around its own `inner` state.

    `coming`: the optimizer's step by the next answer is provisional. The next gradient is computed at its parameters,
    and the step after it goes from before it, parameters and the optimizer's state alike.
    """

    coming: bool
    inner: Any


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals and sums: float32 for 16-bit dtypes, because these lose small numbers in sums.

    In bfloat16 0.5 + 0.001 is 0.5: a residual would stop growing, and lose the rest.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def narrowed(values: Tensor, like: Tensor, limit: float | None = None) -> Tensor:
    """Values of any shape in the dtype of `like`. Finite values stay finite, and NaN and infinities stay.

    The most that is left of a finite number is `limit`, a number of that dtype; None: the largest there is. Without a
    limit, values that have the dtype already are not copied.
    """
    if limit is None and values.dtype is like.dtype:
        return values
    most = torch.finfo(like.dtype).max if limit is None else limit
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(like.dtype)


class Saved(NamedTuple):
    """A state's leaves by path."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Scalar]

    def under(self, path: str) -> Saved:
        """The leaves below `path`, by the rest of their paths."""
        prefix = f"{path}/"
        return Saved(
            {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)},
            {name.removeprefix(prefix): each for name, each in self.scalars.items() if name.startswith(prefix)},
        )

    def at(self, path: str) -> Saved:
        """The leaves, all of them below `path`."""
        return Saved(
            {f"{path}/{name}": each for name, each in self.tensors.items()},
            {f"{path}/{name}": each for name, each in self.scalars.items()},
        )

    def holds(self, path: str) -> bool:
        """True if there is a leaf at `path`, or below it."""
        return any(name == path or name.startswith(f"{path}/") for name in [*self.tensors, *self.scalars])


async def settled(state: Any) -> Any:
    """`state` with everything under way finished. Ranks that exchange messages must all call it."""
    if isinstance(state, Late):
        return (await state.work)[state.part]
    if isinstance(state, dict):
        return {key: await settled(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple_like(state, [await settled(value) for value in state])
    return state


def copied(state: Any, late: Callable[[Late], Any] = lambda leaf: leaf) -> Any:
    """`state` in memory of its own. An answer under way cannot be copied yet: `late` makes its substitute."""
    if isinstance(state, Late):
        return late(state)
    if isinstance(state, Bundle):  # not `state.copy`, which would pack it
        present = state.views if state.packed else state.tensors
        return Bundle({name: tensor.clone() for name, tensor in present.items()}, state.share)
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value, late) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple_like(state, [copied(value, late) for value in state])
    return state


class Clock(NamedTuple):
    """A time of this process. It is not saved: another process begins without one."""

    now_s: float | None = None


class OwnNumbers(NamedTuple):
    """Numbers of this rank since ranks met, which ranks average in their next meeting."""

    total: float = 0.0
    steps: int = 0
    """Steps in the total."""
    clock: Clock = Clock()
    """The end of the last step."""


def nodes(state: Any, kind: type[N] | tuple[type[N], ...]) -> Iterator[N]:
    """All parts of a state of this kind, in its order, and the parts inside of these."""
    if isinstance(state, kind):
        yield state
    if isinstance(state, dict | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from nodes(value, kind)


def residual_tensors(state: Any) -> Iterator[Tensor]:
    """The residuals of a state, in its order."""
    return (each.residual for each in nodes(state, Residual) if each.residual is not None)


def anchors(state: Any) -> Iterator[Bundle]:
    """The anchors in a state, to follow parameters that are put elsewhere."""
    return (each.anchor for each in nodes(state, AnchorState))


def duplicate(state: Any, free: Iterator[Tensor] | None = None) -> Any:
    """`state` with residuals in memory of their own, so that who applies from it spends only the duplicate.

    `free`: memory that is not in use, in the order of `residual_tensors`; memory of another shape is left. Cost: a
    copy of the residuals, and nothing for a state without.
    """
    if isinstance(state, Residual):
        room = None if free is None else next(free, None)
        return state if state.residual is None else Residual(_copied(state.residual, room))
    if isinstance(state, dict):
        return {key: duplicate(value, free) for key, value in state.items()}
    if isinstance(state, tuple) and not isinstance(state, Late):
        return tuple_like(state, [duplicate(value, free) for value in state])
    return state


def _copied(tensor: Tensor, room: Tensor | None) -> Tensor:
    if room is None or (room.shape, room.stride(), room.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
        return tensor.clone()
    return room.copy_(tensor)


def renewed(state: Any, fresh: Any) -> Any:
    """`fresh`, the answer of `init` for parameters that came from elsewhere, at the step of `state`.

    Tensors come from `fresh`, so the memory of the old parameters is gone; numbers come from `state`.
    """
    if isinstance(fresh, Residual | Clock):
        return fresh
    if isinstance(fresh, dict) and isinstance(state, dict):
        return {key: renewed(state.get(key), value) for key, value in fresh.items()}
    if isinstance(fresh, tuple) and isinstance(state, tuple) and len(fresh) == len(state):
        return tuple_like(fresh, [renewed(a, b) for a, b in zip(state, fresh, strict=True)])
    return state if isinstance(fresh, int | float) and isinstance(state, int | float) else fresh


def equal(a: Any, b: Any) -> bool:
    """True if two settled states hold the same values."""
    if isinstance(a, Bundle) and isinstance(b, Bundle):
        return torch.equal(a.flat, b.flat)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def saved(state: Any, path: str) -> Saved:
    """The leaves of a settled `state`, each named `path/…`."""
    found = Saved({}, {})
    _collect(state, path, found)
    return found


def saved_states(states: Sequence[tuple[str, Any]], step: int) -> Saved:
    """States after `step`, settled, each with its path, as leaves by path."""
    found = Saved({}, {"step": step})
    for path, state in states:
        tensors, scalars = saved(state, path)
        found.tensors.update(tensors)
        found.scalars.update(scalars)
    return found


def restored(
    like: Any, source: Saved, path: str, layout: Bundle, residual_sources: Sequence[Saved] | None = None
) -> Any:
    """A state shaped as `like` (an answer of `init`) with the leaves of `source`.

    A leaf that is None in `like` becomes a bundle over the parameters of `layout` that were saved at its place. Tensors
    come back in the dtype and on the device of `like`, or of `layout`. A `Residual` becomes the sum of
    `residual_sources`, which is `source` alone where nothing is said; it has the dtype of residuals for tensors of
    `layout` (`wide`).
    """
    if isinstance(like, Residual):
        return _summed_residual(
            f"{path}/0", [source] if residual_sources is None else residual_sources, next(iter(layout.tensors.values()))
        )
    if isinstance(like, Clock):
        return like
    if isinstance(like, Bundle):
        return like.with_flat(Bundle(_tensors(like.names, source, path)).flat.to(like.flat))
    if isinstance(like, Tensor):
        if path not in source.tensors:
            raise ValueError(f"the saved state has no {path!r}; was it saved by another strategy?")
        return source.tensors[path].to(like)
    if isinstance(like, dict):
        return {key: restored(value, source, f"{path}/{key}", layout, residual_sources) for key, value in like.items()}
    if isinstance(like, tuple):
        return tuple_like(
            like, [restored(v, source, f"{path}/{i}", layout, residual_sources) for i, v in enumerate(like)]
        )
    if like is None and (found := [name for name in layout.names if f"{path}/{name}" in source.tensors]):
        return Bundle({name: source.tensors[f"{path}/{name}"].to(layout.tensors[name]) for name in found})
    if path not in source.scalars:
        raise ValueError(f"the saved state has no {path!r}; was it saved by another strategy?")
    return source.scalars[path]


def _summed_residual(path: str, residual_sources: Sequence[Saved], like: Tensor) -> Residual:
    found = [each.tensors[path] for each in residual_sources if path in each.tensors]
    if not found:
        return Residual()
    total = found[0].to(device=like.device, dtype=wide(like.dtype), copy=True)
    for residual in found[1:]:
        total += residual.to(total)
    return Residual(total)


def _tensors(names: list[str], source: Saved, path: str) -> Mapping[str, Tensor]:
    missing = [name for name in names if f"{path}/{name}" not in source.tensors]
    if missing:
        raise ValueError(f"the saved state has no {path}/{missing[0]}; was it saved for another model or strategy?")
    return {name: source.tensors[f"{path}/{name}"] for name in names}


def _collect(state: Any, path: str, found: Saved) -> None:
    if isinstance(state, Clock):
        return
    if isinstance(state, Bundle):
        found.tensors.update({f"{path}/{name}": view for name, view in state.views.items()})
    elif isinstance(state, Tensor):
        found.tensors[path] = state
    elif isinstance(state, dict):
        for key, value in state.items():
            _collect(value, f"{path}/{key}", found)
    elif isinstance(state, tuple):
        for i, value in enumerate(state):
            _collect(value, f"{path}/{i}", found)
    elif state is None or isinstance(state, Scalar):
        found.scalars[path] = state
    else:
        raise TypeError(f"{path}: a state may hold tensors, bundles and numbers, not {type(state).__name__}")


def tuple_like(like: tuple[Any, ...], values: list[Any]) -> Any:
    """A tuple of `values`, of the same class as `like`."""
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
