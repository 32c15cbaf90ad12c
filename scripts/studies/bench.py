"""Run the named studies, and write their tables and charts."""

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
    """A study: its description, its function, and approximately how many seconds it takes at each
    effort.

    `scripts/bench quick` leaves out a study whose `quick` is 0, and `scripts/bench all` a study
    whose `default` is 0.
    """

    what: str
    # MODULE:NAME of the study's function (plain or coroutine), with MODULE relative to
    # scripts.studies
    function: str
    quick: int = 0
    default: int = 0
    # True: `scripts/bench all` runs this study with the quick grid, because the default grid takes
    # longer but adds no finding
    smallest: bool = False


STUDIES = {
    "graph": Study("overhead and scaling of the task graph", "graph:study", 30, 200),
    "calibration": Study(
        "rate control and drift alarms on recorded scores", "calibration:study_calibration", 30, 320
    ),
    "statistics": Study(
        "coverage of confidence intervals, and realised rates of runs with few problems",
        "calibration:study_statistics",
        0,
        60,
    ),
    "small": Study(
        "live runs of few problems: realised rate, escalated worst chunks, accuracy",
        "calibration:study_small_runs",
        0,
        90,
        smallest=True,
    ),
    "replay": Study(
        "replays of recorded runs, compared with live runs of the same settings",
        "calibration:study_replay",
        0,
        25,
        smallest=True,
    ),
    "grading": Study("comparison of answer checkers", "grading:study", 0, 100),
    "local": Study("the local engine compared with transformers", "local:study", 0, 300),
    "local-scores": Study(
        "scores in bfloat16 compared with float32: time, and changed decisions of a gate",
        "local:study_scores",
        0,
        15,
        smallest=True,
    ),
    "speculation": Study(
        "speculative decoding: fixed lengths, k=auto, weaker drafts, assisted generation",
        "speculation:study",
        20,
        300,
    ),
    "overlap": Study(
        "speculation in which draft and target work at the same time, live",
        "speculation:study_overlap",
        0,
        120,
    ),
    "overlap-virtual": Study(
        "the schemes of study overlap on virtual devices, with published costs and recorded "
        "acceptances",
        "speculation:study_virtual",
        0,
        60,
    ),
    "blocks": Study(
        "four related models in one zoo, compared with a separate engine for each model",
        "blocks:study",
    ),
    "blocks-simulated": Study(
        "shared blocks of models on 12 to 64 virtual GPUs, compared with complete models",
        "blocks:study_simulated",
        0,
        160,
    ),
    "blocks-memory": Study(
        "memory of a family of models, in one zoo and in separate processes", "blocks:memory", 0, 60
    ),
    "blocks-real": Study(
        "models that the study trains from a real model, in one zoo and in separate engines",
        "blocks:study_real",
    ),
    "judges": Study(
        "how well each score finds incorrect chunks and rollouts, in recordings of a real pair",
        "judges:study",
    ),
    "real-pair": Study(
        "live methods on a real pair: accuracy, tokens, scores; takes hours, but can be resumed",
        "real_pair:study",
    ),
    "referee": Study(
        "stopping rules of several methods, on recorded rollouts of a real pair",
        "judges:study_rules",
        0,
        4,
    ),
    "real-speed": Study(
        "decoding speed of a real pair in atts (plain, and with every proposer), transformers "
        "and llama.cpp",
        "real_pair:study_speed",
    ),
    "distil": Study(
        "distillation of a draft on the export of a run: divergence and escalations; takes minutes",
        "models:study_distillation",
    ),
    "real-pair-losses": Study(
        "time that speculation and method exact save or lose on a real pair",
        "real_pair:study_losses",
    ),
    "models": Study(
        "the embedded pair: accuracy, voting, recovery from errors, cost", "models:study", 30, 150
    ),
    "pipelines": Study(
        "accuracy, tokens and time of every method: all pipelines-... studies in turn",
        "pipelines:study",
    ),
    "pipelines-claim": Study(
        "the default policy compared with the target alone", "pipelines:claim", 20, 80
    ),
    "pipelines-rates": Study(
        "realised rates of three gates in live runs", "pipelines:rates", 0, 75
    ),
    "pipelines-methods": Study(
        "every baseline compared with the target alone", "pipelines:every_method", 0, 170
    ),
    "pipelines-axes": Study(
        "accuracy of the vote against the number of samples, turns and tokens",
        "pipelines:axes",
        0,
        40,
        smallest=True,
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
        "a certificate: issued on labelled problems, tested on new ones",
        "pipelines:certified",
        0,
        30,
        smallest=True,
    ),
    "speed": Study(
        "the fastest method on real clocks, by cost of the target and number of rollouts",
        "pipelines:study_speed",
        0,
        120,
        smallest=True,
    ),
    "paced": Study(
        "methods over HTTP on servers with the response times of a GPU",
        "servers:study_paced",
        0,
        60,
        smallest=True,
    ),
    "remote": Study(
        "requests per second to servers, compared with a bare aiohttp loop",
        "servers:study_remote",
        0,
        90,
    ),
    "hosted": Study(
        "scores that need no log-probabilities, over a chat API without log-probabilities",
        "servers:study_hosted",
    ),
    "serve": Study(
        "processor time of the endpoint, compared with a server that echoes requests",
        "servers:study_serve",
        0,
        20,
        smallest=True,
    ),
    "serve-soak": Study(
        "memory of the endpoint under constant load, which must not grow (half an hour with "
        "--full)",
        "servers:study_soak",
    ),
    "against": Study(
        "atts compared with the published implementation and with other methods",
        "arms:study_against",
        40,
        120,
    ),
    "frontier": Study(
        "accuracy against arithmetic in live runs, by method, rate and number of samples",
        "arms:study_frontier",
        0,
        110,
    ),
    "field": Study(
        "methods at equal cost: accuracy against cost at the prices of real pairs",
        "arms:study_field",
    ),
    "ablations": Study(
        "the default policy with one option changed at a time",
        "arms:study_ablations",
        0,
        190,
        smallest=True,
    ),
    "scale": Study(
        "clusters in virtual time: fitted costs, up to 256 samples and 64 replicas",
        "scale:study",
        60,
        200,
    ),
    "gpu": Study(
        "the local engine on a GPU: exactness, speed, gain of a draft; run this study alone "
        "(docs/benchmarks/gpu.md)",
        "gpu:study",
    ),
    "soak": Study(
        "memory of many runs under faults, cancellations and drift, which must not grow",
        "graph:study_soak",
        0,
        120,
        smallest=True,
    ),
    "crash": Study(
        "runs that are killed and resumed (200 times with --full)",
        "graph:study_crash",
        0,
        60,
    ),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One study of a series, with its effort."""

    name: str
    effort: Effort
    seconds: float = 0  # approximate seconds on two idle cores; 0 if not known


def main() -> None:
    """Run the studies in the order of the arguments; each of several studies runs in its own
    process.
    """
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
        sys.exit(
            f"bench: failed: {', '.join(failed)}; the same command tries the failed studies again"
        )


def run(name: str, options: Options) -> None:
    """Run one study in this process, and print the machine's description, then the tables."""
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

    After an interruption, the same command skips finished steps and repeats failed steps. If all
    steps have succeeded, the command starts the series again.
    """
    failed: list[str] = []
    for number, step in enumerate(steps):
        part = f"{step.name} {step.effort} {seed}"
        if part in done:
            say(f"bench: {step.name} is already done")
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

    Threads and caches that a study sets up end with its process, so the next study is not affected.
    """
    command = [sys.executable, "-m", "scripts.studies.bench", step.name, "--seed", str(seed)]
    command += [] if step.effort == "default" else [f"--{step.effort}"]
    command += [] if out is None else ["--out", str(out)]
    return subprocess.run(command, check=False).returncode == 0


def planned(asked: Sequence[str], effort: Effort) -> list[Step]:
    """Return the steps that the arguments name, each step only once."""
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
        prog="bench",
        description="Run studies, and print their tables. Each ratio compares measurements of the same run.",
    )
    listing = "; ".join(f"{name}: {one.what}" for name, one in STUDIES.items())
    listing += "; all: every study that is not left out by default; quick: the short studies, with the smallest grids"
    parser.add_argument(
        "studies", nargs="+", choices=[*STUDIES, "all", "quick"], metavar="STUDY", help=listing
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="use the large grids, with which the published numbers were measured; default: small grids",
    )
    parser.add_argument("--quick", action="store_true", help="use the smallest grids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="also write JSON, Markdown and SVG into this folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
