"""The scripts of `examples/integrations` that need torch alone have the same output on "polytempo" and on "gloo".

Here in small, by forked workers with the environment that torchrun gives them; `make test-integrations` starts all as
users do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import script_output
import warm

pytestmark = pytest.mark.process


@pytest.mark.parametrize("script", script_output.SMALL)
def test_a_script_prints_what_it_prints_on_gloo(script: str, data_root: Path, tmp_path: Path) -> None:
    done = warm.run([script_output.__file__, script, str(data_root)], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second
    assert len(first[0]) >= 3
    assert first[1] == []
