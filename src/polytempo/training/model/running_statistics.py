"""`Running`: the running statistics of a model's norms as one vector, which travels beside its parameters.

model     norm1.running_mean, .running_var, .num_batches_tracked, norm2.…
vector    [ mean mean mean | var var var | count | … ]      float64, which holds counts and all floats exactly
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Running:
    """The running statistics of torch's batch and instance norms in `model`, by the order of its modules.

    Other buffers are constants or the model's own affair; they stay where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [
            buffer
            for module in model.modules()
            if isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        ]
        self._sizes = [buffer.numel() for buffer in self.buffers]

    def vector(self) -> Tensor | None:
        """The statistics as they are now, shape (numel,), in memory of their own; None where there are none."""
        if not self.buffers:
            return None
        flats = [buffer.detach().reshape(-1) for buffer in self.buffers]
        return torch.cat([flat.to(flat.device if flat.is_meta else "cpu", torch.float64) for flat in flats])

    @torch.no_grad()
    def place(self, vector: Tensor | None) -> None:
        """Take over the `vector` of a model like this one; counts are rounded. None: nothing happens."""
        if vector is None:
            return
        for buffer, values in zip(self.buffers, vector.split(self._sizes), strict=True):
            whole = values if buffer.is_floating_point() else values.round()
            buffer.copy_(whole.view_as(buffer))
