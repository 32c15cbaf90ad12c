"""Checks on real language models; `scripts/test real-model` makes their folders from packages."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import torch
from safetensors.torch import load_file, save_file

from atts.accel import SpeculationOptions, Zoo, accelerated
from atts.concurrency import collect
from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Engine
from atts.journal import JOURNAL, Sampled, read_entries, read_outcomes
from atts.local import LocalEngine, LocalOptions
from atts.methods import PRESETS
from atts.sampling import Seed
from scripts.studies.harness import say, shared_data
from scripts.studies.real_models import CannotBeMadeError, folder_of

TOLERANCE = 1e-3  # largest difference of log-probabilities from transformers, in nats
TIE = 1e-3  # if the logits of two tokens differ by less than this, either token may be chosen
SKIPPED = 0  # exit code if the models cannot be installed; the script prints the reason
BROKEN = 5
DATA = "gsm8k_test.jsonl", "math500.jsonl"
Prompts = Sequence[TokenIds]


@dataclass(frozen=True, slots=True)
class Pair:
    """The folders of a draft and a target."""

    draft: Path
    target: Path

    @property
    def words(self) -> list[str]:
        """Return the command-line options that name the pair."""
        return ["--draft", f"hf:{self.draft}", "--target", f"hf:{self.target}"]


@dataclass(frozen=True, slots=True)
class Check:
    """A check's name, its result, and whether it passed."""

    what: str
    seen: str
    holds: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.holds else 'FAIL'}  {self.what}: {self.seen}"


def main(words: Sequence[str] | None = None) -> int:
    """Make the models, check them, print each result; return 0 if all checks passed, or 5 if one
    failed.
    """
    parser = argparse.ArgumentParser(prog="scripts/test real-model", description=__doc__)
    parser.add_argument(
        "models", choices=["model", "pair"], help="SmolLM2-135M, or the Qwen2.5-Coder pair"
    )
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each check (default: 6)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each text (default: 48)")
    given = parser.parse_args(words)
    try:
        if given.models == "model":
            pair = Pair(folder_of("smollm2"), folder_of("smollm2"))
        else:
            pair = Pair(folder_of("qwen05"), folder_of("qwen15"))
    except CannotBeMadeError as error:
        say(f"skipped: {error}")
        return SKIPPED
    failed = 0
    with tempfile.TemporaryDirectory(prefix="atts-real-") as scratch:
        for check in checks(pair, given.prompts, given.tokens, Path(scratch)):
            say(str(check))
            failed += not check.holds
    say("every check holds" if not failed else f"checks that failed: {failed}")
    return BROKEN if failed else 0


def checks(pair: Pair, number: int, tokens: int, scratch: Path) -> Iterator[Check]:
    """Yield every check, the quick ones first."""
    asked = SampledTexts(pair.target, number, tokens)
    yield from asked.like_transformers()
    yield from asked.speculated(pair.draft)
    yield asked.from_zoo(scratch)
    yield anyio.run(two_at_once, pair, asked.prompts, tokens)
    problems = problem_file(scratch)
    yield killed_and_resumed(pair, problems, scratch)
    yield from every_method(pair, problems, scratch)


