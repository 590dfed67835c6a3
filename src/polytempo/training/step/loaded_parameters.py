"""`Loaded`: parameters that came from elsewhere after `attach`: by `load_state_dict`, or before the first step."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from polytempo.core import Port
from polytempo.core.arithmetic.anchor import anchors
from polytempo.training.hooks.weak_hook import WeakHook
from polytempo.training.step.replica import Replica
from polytempo.worlds import ProcessWorld


class Loaded:
    """Notices when parameters come from elsewhere, and lets what a strategy remembers of the old ones begin anew.

    That is what `from_anchor` holds (DiLoCo, and local SGD with a codec). A loop that loads others for a while
    and then its own again has changed nothing.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._before: bytes | None = None
        """What the parameters were when something was first loaded since the last step."""
        self._began = False
        self.hooks: list[RemovableHandle] = []
        before, after = WeakHook(self._before_load), WeakHook(self._after_load)
        for module in replica.model.modules():
            self.hooks.append(module.register_load_state_dict_pre_hook(before))
            self.hooks.append(module.register_load_state_dict_post_hook(after))

    def _fingerprint(self) -> bytes:
        digest = hashlib.sha256()
        with self._replica.in_float32():
            for parameter in self._replica.trainable.values():
                digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _before_load(self, *_: Any) -> None:
        parameters = self._replica.parameters
        if self._before is None and parameters is not None and any(True for _ in anchors(tuple(parameters.states))):
            self._before = self._fingerprint()

    def _after_load(self, *_: Any) -> None:
        now = {id(parameter) for parameter in self._replica.model.parameters()}
        if any(id(parameter) not in now for parameter in self._replica.trainable.values()):
            raise RuntimeError(
                "load_state_dict(assign=True) has put other parameters into the model, which neither the optimizer nor "
                "the strategy knows; leave out assign, or make the optimizer and attach after loading"
            )

    def honour(self, world: ProcessWorld, data: Port) -> None:
        """Before an optimizer step: begin anew, if need be. All ranks must have loaded something, or none."""
        before, self._before = self._before, None
        first, self._began = not self._began, True
        parameters = self._replica.parameters
        if parameters is None or self._replica.restored or not (first or before is not None):
            return
        changed = None if before is None else before != self._fingerprint()
        world.drive(parameters.renew(data, changed=changed, at_start=self._replica.step == 0))
