"""The command line in this process, and run directories to misuse."""

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
    """What a command line came to."""

    code: int
    out: str
    err: str


Atts = Callable[..., Said]


@pytest.fixture(scope="session")
def scripted() -> tuple[str, ...]:
    """Flags of models that need none."""
    return SCRIPTED


@pytest.fixture
def atts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Atts:
    """The command line as a function, in an empty folder, without anybody's ATTS_* variables."""
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
    """Two small runs of scripted models: `atts` and `alone`, made once."""
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
    """A copy of the two runs, to do anything to: runs/atts and runs/alone."""
    return Path(shutil.copytree(_recorded, tmp_path / "runs"))