class SampledTexts:
    """Texts written by plain decoding, for comparison with every other way to decode."""

    def __init__(self, target: Path, number: int, tokens: int) -> None:
        """Write a greedy text and one at temperature 0.8 for each prompt."""
        self._target = target
        self._tokens = tokens
        self.prompts = anyio.run(rendered, target, questions(number))
        self._plain = self._written(LocalEngine(target, options=LocalOptions()))

    def _written(self, engine: Engine) -> list[Completion]:
        return anyio.run(partial(texts, engine, self.prompts, self._tokens))

    def _same(self, what: str, engine: Engine) -> Check:
        """Check that an engine writes the texts of plain decoding, with the same log-probabilities."""
        written = self._written(engine)
        same = sum(
            (one.ids, one.logprobs) == (other.ids, other.logprobs)
            for one, other in zip(written, self._plain, strict=True)
        )
        seen = f"{same} of {len(written)} texts equal plain decoding to the bit"
        return Check(what, seen, same == len(written))

    @torch.inference_mode()
    def like_transformers(self) -> Iterator[Check]:
        """Compare greedy texts and log-probabilities with those of transformers in float32."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            self._target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        greedy = self._plain[: len(self.prompts)]
        same = 0
        worst = 0.0
        scores = anyio.run(partial(scored, LocalEngine(self._target), self.prompts, greedy))
        for prompt, text, ours in zip(self.prompts, greedy, scores, strict=True):
            logits = model(torch.tensor([prompt + text.ids])).logits[0, len(prompt) - 1 : -1]
            best = logits.max(-1).values
            chosen = logits.gather(-1, torch.tensor([text.ids]).T)[:, 0]
            same += bool((best - chosen <= TIE).all())
            theirs = logits.log_softmax(-1).gather(-1, torch.tensor([text.ids]).T)[:, 0]
            worst = max(worst, float((theirs - torch.tensor(ours.logprobs)).abs().max()))
        total = len(self.prompts)
        seen = f"{same} of {total} follow transformers' likeliest token at every place"
        yield Check("greedy texts", seen, same == total)
        seen = f"at most {worst:.1e} nats from those of transformers"
        yield Check("log-probabilities", seen, worst <= TOLERANCE)

    def speculated(self, draft: Path) -> Iterator[Check]:
        """Compare the texts of each way to speculate with those of plain decoding."""
        drafter = str(draft)
        ways = {
            "speculate=auto": SpeculationOptions(drafter),
            "speculate=draft, k=4": SpeculationOptions(drafter, "draft", k=4),
            "speculate=draft, k=4, fuzzy=4": SpeculationOptions(drafter, "draft", k=4, fuzzy=4),
            "speculate=suffix": SpeculationOptions(speculate="suffix"),
            "speculate=pearl": SpeculationOptions(drafter, "pearl"),
            "speculate=ssd": SpeculationOptions(drafter, "ssd"),
            "speculate=mirror": SpeculationOptions(drafter, "mirror"),
        }
        for what, options in ways.items():
            yield self._same(what, accelerated(self._target, speculation=options))

    def from_zoo(self, scratch: Path) -> Check:
        """Check that a model read from a zoo writes the texts of plain decoding, and report the
        storage that the zoo saves.

        The zoo also stores a copy of the model whose last layer differs.
        """
        relative = scratch / "relative"
        changed_layer(self._target, relative)
        zoo = Zoo(scratch / "zoo")
        zoo.add("whole", self._target)
        zoo.add("relative", relative)
        contents = zoo.show()
        check = self._same("zoo", accelerated(zoo.folder("whole")))
        saved = 1 - contents.stored / contents.apart
        shutil.rmtree(scratch / "zoo")
        shutil.rmtree(relative)
        return Check(check.what, f"{check.seen}; {100 * saved:.0f} % less storage", check.holds)


def changed_layer(source: Path, folder: Path) -> None:
    """Write a copy of a model whose last layer has other weights."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    layers = {int(name.split(".")[2]) for name in weights if name.startswith("model.layers.")}
    prefix = f"model.layers.{max(layers)}."
    for name, weight in weights.items():
        if name.startswith(prefix):
            weights[name] = weight * 1.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def problem_file(scratch: Path) -> Path:
    """Write one problem of GSM8K and one of MATH-500, or generated problems if these are missing."""
    lines = list[str]()
    data = shared_data()
    for name in DATA:
        source = None if data is None else data / "benchmarks" / name
        if source is not None and source.is_file():
            lines.append(source.read_text().splitlines()[3])
    for number in range(2 - len(lines)):
        problem = {"id": f"sum-{number}", "problem": f"What is {number + 17} + 25?"}
        lines.append(json.dumps({**problem, "answer": str(number + 42)}))
    path = scratch / "problems.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def questions(number: int) -> list[str]:
    """Return problems for the texts: half from GSM8K and half from MATH-500, if they are
    available.
    """
    data = shared_data()
    chosen = list[str]()
    for name in DATA:
        source = None if data is None else data / "benchmarks" / name
        if source is not None and source.is_file():
            rows = source.read_text().splitlines()[: (number + 1) // 2]
            chosen += [str(json.loads(row)["problem"]) for row in rows]
    names = count(1)
    while len(chosen) < number:
        chosen.append(f"Tom has {next(names)} caps. Ana has 12 more. How many do they have?")
    return chosen[:number]


async def rendered(target: Path, texts: Sequence[str]) -> list[TokenIds]:
    """Return the prompts as the model's own chat template renders them."""
    async with LocalEngine(target) as engine:
        return [engine.tokenizer.render([Message("user", text)]) for text in texts]


async def texts(engine: Engine, prompts: Prompts, tokens: int) -> list[Completion]:
    """Return a greedy text and a sampled text for each prompt, all written concurrently."""
    async with engine:
        return await written(engine, prompts, tokens)


async def written(engine: Engine, prompts: Prompts, tokens: int) -> list[Completion]:
    """Return the greedy and sampled texts that an open engine writes."""
    asked = [
        SampleRequest(
            prompt, tokens, sampling, Seed(7, problem=f"p{number}"), rollout=f"p{number}/0"
        )
        for sampling in (Sampling(0.0), Sampling(0.8))
        for number, prompt in enumerate(prompts)
    ]
    return await collect([partial(engine.sample, request) for request in asked])


async def scored(
    engine: Engine, prompts: Prompts, written_texts: Sequence[Completion]
) -> list[Scores]:
    """Return the engine's log-probabilities of texts."""
    async with engine:
        asked = [
            ScoreRequest(prompt, text.ids)
            for prompt, text in zip(prompts, written_texts, strict=True)
        ]
        return await collect([partial(engine.score, request) for request in asked])


async def two_at_once(pair: Pair, prompts: Prompts, tokens: int) -> Check:
    """Let draft and target write concurrently, and compare each text with the text that the model
    writes alone.

    The function prints the processor time per token but does not judge the time. Threads that spin
    while they wait take several times as much processor time as soon as two engines compute.
    """
    alone = list[list[Completion]]()
    before = processor_seconds()
    for folder in (pair.draft, pair.target):
        alone.append(await texts(LocalEngine(folder), prompts, tokens))
    apart = processor_seconds() - before
    before = processor_seconds()
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(LocalEngine(folder))
            for folder in (pair.draft, pair.target)
        ]
        together = await collect([partial(written, engine, prompts, tokens) for engine in engines])
    both = processor_seconds() - before
    seen = (
        f"the same texts as one after the other; {both:.0f} s of processor time, and {apart:.0f} s "
        "one after the other"
    )
    is_same = [[one.ids for one in each] for each in together] == [
        [one.ids for one in each] for each in alone
    ]
    return Check("two engines at once", seen if is_same else "other texts than alone", is_same)


