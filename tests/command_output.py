"""A command of `polytempo` in this process, and its output."""

from __future__ import annotations

from typing import Protocol

import pytest

from polytempo.cli.main import app


class Asked(Protocol):
    """Runs a command with further `arguments`; its standard output and standard error."""

    def __call__(self, capsys: pytest.CaptureFixture[str], /, *arguments: str, code: int = 0) -> tuple[str, str]: ...


def asking(*words: str) -> Asked:
    """The command of these words. It must end with the exit code `code`."""

    def asked(capsys: pytest.CaptureFixture[str], /, *arguments: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as end:
            app([*words, *arguments])
        out = capsys.readouterr()
        assert end.value.code == code, out.err
        return out.out, out.err

    return asked
