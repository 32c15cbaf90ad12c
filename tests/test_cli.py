"""Tests of the command line as a whole: help, suggestions and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from atts.cli.app import COMMANDS, run


def atts(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "atts", *words], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.mark.both
def test_help_lists_every_command(tmp_path: Path) -> None:
    """Help has one line per registered command, and the exit codes."""
    done = atts("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    assert "Exit codes" in done.stdout


@pytest.mark.both
def test_a_misspelt_command_is_usage_with_a_suggestion(tmp_path: Path) -> None:
    """For a misspelt command the exit code is 2, the most similar name is suggested, and stdout is
    empty.
    """
    done = atts("grad", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "grade" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each registered command loads and prints its help."""
    assert run((name, "--help")) == 0
    assert "Usage" in capsys.readouterr().out
