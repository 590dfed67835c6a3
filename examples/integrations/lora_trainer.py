"""LoRA by peft in `transformers.Trainer`, by a strategy of ours: `pt.transformers(trainer, "local_sgd(period=4)")`.

Only the adapters travel between workers. The model is a small GPT-2 with random weights, so nothing is fetched. Prints
the same numbers on "polytempo" as on "gloo". Needs `pip install transformers accelerate peft`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/lora_trainer.py
"""

from __future__ import annotations

import argparse
import logging
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed
from transformers_trainer import LENGTH, VOCABULARY, Counting, Show

import polytempo as pt


def base() -> GPT2LMHeadModel:
    set_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend")
    parser.add_argument("--strategy", default="local_sgd(period=4)")
    args = parser.parse_args()

    logging.disable(logging.WARNING)
    world = pt.init(backend=args.backend, quiet=True)  # before the TrainingArguments
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            logging_steps=8,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, options, train_dataset=Counting(512, seed=1), eval_dataset=Counting(101, seed=2))
        trainer.add_callback(Show())
        trainer.remove_callback(PrinterCallback)
        pt.transformers(trainer, args.strategy)
        trainer.train()
        model.save_pretrained(f"{folder}/adapter")
        PeftModel.from_pretrained(base(), f"{folder}/adapter")
        if world.rank == 0:
            whole = sum(p.numel() for p in model.parameters())
            print(f"{args.strategy}: {trained} of {whole} parameters are trained, and travel")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
