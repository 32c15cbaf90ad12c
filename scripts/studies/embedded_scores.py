"""Stored scores of the embedded pair: what the target says of the draft's chunks on 200 calibration
problems.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import anyio

from atts.api import Setup, calibrate
from atts.calibration import StoredScores, write_state
from atts.evaluators.datasets.arithmetic import problems

PROBLEMS = 200
SEED = 77
"""Of the split that neither training nor the benchmark draws from."""
_LASTING = ("model", "tokenizer", "weights")


def main() -> None:
    """Make them, and write the file that the package ships."""
    parser = argparse.ArgumentParser(prog="embedded_scores", description=__doc__)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--out", type=Path, default=Path(str(files("atts.models"))) / "scores.json")
    asked = parser.parse_args()
    setup = Setup(seed=SEED, policy=replace(Setup().policy, samples=1))
    found = anyio.run(calibrate, problems("calibration", asked.problems, SEED), setup)
    write_state(asked.out, compact(found).state())
    print(f"{asked.out}: {len(found)} scores of {len(set(found.questions))} problems")


def compact(found: StoredScores) -> StoredScores:
    """With short names, five digits, and only such conditions as the package itself settles."""
    names = {name: f"{number}" for number, name in enumerate(dict.fromkeys(found.questions))}
    conditions = {
        name: value
        for name, value in found.fingerprint.items()
        if name.partition(".")[0] not in ("draft", "target") or name.partition(".")[2] in _LASTING
    }
    return replace(
        found,
        scores=tuple(float(f"{score:.5g}") for score in found.scores),
        questions=tuple(names[name] for name in found.questions),
        fingerprint=conditions,
    )


if __name__ == "__main__":
    main()
