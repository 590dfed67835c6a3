"""`PreparedLoop`: a strategy on the model and the optimizer that another library's loop has prepared.

Lightning    ─┐ model, optimizer                 ┌─▶ hooks on backward() and step(), as `pt.attach` has them
accelerate    ┼─────────────────▶ PreparedLoop ──┼─▶ the ranks' common model, for scores and saved files
transformers ─┘                                  └─▶ each rank's own state, one tensor of bytes a rank
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from polytempo.core import Port, Strategy
from polytempo.core.calls.refusals import refuse
from polytempo.core.state import Saved
from polytempo.core.system import files
from polytempo.engines.join.init import init
from polytempo.spec.text.catalogue import strategy_from
from polytempo.training.checkpoint.optimizer_state import optimizer_restore, optimizer_saved
from polytempo.training.checkpoint.packed_state import packed, unpacked
from polytempo.training.hooks.attach import AttachOptions, attach_replica
from polytempo.training.hooks.drift_watch import OnDrift
from polytempo.training.hooks.handle import Handle
from polytempo.training.step.buffers import BufferRule

FILE = "polytempo.safetensors"
"""The file of the ranks' states in another library's folder of a checkpoint."""


class LoopKeywords(TypedDict, total=False):
    """Options of `pt.attach` that a library's loop takes."""

    buffers: BufferRule
    on_drift: OnDrift
    allow_nan: bool


