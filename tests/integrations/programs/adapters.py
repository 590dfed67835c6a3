"""LoRA by peft on a tiny GPT-2, by each strategy: against plain torch with peft, in bytes, bits and files."""

import itertools
import logging
import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

import polytempo as pt

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
WORLD = pt.init(quiet=True)
IDS = torch.randint(0, 24, (48, 12), generator=torch.Generator().manual_seed(0))
CONFIG = {"vocab_size": 24, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
CONFIG |= {"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STEPS, BATCH = 6, 4


def base():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**CONFIG)).double()


def adapted():
    net = base()
    torch.manual_seed(1)
    net = get_peft_model(net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).double()
    return net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def loss(net, step, rank, size):
    rows = IDS[(2 * BATCH * step + BATCH * rank) % 48 :][: BATCH * size]
    return net(input_ids=rows, labels=rows).loss


def trained_by_hand(strategy):
    """Replicas in plain torch: for the mean of gradients, and of parameters."""
    copies = [adapted() for _ in range(2)]
    if strategy in ("sync_sgd", "shared_memory"):
        net, optimizer = copies[0]
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(net, step, 0, 2).backward()
            optimizer.step()
        return net
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(copies):
            optimizer.zero_grad()
            loss(net, step, rank, 1).backward()
            optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                for a, b in zip(*(net.parameters() for net, _ in copies), strict=True):
                    if a.requires_grad:
                        a.copy_((a + b) / 2)
                        b.copy_(a)
    return copies[0][0]


def check(strategy):
    net, optimizer = adapted()
    frozen = {name: p.clone() for name, p in net.named_parameters() if not p.requires_grad}
    handle = pt.attach(net, optimizer, strategy)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    sent = [WORLD.trace.bytes_sent[WORLD.rank]]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step, WORLD.rank, 1).backward()
        optimizer.step()
        sent.append(WORLD.trace.bytes_sent[WORLD.rank])
    steps = [b - a for a, b in itertools.pairwise(sent)]
    state = handle.state_dict()
    held = sum(tensor.numel() for tensor in state["tensors"].values())
    found = {"state": held <= 4 * trained}
    most = 2 * 8 * trained + 64  # a mean of float64 among two: at most both halves, once there and once back
    found["bytes"] = max(steps) <= most
    if strategy == "sync_sgd":
        # the first matrices B are 0, so A's gradient is: ranks agree by a number each whether anyone has used it
        found["exact bytes"] = set(steps[1:]) == {8 * trained}
    with handle.consensus():
        named = dict(net.named_parameters())
        found["frozen"] = all(torch.equal(named[name], tensor) for name, tensor in frozen.items())
        if strategy in ("sync_sgd", "shared_memory", "local_sgd(period=3)"):
            hand = dict(trained_by_hand(strategy).named_parameters())
            found["plain"] = max(float((named[name] - hand[name]).abs().max()) for name in hand) < 1e-12
        folder = f"adapter-{WORLD.rank}"
        net.save_pretrained(folder)
        again = PeftModel.from_pretrained(base(), folder).double()
        ours, theirs = get_peft_model_state_dict(net), get_peft_model_state_dict(again)
        found["adapter"] = all(torch.equal(ours[name], theirs[name]) for name in ours)
    handle.detach()
    if not all(found.values()):
        return f"differs {found}, steps {steps}, trained {trained}"
    return "equal"


def main():
    for strategy in sys.argv[1:]:
        print(f"rank {WORLD.rank}: {strategy}: {check(strategy)}\n", end="", flush=True)


main()
