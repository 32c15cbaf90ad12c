"""One evaluation on two local engines in processes of their own, which is there to be killed; run as a program."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from atts.core import Problem
from atts.errors import ATTSError
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import Plan, RunOptions, evaluate
from atts.testing import toy_answer, toy_groups

PROBLEMS = [Problem(f"p{number}", f"What is {number} + {3 * number}?", str(4 * number)) for number in range(2, 10)]


def main(directory: Path) -> int:
    """Evaluate, whatever is there already; the exit code."""
    options = LocalOptions(device="cpu", threads=1, kv_tokens=8192)
    plan = Plan(
        LocalEngine(path("draft"), name="draft", options=options),
        LocalEngine(path("target"), name="target", options=options),
        Policy(samples=4, turns=6, chunking=Chunking(12, 12, ()), early_stop="none"),
        ThresholdGate(1.3),
        Answers(toy_answer, toy_groups),
        rollouts=4,
    )
    try:
        return anyio.run(evaluate, PROBLEMS, plan, RunOptions(directory, signals="ignore")).exit_code
    except ATTSError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
