"""Lightning's Trainer and a hand-written loop, by each strategy; says for each if the bits are the same."""

import copy
import logging
import sys
import warnings
from contextlib import nullcontext

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polytempo as pt

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
X = torch.randn(75, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())


def loader(shuffle=True):
    return DataLoader(DATA, batch_size=8, shuffle=shuffle)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fitted(strategy, start, path=None, **options):
    module = Model()
    module.load_state_dict(start)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pt.lightning(strategy),
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(module, loader(), loader(False), ckpt_path=path, weights_only=True)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def by_hand(strategy, start):
    module = Model()
    module.load_state_dict(start)
    [optimizer], [schedule] = module.configure_optimizers()
    handle = pt.attach(module, optimizer, strategy)
    batches = pt.shard(loader())
    for _ in range(3):
        for number, batch in enumerate(batches, start=1):
            last = number % 2 == 0 or number == len(batches)
            if number % 2:
                optimizer.zero_grad()
            with nullcontext() if last else handle.no_sync():
                (module.loss(batch) / 2).backward()
            if last:
                handle.clip_grad_norm_(0.5)
                optimizer.step()
                schedule["scheduler"].step()
    handle.state_dict()
    with handle.consensus():
        found = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    handle.detach()
    return found


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def main():
    torch.manual_seed(0)
    start = copy.deepcopy(Model().state_dict())
    for strategy in sys.argv[1:]:
        whole = fitted(strategy, start, max_epochs=3)
        keep = ModelCheckpoint(dirpath=".", filename="at", every_n_train_steps=4, enable_version_counter=False)
        fitted(strategy, start, max_steps=4, callbacks=[keep], enable_checkpointing=True)
        resumed = fitted(strategy, Model().state_dict(), "at.ckpt", max_epochs=3)
        hand = by_hand(strategy, start)
        found = {"whole": same(whole, hand), "resumed": same(resumed, hand)}
        said = "equal" if all(found.values()) else f"differs {found}"
        print(f"rank {pt.init().rank}: {strategy}: {said}\n", end="", flush=True)


main()
