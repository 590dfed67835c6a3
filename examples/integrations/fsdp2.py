"""FSDP2: `fully_shard` deals parameters, gradients and optimizer state to the ranks; only the backend's name is ours.

Prints the same numbers on "polytempo" as on "gloo", and needs no data:

    torchrun --standalone --nproc-per-node 2 examples/integrations/fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/integrations/fsdp2.py --backend gloo
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, LENGTH = 32, 48, 16


class Model(nn.Module):
    """A transformer that reads sequences and says the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 96, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of `ids` (batch, time)."""
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(x.dtype))
        logits: Tensor = self.head(x)
        return logits.clone()  # FSDP2 warns of views


def sharded(mixed: bool) -> Model:
    """A model with parameters dealt to all ranks, layer by layer."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def train(model: Model, steps: int) -> None:
    """Sequences that count upwards in steps of 1 to 3."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        starts, strides = torch.randint(VOCABULARY, (8, 1)), torch.randint(1, 4, (8, 1))
        ids = (starts + strides * torch.arange(LENGTH + 1)) % VOCABULARY
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if step % 5 == 0 and dist.get_rank() == 0:
            print(
                f"step {step}: loss {mean.item() / dist.get_world_size():.5f}, norm of the gradient {whole.item():.5f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--mixed", action="store_true", help="compute in bfloat16, reduce in float32")
    args = parser.parse_args()
    dist.init_process_group(args.backend)

    model = sharded(args.mixed)
    train(model, args.steps)
    mine = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    everything = StateDictOptions(full_state_dict=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=everything)
    size = sum(tensor.double().square().sum().item() for tensor in whole.values()) ** 0.5
    again = sharded(args.mixed)
    set_model_state_dict(again, dict(whole), options=everything)  # which puts the parts into the dict
    loaded: dict[str, Any] = get_model_state_dict(again, options=everything)
    equal = all(torch.equal(tensor, loaded[name]) for name, tensor in whole.items())
    if dist.get_rank() == 0:
        print(f"{mine:,} of {sum(tensor.numel() for tensor in whole.values()):,} weights are on rank 0")
        print(f"norm of the weights {size:.5f}; loaded into another model: {'equal' if equal else 'not equal'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
