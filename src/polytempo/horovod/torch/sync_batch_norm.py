"""`SyncBatchNorm`: batch normalisation with the statistics of all ranks' batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from polytempo.horovod.torch.collectives import Sum
from polytempo.horovod.torch.operations import allreduce
from polytempo.horovod.torch.process_state import PROCESS, ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """y = (x - μ) / √(σ² + ε) · weight + bias, with μ and σ² of the samples of all ranks of a process set.

    x has shape (samples, channels, …); ranks may have different numbers of samples. Running variances are unbiased, as
    torch's. In evaluation, and with one rank, it is torch's batch normalisation. All ranks make their layers in the
    same order. Cost: two all-reduces of about `num_features` numbers, and as many in the backward pass.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set, self._name = process_set, f"sync_batch_norm.{next(PROCESS.layer_numbers)}"

    def _check_input_dim(self, given: Tensor) -> None:
        if given.dim() < 2:
            raise ValueError(f"expected at least 2D input, got {given.dim()}D input")

    def forward(self, given: Tensor) -> Tensor:
        """`given`, normalised; of the same shape."""
        self._check_input_dim(given)
        together = (self.training or self.running_mean is None) and self.process_set.size() > 1
        if not together:
            return super().forward(given)
        dims = [dim for dim in range(given.dim()) if dim != 1]
        shape = [1, -1] + [1] * (given.dim() - 2)
        wide = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        count = wide.new_tensor([float(given.numel() // given.shape[1])])
        total = self._summed("mean", torch.cat([wide.sum(dims), count]))
        number = total[-1].detach()
        mean = total[:-1] / number
        centred = wide - mean.view(shape)
        variance = self._summed("variance", centred.pow(2).sum(dims)) / number
        if self.training and self.running_mean is not None:
            self._remember(mean.detach(), variance.detach() * (number / (number - 1)))
        answer = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            answer = answer * self.weight.view(shape) + self.bias.view(shape)
        return answer.to(given.dtype)

    def _summed(self, what: str, own: Tensor) -> Tensor:
        return allreduce(own, name=f"{self._name}.{what}", op=Sum, process_set=self.process_set)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(variance.to(self.running_var.dtype), factor)
