"""`transformers.Trainer` on "polytempo": make the process group first, then the `TrainingArguments`.

`TrainingArguments(ddp_backend="polytempo")` is refused ("Your assigned backend polytempo is not available"), because
Accelerate knows a fixed list of names. It uses an existing group, with any backend: so leave `ddp_backend` out, and
write `use_cpu=True`.

The model is a small GPT-2 with random weights, so nothing is fetched. Prints the same numbers on "polytempo" as on
"gloo", and needs no data. Needs `pip install transformers accelerate`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/transformers_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/integrations/transformers_trainer.py --backend gloo
"""

from __future__ import annotations

import argparse
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH = 24, 12


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards in steps of 1 to 3."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (count, 1), generator=random)
        strides = torch.randint(1, 4, (count, 1), generator=random)
        self.ids = (starts + strides * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Show(TrainerCallback):
    """Prints the trainer's logs, without the times."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero:
            values = {name: value for name, value in (logs or {}).items() if not name.endswith(("time", "second"))}
            print(f"step {state.global_step}: " + ", ".join(f"{n} {float(v):.6g}" for n, v in values.items()))


def next_token_accuracy(found: EvalPrediction) -> dict[str, float]:
    predicted, labels = found.predictions[:, 2:-1], found.label_ids[:, 3:]  # two tokens give the stride
    return {"accuracy": float((predicted == labels).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group(args.backend)  # before the TrainingArguments
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=TrainingArguments(
                folder,
                use_cpu=True,
                num_train_epochs=args.epochs,
                per_device_train_batch_size=16,
                learning_rate=1e-2,
                gradient_accumulation_steps=2,
                ddp_find_unused_parameters=False,
                logging_steps=5,
                eval_strategy="epoch",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Counting(512, seed=1),
            eval_dataset=Counting(101, seed=2),
            compute_metrics=next_token_accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
            callbacks=[Show()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if trainer.is_world_process_zero():
            print(f"{trainer.args.world_size} processes, {trainer.args.parallel_mode.value}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