class PreparedLoop:
    """A strategy, and from `attach` to `settle` its hooks on a model and an optimizer."""

    def __init__(self, library: str, strategy: Strategy | str, **options: Unpack[LoopKeywords]) -> None:
        """`library`: its name, for refusals. Errors: Incompatible for strategies that need a loop of their own."""
        self.library, self.strategy = library, strategy_from(strategy)
        self.handle: Handle | None = None
        """The handle of `pt.attach`, while a model is attached."""
        self._options = AttachOptions(**options)
        self._lent: ExitStack | None = None
        self.refuse()

    def refuse(self, *features: str) -> None:
        """Raise Incompatible where the strategy, in this library, excludes one of the features."""
        asked = self.strategy.features | {"own loop", "framework", *features}
        refuse(asked, strategy=self.strategy, library=self.library)

    def attach(self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None) -> Handle:
        """Join the ranks' process group, and attach the strategy. All ranks call it."""
        self.drop()
        options = self._options._replace(scaler=scaler)
        self.handle = attach_replica(model, optimizer, self.strategy, world=init(), options=options)
        return self.handle

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally."""
        with ExitStack() as stack:
            if self.handle is not None:
                stack.enter_context(self.handle.no_sync())
            yield

    def clips_itself(self, norm_type: float = 2.0) -> bool:
        """True where `.grad` is this rank's own up to the step, so that the handle clips, and no library."""
        together = self.handle is not None and self.handle.one_copy is not None
        if together and norm_type != 2.0:
            self.refuse("other clipping")
        return together

    # ------------------------------------------------------------------ the common model

    def lend(self) -> None:
        """Lend the ranks' common model until `give_back`. All ranks call it."""
        if self.handle is not None and self._lent is None:
            self._lent = ExitStack()
            self._lent.enter_context(self.handle.consensus())
            if not self.strategy.synchronized:
                for tensor in _tensors(self.handle):
                    tensor.data = tensor.data.clone()  # libraries leave out all but one of the views of one memory

    def give_back(self) -> None:
        """Put this rank's own values back. Sends nothing."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()

    @contextmanager
    def common(self) -> Iterator[None]:
        """Inside, the model is the ranks' common one; also inside of `lend`. All ranks call it."""
        if self._lent is not None:
            yield
            return
        self.lend()
        try:
            yield
        finally:
            self.give_back()

    def settle(self) -> None:
        """End the training: the model becomes the ranks' common one, and the hooks come off. All ranks call it."""
        if self.handle is None:
            return
        self.give_back()
        self.handle.state_dict()  # ends exchanges that are under way
        tensors = _tensors(self.handle)
        with self.handle.consensus():
            common = [tensor.data for tensor in tensors]
        with torch.no_grad():
            for tensor, value in zip(tensors, common, strict=True):
                if tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)
        self.handle.detach()
        self.handle = None

    def drop(self) -> None:
        """Take the hooks off after an error, without the other ranks."""
        self.give_back()
        handle, self.handle = self.handle, None
        if handle is not None and handle.attached and handle.one_copy is None:
            handle.detach()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The strategy's name and, on rank 0, each rank's state as bytes. All ranks call it.

        A rank's state is its strategy's state and, where the strategy lets ranks differ, its trained parameters, its
        buffers and its optimizer's state. Cost: rank 0 holds all of it.
        """
        assert self.handle is not None
        lent = self._lent is not None
        self.give_back()
        mine = torch.frombuffer(bytearray(self._packed(self.handle)), dtype=torch.uint8)
        ranks = self.handle.world.drive(_gathered(self.handle.world.port, mine))
        if lent:
            self.lend()
        return {"strategy": str(self.strategy), "ranks": ranks}

    def _packed(self, handle: Handle) -> bytes:
        state = handle.state_dict()
        kept, own = Saved(state["tensors"], state["scalars"]).at("strategy"), self._own(handle).at("own")
        return packed(kept.tensors | own.tensors, kept.scalars | own.scalars | {"version": state["version"]})

    def _own(self, handle: Handle) -> Saved:
        """The tensors that differ between ranks, and the optimizer's state."""
        if self.strategy.synchronized and not handle.replica.exchanges_parameters:
            return Saved({}, {})
        saved = optimizer_saved(handle.replica.optimizer)
        return Saved({**saved.tensors, **Saved(_differing(handle), {}).at("model").tensors}, saved.scalars)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, behind the library's own loading. All ranks call it.

        Errors: Incompatible for a state of another number of ranks, unless the ranks have nothing of their own, and as
        `Handle.load_state_dict`.
        """
        assert self.handle is not None
        ranks, rank, size = state["ranks"], self.handle.world.rank, self.handle.world.size
        tensors, scalars = unpacked(bytes(ranks[min(rank, len(ranks) - 1)].numpy()))
        if len(ranks) != size and tensors:
            refuse({"framework", "other ranks"}, library=self.library, saved=len(ranks), size=size)
        found = Saved(tensors, scalars)
        own, kept = found.under("own"), found.under("strategy")
        if own.holds("optimizer"):
            values = own.under("model").tensors
            with torch.no_grad():
                for name, tensor in _differing(self.handle).items():
                    tensor.copy_(values[name])
            optimizer_restore(self.handle.replica.optimizer, own)
        facts = {"version": scalars.get("version"), "strategy": state["strategy"], "ranks": size}
        self.handle.load_state_dict({**facts, "tensors": kept.tensors, "scalars": kept.scalars})

    def save(self, folder: str | Path) -> None:
        """Let rank 0 write the state beside the library's own files. All ranks call it."""
        assert self.handle is not None
        state = self.state_dict()
        if self.handle.world.rank == 0:
            ranks = {f"rank-{rank}": each for rank, each in enumerate(state["ranks"])}
            files.replace(Path(folder) / FILE, save(ranks, metadata={"strategy": state["strategy"]}))

    def load(self, folder: str | Path) -> None:
        """Go on from the state in a folder; in one without, the strategy begins again. All ranks call it."""
        file = Path(folder) / FILE
        if not file.exists():
            return
        content = files.read(file, file.stat().st_size)
        found: dict[str, Tensor] = load(content)
        ranks = [found[f"rank-{rank}"] for rank in range(len(found))]
        self.load_state_dict({"strategy": _strategy_in(content), "ranks": ranks})


def _tensors(handle: Handle) -> list[Tensor]:
    """The trained parameters and all buffers."""
    return [*handle.replica.trainable.values(), *handle.replica.model.buffers()]


def _strategy_in(content: bytes) -> str:
    """The strategy that a file's metadata names."""
    length = int.from_bytes(content[:8], "little")
    text: str = json.loads(content[8 : 8 + length])["__metadata__"]["strategy"]
    return text


def _differing(handle: Handle) -> dict[str, Tensor]:
    """The trained parameters, and the buffers that are saved with the model."""
    model = handle.replica.model
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {name: p.detach() for name, p in handle.replica.trainable.items()} | buffers


async def _gathered(port: Port, mine: Tensor) -> list[Tensor]:
    """Each rank's bytes, on rank 0; elsewhere none."""
    lengths = [int(length) for length in await port.all_gather(torch.tensor([mine.numel()]))]
    if port.rank:
        await port.send(mine, to=0)
        return []
    others = [await port.recv(torch.empty(n, dtype=torch.uint8), source=r) for r, n in enumerate(lengths) if r]
    return [mine, *others]
