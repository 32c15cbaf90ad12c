"""The picture of overlapped schemes is what the virtual devices do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

timelines = pytest.importorskip("scripts.studies.overlap_timelines", reason="needs a checkout")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "acceleration.svg"


@pytest.mark.checkout
def test_the_picture_of_the_page_is_that_of_the_devices() -> None:
    """Every scheme is drawn; the numbers are what its first steps write; the file is current."""
    lines = timelines.schemes()
    assert PICTURE.read_text() == timelines.drawn(lines), (
        "write it anew: scripts/bench overlap-virtual --out docs/benchmarks"
    )
    for title, line in lines.items():
        alone = timelines.drawn({title: line})
        numbers = [int(found) for found in re.findall(r'style="fill:#fff">(\d+)<', alone)]
        assert len(numbers) > 2
        assert numbers == line.written[: len(numbers)]
