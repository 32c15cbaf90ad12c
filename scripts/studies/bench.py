"""Runs the named studies and writes their tables."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from scripts.studies.harness import Effort, Options, emit, say

STUDIES = {
    "remote": "requests a second to servers, beside a bare aiohttp loop",
    "graph": "overhead and scaling of the task graph",
    "calibration": "rate control, drift alarms, certificates, speed",
    "grading": "answer checkers beside each other",
    "local": "the local engine beside transformers",
    "models": "the embedded pair: accuracy, voting, recovery, cost",
    "journal": "speed and memory of the event log",
    "crash": "runs killed again and again, two hundred times with --full",
    "pipelines": "accuracy, tokens and time of every policy",
}


def main() -> None:
    """Parse, run in the order asked, print."""
    parser = argparse.ArgumentParser(prog="bench", description="Studies that print ratios measured side by side.")
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, "all", "quick"], metavar="STUDY", help=_listing())
    parser.add_argument("--full", action="store_true", help="the effort behind the claims; default: small grids")
    parser.add_argument("--quick", action="store_true", help="the smallest grids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write JSON and Markdown into this folder")
    asked = parser.parse_args()
    quick = asked.quick or "quick" in asked.studies
    effort: Effort = "full" if asked.full else "quick" if quick else "default"
    everything = {"all", "quick"} & set(asked.studies)
    for name in STUDIES if everything else asked.studies:
        say(f"study {name} ({effort}): {STUDIES[name]}")
        options = Options(effort, asked.seed, asked.out)
        emit(name, importlib.import_module(f"scripts.studies.{name}").study(options), options)


def _listing() -> str:
    studies = "; ".join(f"{name}: {what}" for name, what in STUDIES.items())
    return f"{studies}; all: every one; quick: every one, smallest"


if __name__ == "__main__":
    main()
