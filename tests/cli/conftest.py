"""Fixtures that run the command line in this process, and small recorded runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from atts.cli.app import run

SCRIPTED = ("--draft", "scripted", "--target", "scripted", "--report", "none")


@dataclass(frozen=True)
class Said:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


Atts = Callable[..., Said]


@pytest.fixture(scope="session")
def scripted() -> tuple[str, ...]:
    """Return flags that choose the scripted models, which need no files."""
    return SCRIPTED


@pytest.fixture
def atts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Atts:
    """Return the command line as a function, in an empty folder, without the user's ATTS_*
    variables.
    """
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ATTS_")]:
        monkeypatch.delenv(name)

    def call(*words: str) -> Said:
        capsys.readouterr()
        code = run(words)
        heard = capsys.readouterr()
        return Said(code, heard.out, heard.err)

    return call


@pytest.fixture(scope="session")
def _recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two small runs of scripted models once: `atts` and `alone`."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method in (("atts", "atts"), ("alone", "target-only")):
        words = (
            "arithmetic[:3]",
            "--method",
            method,
            "--samples",
            "3",
            *SCRIPTED,
            "--out",
            str(folder / name),
        )
        assert run(("eval", *words)) == 0
    return folder


@pytest.fixture
def runs(_recorded: Path, tmp_path: Path) -> Path:
    """Copy the two runs to runs/atts and runs/alone, where a test may change them."""
    return Path(shutil.copytree(_recorded, tmp_path / "runs"))
