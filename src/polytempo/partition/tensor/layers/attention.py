"""`nn.MultiheadAttention` with some heads on each rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.partition.tensor.division import Division, even_sizes
from polytempo.partition.tensor.exchange import entered, gathered, summed
from polytempo.partition.tensor.layers.dropout import sliced_dropout
from polytempo.partition.tensor.layers.layer import Cutter, SplitLayer
from polytempo.partition.tensor.layers.linear import RowLinear

_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class SplitAttention(SplitLayer):
    """Whole heads on each rank: projections of the inputs by column, the output's projection by row.

    Takes the arguments of `nn.MultiheadAttention`, but `bias_k` and `add_zero_attn`. Dropout draws the masks of all
    heads.

    Cost of N ranks, for P positions: forward a sum of P · E; backward one of each different tensor among query, key and
    value. The heads' weights are summed, or gathered, where they are asked for.

    Source: M. Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    _qkv_same_embed_dim = False
    """Keeps `nn.TransformerEncoderLayer` from its way around the modules, which knows whole ones."""

    def __init__(self, cutter: Cutter, name: str, whole: nn.MultiheadAttention) -> None:
        heads = Division(0, even_sizes(whole.num_heads, cutter.group.size, what="heads"))
        features = tuple(whole.head_dim * each for each in heads.sizes)
        packed, rows = Division(0, features, packed=3), Division(0, features)
        super().__init__(
            cutter.group, {"in_proj_weight": packed, "in_proj_bias": packed, **dict.fromkeys(_PROJECTIONS, rows)}
        )
        if whole.bias_k is not None or whole.add_zero_attn:
            raise ValueError(f"{name} has bias_k or add_zero_attn, and no head is their owner; leave them out")
        if cutter.group.sequence and not whole.batch_first:
            raise ValueError(f"{name} has its positions first; with sequence=True make it with batch_first=True")
        self.embed_dim, self.num_heads, self.head_dim, self.heads = (
            whole.embed_dim,
            whole.num_heads,
            whole.head_dim,
            heads,
        )
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        for each in ("in_proj_weight", "in_proj_bias", *_PROJECTIONS):
            self.register_parameter(each, cutter.cut_if_any(f"{name}.{each}", getattr(whole, each), self.parts[each]))
        self.out_proj = RowLinear(cutter, f"{name}.out_proj", whole.out_proj, Division(1, features))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The answer of `nn.MultiheadAttention`: the output, the same on all ranks, and the weights of all heads."""
        batched = query.dim() == 3
        q, k, v = self._heads_first(self._projected(query, key, value), batched)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if is_causal and mask is None:
            raise ValueError(
                "is_causal is a hint about attn_mask; give that mask, too, as nn.MultiheadAttention demands"
            )
        dropout = self.dropout if self.training else 0.0
        if dropout or need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            if dropout:
                weights = sliced_dropout(weights, dropout, self.heads.begin(self.group.rank), self.num_heads, 1)
            context = weights @ v
        else:
            context = functional.scaled_dot_product_attention(q, k, v, mask)
        own = context.transpose(1, 2).flatten(2)  # (batch, positions, this rank's features)
        own = own if not batched or self.batch_first else own.transpose(0, 1)
        output = self.out_proj(own if batched else own.squeeze(0))
        if batched and self.batch_first:  # in memory as torch has it: a dropout behind draws in the order of memory
            output = output.transpose(0, 1).contiguous().transpose(0, 1)
        return output, self._shown(weights, average_attn_weights, batched) if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's features of all three. A tensor that is given twice is exchanged once."""
        came: dict[int, Tensor] = {}
        for each in (query, key, value):
            if id(each) not in came:
                came[id(each)] = entered(self.group, each)
        taken = [came[id(each)] for each in (query, key, value)]
        weights = (
            [getattr(self, each) for each in _PROJECTIONS]
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (functional.linear(x, w, b) for x, w, b in zip(taken, weights, biases, strict=True))
        return q, k, v

    def _heads_first(self, projected: tuple[Tensor, ...], batched: bool) -> list[Tensor]:
        """(batch, heads, positions, features of a head)"""
        whole = [each if batched else each.unsqueeze(0) for each in projected]
        whole = [each if self.batch_first or not batched else each.transpose(0, 1) for each in whole]
        return [each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in whole]

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Numbers to add to the scores of this rank's heads: (batch or 1, heads or 1, queries, keys)."""
        found: Tensor | None = None
        if attn is not None:
            if attn.dim() == 3:  # a mask for each head of each sample
                first, count = self.heads.begin(self.group.rank), self.heads.sizes[self.group.rank]
                attn = attn.unflatten(0, (q.shape[0], self.num_heads)).narrow(1, first, count)
            found = _added(attn, q.dtype)
        if padding is not None:
            hidden = _added(padding, q.dtype).reshape(q.shape[0], 1, 1, k.shape[2])
            found = hidden if found is None else found + hidden
        return found

    def _shown(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        if average:
            found = summed(self.group, weights.sum(1) / self.num_heads)
        else:
            found = gathered(self.group, weights, self.heads.sizes, 1)
        return found if batched else found.squeeze(0)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: True, which means hidden, as minus infinity."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask
