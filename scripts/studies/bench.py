"""Runs the named studies and writes their tables and charts."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.studies.harness import Effort, Options, Table, emit, say
from scripts.studies.machine import look
from scripts.studies.series import Series, Step

STUDIES = {
    "graph": "overhead and scaling of the task graph",
    "calibration": "rate control and drift alarms on recorded scores",
    "grading": "answer checkers beside each other",
    "local": "the local engine beside transformers",
    "models": "the embedded pair: accuracy, voting, recovery, cost",
    "pipelines": "accuracy, tokens and time of every policy",
    "pipelines-claim": "of these the claim alone: the policy beside the target",
    "pipelines-rates": "how the rate is kept, live, by three gates",
    "pipelines-methods": "every baseline",
    "pipelines-axes": "votes against samples, turns and tokens",
    "pipelines-time": "latency and throughput beside the target alone",
    "pipelines-barrier": "what waiting costs, live",
    "pipelines-barrier-virtual": "what waiting costs, in virtual time",
    "pipelines-ordinal": "the gate of ordered levels",
    "pipelines-certified": "a certificate, earned and kept",
    "remote": "requests a second to servers, beside a bare aiohttp loop",
    "against": "the published implementation and transformers' own loops, same work",
    "frontier": "accuracy against arithmetic, live, for methods, rates and numbers of samples",
    "ablations": "one choice at a time: which defaults win",
    "scale": "virtual time: engines with fitted costs, up to 256 samples and 64 replicas",
    "soak": "solving without end under faults, cancels and drift: nothing may grow",
    "crash": "runs killed again and again, two hundred times with --full",
}
_QUICK = {
    "graph": 30, "calibration": 30, "models": 30, "pipelines-claim": 20, "against": 40, "scale": 60,
}  # fmt: skip
"""What `quick` runs, and about how many seconds each takes: one table of each kind of claim, in under five minutes."""
_ALL = {
    "graph": 200, "calibration": 320, "grading": 100, "local": 300, "models": 150, "pipelines-claim": 80,
    "pipelines-rates": 75, "pipelines-methods": 170, "pipelines-axes": 40,
    "pipelines-time": 60, "pipelines-barrier": 40, "pipelines-barrier-virtual": 30, "pipelines-ordinal": 40,
    "pipelines-certified": 30, "remote": 90, "against": 120, "frontier": 110, "ablations": 190,
    "scale": 200, "soak": 120, "crash": 60,
}  # fmt: skip
"""What `all` runs, likewise: 45 minutes on two quiet cores."""
_SMALLEST = {
    "pipelines-axes", "pipelines-ordinal", "pipelines-certified", "ablations", "soak",
}  # fmt: skip
"""Of these `all` runs the quick grids: the default ones take longest, and decide no more. --full is full for all."""


def main() -> None:
    """Parse, run in the order asked, each study in a process of its own when there are several."""
    asked = _parse()
    effort: Effort = "full" if asked.full else "quick" if asked.quick or "quick" in asked.studies else "default"
    steps = planned(asked.studies, effort)
    if len(steps) == 1:
        return run(steps[0].name, Options(effort, asked.seed, asked.out))
    began = Spent()
    series = Series(steps, asked.seed, asked.out)
    try:
        failed = series.run(lambda step: _run_apart(step.name, Options(step.effort, asked.seed, asked.out)))
    except KeyboardInterrupt:
        say(f"bench: interrupted; {series.words()}" + ("; the same command goes on" if asked.out else ""))
        sys.exit(130)
    say(f"bench: {len(steps)} studies: {began.words()}")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}; the same command tries these again")
    return None


def run(name: str, options: Options) -> None:
    """One study here: what the machine is, then the tables."""
    say(f"study {name} ({options.effort}): {STUDIES[name]}")
    machine = look()
    for line in machine.words():
        say(f"  {line}")
    began = Spent()
    tables = _tables(name, options)
    emit(name, tables, options, machine, began.seconds())
    say(f"study {name}: {began.words()}")


def _tables(name: str, options: Options) -> list[Table]:
    study, _, part = name.partition("-")
    module = importlib.import_module(f"scripts.studies.{study}")
    tables: list[Table] = module.part(part, options) if part else module.study(options)
    return tables


class Spent:
    """What this process and its children used since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), _processor_seconds()

    def seconds(self) -> dict[str, float]:
        """Wall and processor seconds."""
        wall, processor = time.perf_counter() - self._wall, _processor_seconds() - self._processor
        return {"wall": round(wall, 1), "processor": round(processor, 1)}

    def words(self) -> str:
        """On a machine that is busy with other work the second number is the one that means something."""
        return f"{self.seconds()['wall']:.0f} s, of processors {self.seconds()['processor']:.0f} s"


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _run_apart(name: str, options: Options) -> bool:
    """In a fresh process: what one study sets (threads, caches) is not there for the next; whether it went well."""
    command = [sys.executable, "-m", "scripts.studies.bench", name, "--seed", str(options.seed)]
    command += [] if options.effort == "default" else [f"--{options.effort}"]
    command += [] if options.out is None else ["--out", str(options.out)]
    return subprocess.run(command, check=False).returncode == 0


def planned(asked: list[str], effort: Effort) -> list[Step]:
    """The steps that these words ask for, each once, with about the seconds they take."""
    names = [*_ALL] if "all" in asked else [*_QUICK] if "quick" in asked else list(dict.fromkeys(asked))
    small = _SMALLEST if "all" in asked and effort == "default" else ()
    efforts: list[Effort] = ["quick" if name in small else effort for name in names]
    seconds: Mapping[str, int] = {"quick": _QUICK, "default": _ALL, "full": {}}[effort]
    return [Step(name, at, float(seconds.get(name, 0))) for name, at in zip(names, efforts, strict=True)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Studies that print ratios measured side by side.")
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, "all", "quick"], metavar="STUDY", help=_listing())
    parser.add_argument("--full", action="store_true", help="the effort behind the claims; default: small grids")
    parser.add_argument("--quick", action="store_true", help="the smallest grids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write JSON, Markdown and SVG into this folder")
    return parser.parse_args()


def _listing() -> str:
    studies = "; ".join(f"{name}: {what}" for name, what in STUDIES.items())
    return f"{studies}; all: every one; quick: one table of each kind of claim, smallest grids"


if __name__ == "__main__":
    main()
