"""A strategy of ours in Lightning's Trainer: `strategy=pt.lightning("local_sgd(period=4)")`.

The validation scores the ranks' common model, and after `fit` the module is that model. Prints the same numbers on
"polytempo" as on "gloo", and needs no data. Needs `pip install lightning`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/lightning_strategy.py
    python examples/integrations/lightning_strategy.py --strategy 'diloco(period=10)'    # Lightning starts two
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning_module import Classifier, Show
from torch.utils.data import DataLoader

import polytempo as pt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend")
    parser.add_argument("--strategy", default="local_sgd(period=4)")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    data = pt.data.digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pt.lightning(args.strategy, process_group_backend=args.backend),
        max_epochs=3,
        callbacks=[Show()],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    train: DataLoader[Any] = DataLoader(data.train, batch_size=32, shuffle=True)
    trainer.fit(module, train, DataLoader(data.test, batch_size=64))
    images, labels = data.test.tensors
    with torch.no_grad():
        right = (module.eval().layers(images).argmax(dim=1) == labels).float().mean()
    if trainer.is_global_zero:
        print(f"{args.strategy}: {right:.1%} of the test digits")


if __name__ == "__main__":
    main()
