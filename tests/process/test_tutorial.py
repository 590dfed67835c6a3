"""The tutorial of `docs/start.md`: its code, then its commands, in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

import warm

PAGE = (Path(__file__).parents[2] / "docs/start.md").read_text(encoding="utf-8")
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(
    r"^polytempo .+", PAGE.partition("**By a job file**")[2].partition("**By a job**")[0], re.MULTILINE
)


@pytest.mark.process
def test_the_tutorial_works_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    assert len(COMMANDS) == 7
    (tmp_path / "page.py").write_text(CODE, encoding="utf-8")
    done = warm.run(["page.py"], tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        done = warm.run(["-m", "polytempo", *shlex.split(command)[1:]], tmp_path, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert load_file(tmp_path / "runs/table/model.safetensors")["0.weight"].shape == (64, 64)
    assert (tmp_path / "runs/pictures/model.pt").is_file()
    assert (tmp_path / "model.pt").is_file()
