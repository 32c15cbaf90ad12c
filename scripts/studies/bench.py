"""Runs the named studies and writes their tables and charts."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.studies.harness import Effort, Options, Table, emit, say
from scripts.studies.machine import look

STUDIES = {
    "graph": "overhead and scaling of the task graph",
    "calibration": "rate control, drift alarms, certificates, speed",
    "grading": "answer checkers beside each other",
    "local": "the local engine beside transformers",
    "models": "the embedded pair: accuracy, voting, recovery, cost",
    "pipelines": "accuracy, tokens and time of every policy",
    "pipelines-claim": "of these the claim alone: the policy beside the target",
    "actors": "the embedded evaluation in Ray actors, one and two, beside this process",
    "remote": "requests a second to servers, beside a bare aiohttp loop",
    "against": "the published implementation and transformers' own loops, same work",
    "frontier": "accuracy against arithmetic, live, for methods, rates and numbers of samples",
    "ablations": "one choice at a time: which defaults win",
    "scale": "virtual time: engines with fitted costs, up to 256 samples and 64 replicas",
    "soak": "solving without end under faults, cancels and drift: nothing may grow",
    "journal": "speed and memory of the event log",
    "crash": "runs killed again and again, two hundred times with --full",
}
_QUICK = ("graph", "calibration", "models", "pipelines-claim", "against", "scale", "journal")
"""What `quick` runs: one table of each kind of claim, in under five minutes."""


def main() -> None:
    """Parse, run in the order asked, each study in a process of its own when there are several."""
    asked = _parse()
    effort: Effort = "full" if asked.full else "quick" if asked.quick or "quick" in asked.studies else "default"
    names = _named(asked.studies)
    options = Options(effort, asked.seed, asked.out)
    if len(names) == 1:
        return run(names[0], options)
    began = Spent()
    failed = [name for name in names if not _run_apart(name, options)]
    say(f"bench: {len(names)} studies: {began.words()}")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")
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


def _named(asked: list[str]) -> list[str]:
    if "all" in asked:
        return [name for name in STUDIES if "-" not in name]
    if "quick" in asked:
        return list(_QUICK)
    return list(dict.fromkeys(asked))


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
