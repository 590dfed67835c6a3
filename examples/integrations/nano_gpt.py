"""A small GPT on the characters of a text: a loop with gradient accumulation, cosine rates and bf16 autocast, on DDP.

Prints the same numbers on "polytempo" as on "gloo". Needs a text, `tinyshakespeare/input.txt` of the folder that
`--data` or the variable POLYTEMPO_DATA names, or any other by `--text`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/nano_gpt.py --text path/to/text.txt
    torchrun --standalone --nproc-per-node 2 examples/integrations/nano_gpt.py --backend gloo --data path/to/data
"""

from __future__ import annotations

import argparse
import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BLOCK, EMBEDDING, HEADS, LAYERS = 32, 64, 4, 2
"""Characters of context, and the sizes of the model."""


class Block(nn.Module):
    """Causal self-attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(EMBEDDING), nn.LayerNorm(EMBEDDING)
        self.attend, self.project = nn.Linear(EMBEDDING, 3 * EMBEDDING), nn.Linear(EMBEDDING, EMBEDDING)
        self.mlp = nn.Sequential(nn.Linear(EMBEDDING, 4 * EMBEDDING), nn.GELU(), nn.Linear(4 * EMBEDDING, EMBEDDING))

    def forward(self, x: Tensor) -> Tensor:
        """`x` (batch, time, embedding)."""
        batch, time, width = x.shape
        parts = self.attend(self.norm1(x)).view(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class GPT(nn.Module):
    """Embeddings, blocks, and a head that shares the embedding's weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, EMBEDDING), nn.Embedding(BLOCK, EMBEDDING)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(EMBEDDING)
        self.head = nn.Linear(EMBEDDING, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss; `ids` and `targets` (batch, time)."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def crops(ids: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one character later."""
    starts = torch.randint(len(ids) - BLOCK - 1, (batch_size,)).tolist()
    x = torch.stack([ids[start : start + BLOCK] for start in starts])
    y = torch.stack([ids[start + 1 : start + BLOCK + 1] for start in starts])
    return x, y


def rate(step: int, steps: int, most: float) -> float:
    """A linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return most * (step + 1) / warm_up
    return most * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


@torch.no_grad()
def estimate(model: nn.Module, ids: Tensor, batch_size: int, batches: int = 4) -> float:
    """The mean loss over all ranks' random pieces."""
    model.eval()
    loss = torch.stack([model(*crops(ids, batch_size)) for _ in range(batches)]).mean()
    model.train()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--data", default=os.environ.get("POLYTEMPO_DATA"), help="a folder with tinyshakespeare/ in it")
    parser.add_argument("--text", help="a text file, in place of --data")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-interval", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4, help="batches of a step, over all ranks")
    parser.add_argument("--bf16", action="store_true", help="compute under bf16 autocast")
    found = parser.parse_args()
    if found.text is None and found.data is None:
        parser.error("no text: give --text FILE, or --data FOLDER (or POLYTEMPO_DATA) with tinyshakespeare/input.txt")
    found.text = Path(found.text or Path(found.data) / "tinyshakespeare" / "input.txt")
    return found


def train(model: DistributedDataParallel, ids: Tensor, validation: Tensor, args: argparse.Namespace) -> None:
    """The loop."""
    optimizer = optimizer_of(model)
    micro_steps = max(1, args.accumulate // dist.get_world_size())
    for step in range(args.steps + 1):
        if step % args.eval_interval == 0:
            losses = [estimate(model.module, part, args.batch_size) for part in (ids, validation)]
            if dist.get_rank() == 0:
                print(f"step {step}: train loss {losses[0]:.4f}, val loss {losses[1]:.4f}")
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps, 3e-3)
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1  # as no_sync() does, without the block
            autocast: AbstractContextManager[object] = nullcontext()
            if args.bf16:
                autocast = torch.autocast("cpu", dtype=torch.bfloat16)
            with autocast:
                loss = model(*crops(ids, args.batch_size)) / micro_steps
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"iter {step}: loss {loss.item() * micro_steps:.4f}, norm of the gradient {float(norm):.4f}")


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    torch.manual_seed(1337 + dist.get_rank())
    text = args.text.read_text(encoding="utf-8")
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    split = int(0.9 * len(ids))
    train(DistributedDataParallel(GPT(len(letters))), ids[:split], ids[split:], args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
