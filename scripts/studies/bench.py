"""Runs the named studies and writes their tables and charts."""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from scripts.studies.harness import Effort, Options, Parts, Spent, Table, emit, look, say


@dataclass(frozen=True, slots=True)
class Study:
    """A study with its description, its function and its approximate seconds.

    `quick` and `all` leave out a study with 0 seconds at their effort.
    """

    what: str
    function: str  # MODULE:NAME below scripts.studies; it may be a coroutine function
    quick: int = 0
    default: int = 0
    # True: `all` runs the quick grid, because the default grid takes much longer and shows no more
    smallest: bool = False


STUDIES = {
    "graph": Study("overhead and scaling of the task graph", "graph:study", 30, 200),
    "calibration": Study(
        "rate control and drift alarms on recorded scores", "calibration:study_calibration", 30, 320
    ),
    "statistics": Study(
        "what intervals cover, and where runs of few problems land on their rate",
        "calibration:study_statistics",
        0,
        60,
    ),
    "small": Study(
        "runs of few problems, live: rate, worst chunks, accuracy",
        "calibration:study_small_runs",
        0,
        90,
        smallest=True,
    ),
    "replay": Study(
        "recorded runs replayed, compared with live runs of the same settings",
        "calibration:study_replay",
        0,
        25,
        smallest=True,
    ),
    "grading": Study("answer checkers compared", "grading:study", 0, 100),
    "local": Study("the local engine compared with transformers", "local:study", 0, 300),
    "local-scores": Study(
        "scores in bfloat16 compared with float32: time, and what a gate decides",
        "local:study_scores",
        0,
        15,
        smallest=True,
    ),
    "speculation": Study(
        "proposed tokens: every length, the controller, weaker drafts, assisted generation",
        "speculation:study",
        20,
        300,
    ),
    "overlap": Study(
        "draft and target at the same time, live", "speculation:study_overlap", 0, 120
    ),
    "overlap-virtual": Study(
        "the same on virtual devices, at published costs and on recorded acceptances",
        "speculation:study_virtual",
        0,
        60,
    ),
    "blocks": Study(
        "a zoo's one loop compared with an engine for each of four tenants", "blocks:study"
    ),
    "blocks-simulated": Study(
        "blocks on 12 to 64 virtual GPUs compared with a whole model for each tenant",
        "blocks:study_simulated",
        0,
        160,
    ),
    "blocks-memory": Study(
        "what the processes of a family take, in one zoo and apart", "blocks:memory", 0, 60
    ),
    "blocks-real": Study(
        "a zoo of a real model's relatives, trained here, compared with an engine for each",
        "blocks:study_real",
    ),
    "judges": Study(
        "what each score knows of a real pair's mistakes, from a recorded bank", "judges:study"
    ),
    "real-pair": Study(
        "methods live on a real pair, hours of two cores, resumable: accuracy, tokens, scores",
        "real_pair:study",
    ),
    "referee": Study(
        "rival stopping rules on recorded rollouts of a real pair", "judges:study_rules", 0, 4
    ),
    "real-speed": Study(
        "decoding of a real pair: plain, with every proposer, by transformers and llama.cpp",
        "real_pair:study_speed",
    ),
    "distil": Study(
        "a draft distilled on the export of a run, minutes of two cores: divergence, escalations",
        "models:study_distillation",
    ),
    "real-pair-losses": Study(
        "what proposals and method exact lose or save on a real pair, in turn with the target alone",
        "real_pair:study_losses",
    ),
    "models": Study("the embedded pair: accuracy, voting, recovery, cost", "models:study", 30, 150),
    "pipelines": Study(
        "accuracy, tokens and time of every policy, in the parts that follow", "pipelines:study"
    ),
    "pipelines-claim": Study(
        "of these the claim alone: the policy compared with the target", "pipelines:claim", 20, 80
    ),
    "pipelines-rates": Study(
        "how the rate is kept, live, by three gates", "pipelines:rates", 0, 75
    ),
    "pipelines-methods": Study("every baseline", "pipelines:every_method", 0, 170),
    "pipelines-axes": Study(
        "votes against samples, turns and tokens", "pipelines:axes", 0, 40, smallest=True
    ),
    "pipelines-time": Study(
        "latency and throughput compared with the target alone", "pipelines:timed", 0, 60
    ),
    "pipelines-exact": Study(
        "method exact compared with the target alone, transcript by transcript",
        "pipelines:same_transcripts",
        0,
        90,
    ),
    "pipelines-certified": Study(
        "a certificate, earned and kept", "pipelines:certified", 0, 30, smallest=True
    ),
    "speed": Study(
        "where it pays on real clocks, by the target's cost and the number of rollouts",
        "pipelines:study_speed",
        0,
        120,
        smallest=True,
    ),
    "paced": Study(
        "methods over HTTP on servers that keep a GPU's times",
        "servers:study_paced",
        0,
        60,
        smallest=True,
    ),
    "remote": Study(
        "requests a second to servers, compared with a bare aiohttp loop",
        "servers:study_remote",
        0,
        90,
    ),
    "hosted": Study(
        "scores that need no log-probabilities, over a chat API that reports none",
        "servers:study_hosted",
    ),
    "serve": Study(
        "processor time of the endpoint, compared with a bare echo",
        "servers:study_serve",
        0,
        20,
        smallest=True,
    ),
    "serve-soak": Study(
        "the endpoint asked without a pause, half an hour with --full: nothing may grow",
        "servers:study_soak",
    ),
    "against": Study(
        "the published implementation and other methods, same work",
        "arms:study_against",
        40,
        120,
    ),
    "frontier": Study(
        "accuracy against arithmetic, live, for methods, rates and numbers of samples",
        "arms:study_frontier",
        0,
        110,
    ),
    "field": Study(
        "methods at equal cost: accuracy against what real pairs' tokens would cost",
        "arms:study_field",
    ),
    "ablations": Study(
        "one choice at a time: which defaults win", "arms:study_ablations", 0, 190, smallest=True
    ),
    "scale": Study(
        "virtual time: engines with fitted costs, up to 256 samples and 64 replicas",
        "scale:study",
        60,
        200,
    ),
    "gpu": Study(
        "a GPU: what it computes, how fast, where a draft pays; alone, as docs/benchmarks/gpu.md "
        "says",
        "gpu:study",
    ),
    "soak": Study(
        "solving without end under faults, cancels and drift: nothing may grow",
        "graph:study_soak",
        0,
        120,
        smallest=True,
    ),
    "crash": Study(
        "runs killed again and again, two hundred times with --full",
        "graph:study_crash",
        0,
        60,
    ),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A study of a series."""

    name: str
    effort: Effort
    seconds: float = 0  # about how long two quiet cores take; 0 if that is not known


def main() -> None:
    """Run the studies in the order asked; several of them in a process each."""
    asked = _parse()
    effort: Effort = "default"
    if asked.full:
        effort = "full"
    elif asked.quick or "quick" in asked.studies:
        effort = "quick"
    steps = planned(asked.studies, effort)
    if len(steps) == 1:
        run(steps[0].name, Options(effort, asked.seed, asked.out))
        return
    began = Spent()
    done = Parts(Options(out=asked.out).file("bench-progress.jsonl"))
    try:
        failed = run_all(
            steps, asked.seed, done, lambda step: _run_apart(step, asked.seed, asked.out)
        )
    except KeyboardInterrupt:
        say("bench: interrupted" + ("; the same command continues" if asked.out else ""))
        sys.exit(130)
    say(f"bench: {len(steps)} studies: {began}")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}; the same command tries these again")


def run(name: str, options: Options) -> None:
    """Run one study here: report the machine, then the tables."""
    say(f"study {name} ({options.effort}): {STUDIES[name].what}")
    machine = look()
    say("\n".join(f"  {line}" for line in machine.words()))
    module, _, attribute = STUDIES[name].function.partition(":")
    function = getattr(importlib.import_module(f"scripts.studies.{module}"), attribute)
    began = Spent()
    tables: list[Table]
    if inspect.iscoroutinefunction(function):
        tables = anyio.run(function, options)
    else:
        tables = function(options)
    emit(name, tables, options, machine, began.seconds())
    say(f"study {name}: {began}")


def run_all(
    steps: Sequence[Step], seed: int, done: Parts, work: Callable[[Step], bool]
) -> list[str]:
    """Run the unfinished steps of a series, and return the names of failed steps.

    What an interrupted series has done is not repeated; once all are done the next series begins
    again, and a step that failed is tried again.
    """
    failed: list[str] = []
    for number, step in enumerate(steps):
        part = f"{step.name} {step.effort} {seed}"
        if part in done:
            say(f"bench: {step.name} is done already")
            continue
        minutes = sum(one.seconds for one in steps[number:]) / 60
        say(
            f"bench: {step.name} ({step.effort}); {number} of {len(steps)} done, about "
            f"{minutes:.0f} min to go"
        )
        if work(step):
            done.keep(part, {})
        else:
            failed.append(step.name)
    if not failed:
        done.forget()
    return failed


def _run_apart(step: Step, seed: int, out: Path | None) -> bool:
    """Run a study in a fresh process, and return whether it succeeded.

    Threads and caches that one study sets do not reach the next.
    """
    command = [sys.executable, "-m", "scripts.studies.bench", step.name, "--seed", str(seed)]
    command += [] if step.effort == "default" else [f"--{step.effort}"]
    command += [] if out is None else ["--out", str(out)]
    return subprocess.run(command, check=False).returncode == 0


def planned(asked: Sequence[str], effort: Effort) -> list[Step]:
    """Return the steps that the arguments ask for, each once."""
    whole = "all" in asked
    names = list(dict.fromkeys(asked))
    if whole or "quick" in asked:
        names = [name for name, one in STUDIES.items() if (one.default if whole else one.quick)]
    steps: list[Step] = []
    for name in names:
        one = STUDIES[name]
        small = whole and one.smallest and effort == "default"
        seconds = {"quick": one.quick, "default": one.default, "full": 0}[effort]
        steps.append(Step(name, "quick" if small else effort, seconds))
    return steps


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Studies that print ratios measured side by side."
    )
    listing = "; ".join(f"{name}: {one.what}" for name, one in STUDIES.items())
    listing += "; all: every one; quick: one table of each kind of claim, smallest grids"
    parser.add_argument(
        "studies", nargs="+", choices=[*STUDIES, "all", "quick"], metavar="STUDY", help=listing
    )
    parser.add_argument(
        "--full", action="store_true", help="the effort behind the claims; default: small grids"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest grids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="also write JSON, Markdown and SVG into this folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
