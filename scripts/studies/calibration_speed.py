"""What a decision costs, from the first to the millionth score, and what a million scores weigh."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from pathlib import Path

from atts.calibration import MODES, Calibrator, Mode
from scripts.studies.harness import Cell, Options, Table

_STEP = 100_000


def study(options: Options) -> list[Table]:
    """The marginal mode to a million scores, the others to fewer, each in a process of its own."""
    rows = list[tuple[Cell, ...]]()
    for mode in MODES:
        count = options.pick(200_000, 1_000_000 if mode == "marginal" else 200_000, 1_000_000)
        command = [sys.executable, "-m", "scripts.studies.calibration_speed", mode, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        pair, with_decide, first, last, memory = map(float, done.stdout.split())
        rows.append((mode, count, pair, with_decide, first, last, last / first, memory))
    return [
        Table(
            "Processor microseconds per score, and memory",
            ("mode", "scores", "p_value + observe", "decide + observe", "decide + observe, first 100,000",
             "last 100,000", "last / first", "peak MB of the process"),
            tuple(rows),
            ("Scores of 400-score questions over three turns; memory includes the interpreter, numpy and scipy.",),
        )
    ]  # fmt: skip


def measure(mode: Mode, count: int) -> tuple[float, float, float, float, float]:
    """Seconds of `count` pairs of p_value and observe, and of decide and observe by step; peak memory."""
    pairs = _run(mode, count, "p_value")
    decides = _run(mode, count, "decide")
    return sum(pairs) / len(pairs), sum(decides) / len(decides), decides[0], decides[-1], _peak()


def _peak() -> float:
    """The most memory this program had, in MB; the kernel's usage record would count its parent's as well."""
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return float(lines["VmHWM"].split()[0]) / 1024


def _run(mode: Mode, count: int, verb: str) -> list[float]:
    draw = random.Random(0)
    calibrator = Calibrator(0.4, mode, stored=[1.2, 1.5, 1.9] if mode == "split" else ())
    ready = calibrator.decide(1.5, "q0", 0, 0)
    marks = [time.process_time()]
    for place in range(count):
        score, question, turn = 1 + draw.expovariate(1.5), f"q{place // 400}", place % 3
        if verb == "p_value":
            calibrator.p_value(score, turn)
            object.__setattr__(ready, "score", score)  # a fresh score without the cost of a decision
            object.__setattr__(ready, "question", question)
            calibrator.observe(ready)
        else:
            calibrator.observe(calibrator.decide(score, question, turn, place))
        if (place + 1) % _STEP == 0:
            marks.append(time.process_time())
    return [(after - before) / _STEP * 1e6 for before, after in zip(marks, marks[1:], strict=False)]


if __name__ == "__main__":
    print(*measure(sys.argv[1], int(sys.argv[2])))  # type: ignore[arg-type]  # the study passes a mode
