"""Real traces for the calibration studies, where this machine has them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from atts.calibration.stored import StoredScores, read_scores
from scripts.studies.harness import say

Records = list[dict[str, Any]]
ORDERS = ("sim", "lock")
ARRAY = "ec846181"
"""The array that the recorded run was calibrated with."""


def traces() -> Path | None:
    """The folder of traces, or None with the reason said."""
    named = os.environ.get("ATTS_SHARED_DATA")
    root = Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if (root / "traces").is_dir():
        return root / "traces"
    say(f"no traces at {root}: studies of real streams are left out (set ATTS_SHARED_DATA to their folder)")
    return None


def arrivals(folder: Path, order: str) -> Records:
    """The scores of a real run in one of its arrival orders."""
    lines = (folder / f"arrivals_ct0_{order}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def arrays(folder: Path) -> dict[str, StoredScores]:
    """Every published array, by a short name; sixteen scores a question, four in the smoke test's."""
    found = dict[str, StoredScores]()
    for path in sorted((folder / "calibration").glob("*.npy")):
        name = path.stem.removeprefix("ppls_").replace("_s16_t500_temp0.8", "")
        found[name] = read_scores(path, 4 if "test_s4" in name else 16)
    return found


def samples(folder: Path, run: str) -> Records:
    """The recorded rollouts of one run."""
    with gzip.open(folder / "draft_target.jsonl.gz", "rt") as lines:
        return [record for record in map(json.loads, lines) if record["run"] == run]


def right_answers(folder: Path) -> set[tuple[int, str]]:
    """The (question, answer) pairs judged right."""
    lines = (folder / "answer_pairs.jsonl").read_text().splitlines()
    return {(p["question_id"], p["pred"]) for p in map(json.loads, lines) if p["judged_equal"]}
