"""`transformers.Trainer` and accelerate on a tiny GPT-2, and a hand-written loop; says if the bits are the same."""

import logging
import shutil
import sys
import warnings
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_linear_schedule_with_warmup

import polytempo as pt

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
WORLD = pt.init(quiet=True)
IDS = torch.randint(0, 24, (64, 12), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in IDS]
CONFIG = {
    "vocab_size": 24,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIG |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEPS = 12
COUNTS = []
"""Tokens of a step, over all ranks, as the Trainer counts them."""


def model(start=None):
    net = GPT2LMHeadModel(GPT2Config(**CONFIG)).double()
    if start is not None:
        net.load_state_dict(start)
    return net


def state(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def trained(strategy, start, path=None):
    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=3,
        max_grad_norm=0.5,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=4,
        report_to="none",
        disable_tqdm=True,
        logging_steps=100,
        train_sampling_strategy="sequential",
        weight_decay=0.1,
    )
    trainer = pt.transformers(Trainer(model(start), arguments, train_dataset=DATA, eval_dataset=DATA[:8]), strategy)
    trainer.model.register_forward_pre_hook(
        lambda net, args, named: COUNTS.append(named.get("num_items_in_batch")), with_kwargs=True
    )
    trainer.train(resume_from_checkpoint=path)
    return state(trainer.model)


def by_hand(strategy, start):
    net = model(start)
    net.train()
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, fused=True
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 3, STEPS)
    handle = pt.attach(net, optimizer, strategy)
    step = 0
    while step < STEPS:
        for first in range(0, 64, 16):
            for micro in range(2):
                at = first + 8 * micro + 4 * WORLD.rank
                batch = IDS[at : at + 4]
                with handle.no_sync() if micro == 0 else nullcontext():
                    loss = net(input_ids=batch, labels=batch, num_items_in_batch=COUNTS[0]).loss * 2
                    loss.backward()
            handle.clip_grad_norm_(0.5) if handle.one_copy else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
    handle.state_dict()
    with handle.consensus():
        found = state(net)
    handle.detach()
    return found


class Loop:
    """A loop of accelerate, which can be saved and gone on with."""

    def __init__(self, strategy, start):
        self.accelerator = pt.accelerate(Accelerator(cpu=True, gradient_accumulation_steps=2), strategy)
        self.net = model(start)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(IDS, batch_size=4)
        schedule = get_linear_schedule_with_warmup(optimizer, 6, 2 * STEPS)
        self.net, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.net, optimizer, loader, schedule
        )

    def run(self, epochs):
        for _ in range(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.net):
                    self.accelerator.backward(self.net(input_ids=batch, labels=batch).loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.net.parameters(), 0.5)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
        return self

    def end(self):
        with self.accelerator.consensus():
            found = state(self.net)
            ids = torch.arange(7)
            seen = self.accelerator.gather_for_metrics(
                next(iter(self.accelerator.prepare(torch.utils.data.DataLoader(ids, batch_size=8))))
            )
            assert sorted(seen.tolist()) == ids.tolist(), seen
        self.accelerator.free_memory()
        return found


def accelerated(strategy, start):
    whole = Loop(strategy, start).run(3).end()
    saved = Loop(strategy, start).run(1)
    saved.accelerator.save_state("state")
    saved.accelerator.wait_for_everyone()
    saved.accelerator.free_memory()
    resumed = Loop(strategy, None)
    resumed.accelerator.load_state("state")
    return whole, resumed.run(2).end()


def accelerated_by_hand(strategy, start):
    net = model(start)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 6, 2 * STEPS)
    handle = pt.attach(net, optimizer, strategy)
    for _ in range(3):
        for first in range(0, 64, 16):
            for micro in range(2):
                at = first + 8 * micro + 4 * WORLD.rank
                with handle.no_sync() if micro == 0 else nullcontext():
                    (net(input_ids=IDS[at : at + 4], labels=IDS[at : at + 4]).loss / 2).backward()
            handle.clip_grad_norm_(0.5) if handle.one_copy else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            [schedule.step() for _ in range(2)]
            optimizer.zero_grad()
    with handle.consensus():
        found = state(net)
    handle.detach()
    return found


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def main():
    torch.manual_seed(0)
    start = state(model())
    for strategy in sys.argv[1:]:
        whole, hand = trained(strategy, start), by_hand(strategy, start)
        resumed = trained(strategy, None, "out/checkpoint-5")
        torch.distributed.barrier()
        if WORLD.rank == 0:
            shutil.rmtree("out")
        first, again = accelerated(strategy, start)
        expected = accelerated_by_hand(strategy, start)
        torch.distributed.barrier()
        if WORLD.rank == 0:
            shutil.rmtree("state")
        found = {"trainer": same(whole, hand), "resumed trainer": same(resumed, hand)}
        found |= {"accelerate": same(first, expected), "resumed accelerate": same(again, expected)}
        said = "equal" if all(found.values()) else f"differs {found}"
        print(f"rank {WORLD.rank}: {strategy}: {said}\n", end="", flush=True)


main()
