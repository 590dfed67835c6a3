"""Lightning on "polytempo": `DDPStrategy(process_group_backend="polytempo")`, and values logged with `sync_dist=True`.

Lightning takes any backend that torch knows. For averages over ranks `self.log(…, sync_dist=True)` adds up and divides
where the backend is called "gloo", and asks every other backend for averages, also of whole numbers (the sizes of
batches): "polytempo" has these.

Prints the same numbers on "polytempo" as on "gloo", and needs no data. Needs `pip install lightning`:

    torchrun --standalone --nproc-per-node 2 examples/integrations/lightning_module.py
    python examples/integrations/lightning_module.py --backend gloo       # Lightning starts the second worker itself
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polytempo.data import digits


class Classifier(lightning.LightningModule):
    """Digits, with everything logged that ranks have to agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        logits = self.layers(images)
        right = logits.argmax(dim=1) == labels
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), on_epoch=True, sync_dist=True)
        self.log("val_accuracy", right.float().mean(), on_epoch=True, sync_dist=True)
        self.log("val_right", right.sum().float(), on_epoch=True, sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Show(lightning.Callback):
    """Prints the logged values, when an epoch is over; ranks have agreed on them by then."""

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        values = ", ".join(f"{name} {float(value):.6f}" for name, value in sorted(trainer.callback_metrics.items()))
        if trainer.is_global_zero:
            print(f"epoch {trainer.current_epoch}, step {trainer.global_step}: {values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="polytempo")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    data = digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=args.backend),
        max_epochs=args.epochs,
        callbacks=[Show(), EarlyStopping("val_loss", patience=3)],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        log_every_n_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train: DataLoader[Any] = DataLoader(data.train, batch_size=32, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(data.test, batch_size=64))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} workers, {trainer.global_step} steps")


if __name__ == "__main__":
    main()