def processor_seconds() -> float:
    """Return the processor time, in seconds, of this process and of its children that ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def atts(*words: str) -> list[str]:
    """Return an `atts` command of this checkout."""
    return [sys.executable, "-m", "atts", *words]


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    """Run an `atts` command and return its output."""
    return subprocess.run(atts(*words), capture_output=True, text=True, check=False)


def killed_and_resumed(pair: Pair, problems: Path, scratch: Path) -> Check:
    """Kill a run after it has recorded some calls, resume the run, and compare it with an
    uninterrupted run.

    The gate is fixed, so both runs make the same decisions.
    """
    words = ["eval", str(problems), "--samples", "2", "--max-tokens", "96", *pair.words]
    words += ["--method", "coin", "--early-stop", "none", "--json"]
    whole = scratch / "whole"
    killed = scratch / "killed"
    done = ran(*words, "--out", str(whole))
    if done.returncode:
        return Check("kill -9 and resume", done.stderr[-400:], holds=False)
    process = subprocess.Popen(
        atts(*words, "--out", str(killed)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and calls(killed) < 2:
        time.sleep(0.05)
    recorded = calls(killed)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    was_killed = process.wait() == -signal.SIGKILL
    resumed = ran(*words, "--out", str(killed))
    same = rollouts(whole) == rollouts(killed)
    seen = (
        f"killed after {recorded} recorded calls; the resumed run "
        f"{'equals' if same else 'differs from'} one that ran through"
    )
    return Check("kill -9 and resume", seen, was_killed and same and not resumed.returncode)


def calls(run: Path) -> int:
    """Return the number of texts that the journal of a run contains so far."""
    journal = run / JOURNAL
    if not journal.is_file():
        return 0
    return sum(isinstance(entry.event, Sampled) for entry in read_entries(journal))


def rollouts(run: Path) -> dict[tuple[str, int], tuple[TokenIds, str | None]]:
    """Return the result of each rollout of a finished run."""
    return {
        (line.problem, line.sample): (line.ids("target"), line.finish)
        for outcome in read_outcomes(read_entries(run / JOURNAL))
        for line in outcome.rollouts
    }


def every_method(pair: Pair, problems: Path, scratch: Path) -> Iterator[Check]:
    """Run each method on the problems, then make both reports of the first run that has scores."""
    words = ["eval", str(problems), "--samples", "2", "--max-tokens", "64", *pair.words, "--json"]
    runs = dict[str, Path]()
    for preset in PRESETS:
        out = scratch / f"method-{preset.name}"
        own = ["--method", preset.name, "--out", str(out)]
        if preset.name.startswith("paper-") and "atts" in runs:  # these methods need stored scores
            scores = scratch / "scores.json"
            ran("calibration", "import", str(runs["atts"]), "--out", str(scores))
            own += ["--scores", str(scores), "--set", "conditions=ignore"]
        done = ran(*words, *own)
        seen = f"exit code {done.returncode}"
        if done.returncode:
            seen += f": {done.stderr.strip()[-300:]}"
        else:
            runs[preset.name] = out
        yield Check(f"method {preset.name}", seen, not done.returncode)
    reports: dict[str, Callable[[Path], list[str]]] = {
        "report": lambda run: ["report", str(run), "--out", str(scratch / "report.html")],
        "calibration report": lambda run: ["calibration", "report", str(run)],
    }
    for what, command in reports.items():
        if "atts" not in runs:
            yield Check(what, "there is no run to report on", holds=False)
            continue
        done = ran(*command(runs["atts"]))
        page = scratch / "report.html"
        shown = done.stdout + (page.read_text() if what == "report" and page.is_file() else "")
        trouble = [text for text in ("e+1", "Traceback", "nan") if text in done.stdout]
        seen = f"{len(shown):,} characters" + (f", with {', '.join(trouble)}" if trouble else "")
        yield Check(what, seen, not done.returncode and bool(shown) and not trouble)


if __name__ == "__main__":
    sys.exit(main())
