"""Completion in bash: the printed script, and the installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polytempo.cli.options.completion import job_names, strategy_names

BASH = shutil.which("bash")


def bash(folder: Path, script: str) -> str:
    """The script's output, with `polytempo` on the path and the home directory in `folder`."""
    assert BASH is not None
    command = folder / "bin/polytempo"
    if not command.exists():
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m polytempo "$@"\n')
        command.chmod(0o755)
    environ = {**os.environ, "HOME": str(folder), "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    arguments = [BASH, "--norc", "--noprofile", "-c", script]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, check=True, cwd=folder, env=environ
    ).stdout


def completed(words: str) -> str:
    """A script that prints bash's offers for the last of the words."""
    listed = words.split(" ")
    quoted = " ".join(f"'{word}'" for word in listed)
    return (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(listed) - 1}; "
        'function=$(complete -p polytempo | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $function polytempo; '
        'echo "${COMPREPLY[@]}"'
    )


def test_bash_completes_commands_options_jobs_and_strategies(tmp_path: Path) -> None:
    source = 'eval "$(polytempo --show-completion bash)"; '
    assert bash(tmp_path, source + completed("polytempo tra")).split() == ["train"]
    assert bash(tmp_path, source + completed("polytempo train --batch-s")).split() == ["--batch-size"]
    assert bash(tmp_path, source + completed("polytempo train mnist_")).split() == ["mnist_cnn"]
    assert bash(tmp_path, source + completed("polytempo train digits --strategy down")).split() == ["downpour"]
    assert bash(tmp_path, source + completed("polytempo simulate digits --cluster eth")).split() == ["ethernet"]


def test_completion_installs_itself(tmp_path: Path) -> None:
    """A new bash that reads the home directory's .bashrc completes. The shell is the process that runs the command."""
    assert "installed" in bash(tmp_path, "polytempo --install-completion; true")  # bash becomes its last command
    assert bash(tmp_path, 'source "$HOME/.bashrc"; ' + completed("polytempo compa")).split() == ["compare"]


def test_names_that_a_shell_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of jobs and folders with the jobs that ship; in a list, strategies for the last place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/job.py").touch()
    (tmp_path / "model.py").touch()
    (tmp_path / "notes.txt").touch()
    assert job_names("m") == ["mnist", "mnist_cnn", "mine/", "model.py"]
    assert job_names("mine/") == ["mine/job.py"]
    assert job_names("nowhere/") == []
    assert strategy_names("sync_sgd,qs") == ["sync_sgd,qsgd"]
