"""Files of scores that commands write are read by every command that takes scores, whatever they
are called.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize("name", ["scores.jsonl", "scores.json", "scores"])
def test_imported_scores_are_read_everywhere(atts: Any, name: str) -> None:
    """`import` writes one format; `report`, `replay`, `check` and `fit` know it by its content."""
    np.save("ppls.npy", np.linspace(1.1, 9.0, 64))
    assert (
        atts("calibration", "import", "ppls.npy", "--per-question", "16", "--out", name).code == 0
    )
    for words in (
        ("report", name),
        ("replay", name),
        ("check", name),
        ("fit", name, "--out", "calibrator.json"),
    ):
        said = atts("calibration", *words)
        assert (said.code, said.err) == (0, ""), words
    whole = json.loads(atts("calibration", "replay", name, "--json").out.splitlines()[-1])
    assert whole["decisions"] == 64


def test_a_record_without_a_score_is_told_shortly(atts: Any) -> None:
    """The fields it has, not all that they hold; a long value is shortened."""
    with open("wrong.jsonl", "w") as file:
        file.write(json.dumps({"scores": list(range(5000)), "text": "x" * 5000}) + "\n")
    with open("long.jsonl", "w") as file:
        file.write(json.dumps({"score": "9" * 5000}) + "\n")
    for name, told in (("wrong.jsonl", "without a score (scores, text)"), ("long.jsonl", "…")):
        said = atts("calibration", "report", name)
        assert said.code == 2
        assert told in said.err
        assert len(said.err) < 400
