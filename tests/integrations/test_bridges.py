"""Facts of exchange in the trackers of Lightning, Accelerate and transformers, read back by TensorBoard's reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
NAMES = {f"polytempo/{each}" for each in ("exchanges", "exchange_bytes", "exchange_seconds", "wait_seconds")}

LIGHTNING = """
import lightning, torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from polytempo.interop import lightning_callback

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.ones(64, 8))
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="polytempo"), max_epochs=1,
    callbacks=[lightning_callback()], logger=TensorBoardLogger(".", name="", version="logs"), log_every_n_steps=2,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
"""

ACCELERATE = """
import torch, torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from polytempo.interop import accelerate_tracker

dist.init_process_group("polytempo")
accelerator = Accelerator(cpu=True, log_with=accelerate_tracker(TensorBoardTracker("logs", logging_dir=".")))
accelerator.init_trackers("logs", config={"lr": 0.1})
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2, 10, 2):
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(4, 8)).square().mean())
        optimizer.step()
    accelerator.log({"mine": float(step)}, step=step)
accelerator.end_training()  # ends the process group, too
"""

TRANSFORMERS = """
import torch, torch.distributed as dist
from transformers import Trainer, TrainingArguments, PreTrainedModel, PretrainedConfig
from polytempo.interop import add_to_trainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

dist.init_process_group("polytempo")
trainer = Trainer(
    model=Model(),
    args=TrainingArguments("logs", use_cpu=True, max_steps=8, per_device_train_batch_size=4, logging_steps=2,
        save_strategy="no", report_to="tensorboard", disable_tqdm=True, ddp_find_unused_parameters=False),
    train_dataset=[{"x": torch.ones(8)} for _ in range(64)],
)
add_to_trainer(trainer)
trainer.train()
dist.destroy_process_group()
"""

SCRIPTS = {"lightning": LIGHTNING, "accelerate": ACCELERATE, "transformers": TRANSFORMERS}

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.mark.parametrize("library", SCRIPTS)
def test_facts_are_in_the_librarys_own_tracker(library: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[library])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        | {"TENSORBOARD_LOGGING_DIR": "logs"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[int, float]] = {}
    for folder in {path.parent for path in (tmp_path / "logs").rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[tag.removeprefix("train/")] = {each.step: each.value for each in events.Scalars(tag)}
    assert set(found) >= NAMES
    for name in NAMES:
        assert list(found[name])[:4] == [2, 4, 6, 8]
    assert all(found["polytempo/exchanges"][step] >= 2 for step in (4, 6))
    assert all(found["polytempo/exchange_bytes"][step] >= 2 * 4 * 9 for step in (4, 6))
    assert all(found["polytempo/exchange_seconds"][step] > 0 for step in (4, 6))
