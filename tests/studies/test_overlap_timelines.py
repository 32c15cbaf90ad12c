"""The picture of overlapped schemes is what the virtual devices do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

overlap = pytest.importorskip("scripts.studies.overlap", reason="needs a checkout")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "acceleration.svg"


@pytest.mark.checkout
def test_the_picture_of_the_page_is_that_of_the_devices() -> None:
    """Every scheme is drawn; the numbers are what its first steps write; the file is current."""
    lines = overlap.schemes()
    assert PICTURE.read_text() == overlap.drawn(lines), (
        "write it anew: scripts/bench overlap-virtual --out docs/benchmarks"
    )
    for title, line in lines.items():
        alone = overlap.drawn({title: line})
        numbers = [int(found) for found in re.findall(r'style="fill:#fff">(\d+)<', alone)]
        assert len(numbers) > 2
        assert numbers == line.written[: len(numbers)]


@pytest.mark.checkout
def test_virtual_time_needs_no_folder_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture lies beside the folder of the tables, whether that is there yet or not."""
    for name in ("record", "closed_forms", "published"):
        monkeypatch.setattr(overlap, name, lambda *args: None)
    monkeypatch.setattr(overlap, "recorded", lambda *args: [])
    monkeypatch.setattr(overlap.anyio, "run", lambda *args: None)
    overlap.study_virtual(overlap.Options("quick", 0, tmp_path / "runs" / "overlap"))
    assert (tmp_path / "runs" / "acceleration.svg").is_file()
