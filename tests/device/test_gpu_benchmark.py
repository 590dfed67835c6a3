"""A dry run of `benchmarks/gpu` on the pretend device: every section has its rows, and each contender ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
WITHOUT_SPARSE = "the pretend device has no sparse tensors"


def test_every_section_is_measured(device: str, tmp_path: Path) -> None:
    if device != "pretend":
        pytest.skip("the benchmark itself runs there")
    command = [sys.executable, "benchmarks/gpu/main.py", "--tiny", "--device", device, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["missing"] == {}
    assert list(result["sections"]) == [
        *("training resnet", "training gpt", "training embedding", "codecs", "simulation"),
        *("2 ranks resnet", "2 ranks gpt", "2 ranks embedding"),
    ]
    rows = [row for name, section in result["sections"].items() if "embedding" not in name for row in section]
    assert [row for row in rows if "error" in row] == [], WITHOUT_SPARSE
    assert len(result["sections"]["codecs"]) == 12
    assert "samples_per_s" in (tmp_path / "gpu.md").read_text()
