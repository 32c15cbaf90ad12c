"""Checks before a long run: settings, disk, memory, both engines, and whether they fit each other."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from atts.api.config import Configuration
from atts.api.pairs import Pair, find_pair
from atts.api.placement import CARDS, USUAL_CARDS, place
from atts.api.setup import Setup
from atts.core import Message, Problem, Role, SampleRequest, ScoreRequest
from atts.engine import Engine
from atts.errors import ATTSError, OptionError
from atts.files import write_atomic
from atts.pipelines import check_engines, needed_logprobs, prompt_of

Status = Literal["ok", "warn", "fail"]
_SIGNATURE = "# Written by `atts doctor`"
_TIGHT_GB = 2.0
_FULL_GB = 0.2
_PROBLEM = Problem("doctor", "What is (17 + 25) * 3?")
_TRIED = 16  # tokens that the draft writes to see the target score them


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at, what was seen, and what to do about it."""

    name: str
    status: Status
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        """In one line."""
        return f"{self.status:<5} {self.name:<12} {self.seen}" + (
            f". {self.advice}" if self.advice else ""
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was looked at, in order."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> int:
        """How many checks failed."""
        return sum(check.status == "fail" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Plain data for machines."""
        counts = {
            status: sum(check.status == status for check in self.checks)
            for status in get_args(Status)
        }
        return {"ok": not self.failed, **counts, "checks": [asdict(check) for check in self.checks]}


async def diagnose(configuration: Configuration, card: str | None = None) -> Diagnosis:
    """Look at everything that a run of this configuration depends on; nothing is run but one short
    chunk.

    :raises OptionError: something that is impossible, whatever the servers say.
    """
    setup = configuration.setup()
    pair = find_pair(configuration["pair"]) if configuration["pair"] else None
    checks = [
        *_lengths(configuration, setup),
        *_disk(configuration.directory),
        *_memory(configuration, pair, card),
    ]
    checks += [check async for check in _engines(setup, pair)]
    return Diagnosis(tuple(checks))


def write_settings(path: Path, configuration: Configuration, diagnosis: Diagnosis) -> None:
    """The configuration as a file for `--config`: what was said of it, with what was seen as
    comments.

    :raises OptionError: another file is there.
    :raises StorageError: the disk refuses.
    """
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(
        _SIGNATURE
    ):
        raise OptionError(
            "out", f"{path} is there and is not this command's own; name another file"
        )
    said = {
        name: held.value
        for name, held in configuration.settings.items()
        if _is_said(name, configuration)
    }
    lines = [_SIGNATURE, *(f"# {check}" for check in diagnosis.checks)]
    lines += [f"{name} = {json.dumps(value)}" for name, value in said.items() if value is not None]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def _is_said(name: str, configuration: Configuration) -> bool:
    """Whether a flag, a variable or a file said it, or it is a pair's engine; what follows from
    other keys is not.
    """
    origin = configuration.settings[name].origin
    if name in ("draft", "target"):
        return origin != "default"
    return name not in configuration.followed and not origin.startswith(
        ("default", "pair ", "method ")
    )


def _lengths(configuration: Configuration, setup: Setup) -> Iterator[Check]:
    tokens, turns, draft, target, _ = setup.run_policy.bounds()
    origin = configuration.settings["max_tokens"].origin
    seen = f"{tokens:,} tokens a rollout ({origin}), chunks of {draft} and {target}, {turns} turns"
    yield Check("lengths", "ok", seen)
    for warning in setup.warnings:
        seen, _, advice = warning.partition("; ")
        yield Check("lengths", "warn", seen, advice.capitalize())


def _disk(directory: Path) -> Iterator[Check]:
    place = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free / 1e9
    status: Status = "fail" if free < _FULL_GB else "warn" if free < _TIGHT_GB else "ok"
    advice = (
        ""
        if status == "ok"
        else "Free some, or keep the run elsewhere with --out: a journal keeps every token"
    )
    yield Check("disk", status, f"{free:,.1f} GB free for {directory}", advice)


def _memory(configuration: Configuration, pair: Pair | None, card: str | None) -> Iterator[Check]:
    """Which cards hold the pair, and what each server gets of them."""
    if pair is None or not pair.size("target").layers:
        return
    here = [] if card else list(_cards_here())
    tokens = configuration.setup().run_policy.bounds().max_tokens
    for kind in [card] if card else sorted({name for name, _ in here}) or USUAL_CARDS:
        found = place(pair, kind, tokens)
        if found is None:
            yield Check(
                "memory",
                "fail" if card or here else "warn",
                f"not even eight {kind} hold {pair.name}",
            )
            continue
        lacks = bool(here) and found.count > sum(name == kind for name, _ in here)
        advice = (
            "Take a smaller pair, or larger cards"
            if lacks
            else f"`atts pairs {pair.name} --card {kind}` starts them"
        )
        yield Check(
            "memory",
            "fail" if lacks else "ok",
            f"{found}; the cache holds {found.rollouts} rollouts",
            advice,
        )


def _cards_here() -> Iterator[tuple[str, float]]:
    """The kind and gigabytes of every card of this machine that is as large as a kind we know."""
    if (program := shutil.which("nvidia-smi")) is None:
        return
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    for line in done.stdout.splitlines():
        if line.strip().isdecimal():
            memory = int(line) * 1.048576e-3
            fitting = [name for name, size in CARDS.items() if size <= memory * 1.08]
            yield (
                (max(fitting, key=lambda name: CARDS[name]), memory)
                if fitting
                else ("rtx4090", memory)
            )


async def _engines(setup: Setup, pair: Pair | None) -> AsyncIterator[Check]:
    """Each by itself; then, if both are open, together."""
    opened: dict[Role, Engine] = {}
    async with AsyncExitStack() as stack:
        draft, target = setup.engines()
        for role in setup.roles:
            engine = draft if role == "draft" else target
            try:
                opened[role] = (
                    engine if engine in opened.values() else await stack.enter_async_context(engine)
                )
            except ATTSError as error:
                start = (
                    f"`atts pairs {pair.name} --card CARD` prints the command that starts it"
                    if pair
                    else ""
                )
                yield Check(role, "fail", str(error), start)
                continue
            for check in _one(role, opened[role], pair):
                yield check
        if len(opened) == len(setup.roles):
            for check in _together(setup, opened):
                yield check
            yield await _trial(setup, opened)


def _one(role: Role, engine: Engine, pair: Pair | None) -> Iterator[Check]:
    spec = engine.spec
    kernel = getattr(engine, "kernel", "")
    seen = f"{spec.model} on {spec.engine or type(engine).__name__}, {spec.context_length:,} tokens"
    yield Check(role, "ok", f"{seen}, computed by {kernel}" if kernel else seen)
    wanted = pair.model(role) if pair else ""
    if (
        wanted not in ("", "embedded")
        and wanted.rpartition("/")[2].lower() not in spec.model.lower()
    ):
        yield Check(
            role,
            "warn",
            f"{spec.model} is served, the pair names {wanted}",
            "Scores and prompts may not fit it",
        )
    told = dict(spec.findings).get("speculation", "")
    if told and "does not speculate" not in told:
        yield Check(
            role,
            "warn" if told.startswith("unknown") else "ok",
            f"speculation: {told.partition(': ')[2]}",
        )
    for name, told in spec.findings:
        if told.startswith("no") and name in ("cache", "abort", "seeds"):
            yield Check(role, "warn", f"{name}: {told}", "docs/servers.md names the server's flag")


def _together(setup: Setup, engines: Mapping[Role, Engine]) -> Iterator[Check]:
    """Yield checks of the models that the method asks: what they can do, and whether they fit."""
    gate, _ = setup.decider()
    policy = setup.run_policy
    draft, target = _draft_and_target(engines)
    both = "both" if len(engines) == 2 else "it"
    try:
        check_engines(policy, gate, draft.spec, target.spec)
        yield Check("abilities", "ok", f"{both} can do what the method {setup.method} asks")
    except ATTSError as error:
        yield Check("abilities", "fail", str(error))
    for role, engine in engines.items():
        is_hot = "processed" in dict(engine.spec.findings).get("convention", "")
        if is_hot and role in needed_logprobs(policy, gate, draft.spec, target.spec):
            advice = "Start SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
            yield Check(
                role,
                "warn",
                "its log-probs are after temperature: every chunk is scored once more",
                advice,
            )
    if len(engines) == 2:
        seen = "one for both models"
        if draft.spec.tokenizer != target.spec.tokenizer:
            seen = "two: chunks are encoded again for the other model, scores are mean ones"
        yield Check("tokenizers", "ok", seen)
    yield from _templates(setup, engines)
    shortest = min(draft.spec.context_length, target.spec.context_length)
    most = policy.bounds().max_tokens
    if shortest <= most:
        advice = f"Serve with a longer context (--max-model-len), or give --max-tokens {max(1, shortest - 512)}"
        yield Check(
            "context", "warn", f"{shortest:,} tokens, the rollout alone may have {most:,}", advice
        )
    else:
        yield Check(
            "context", "ok", f"{shortest:,} tokens hold a rollout of {most:,} and its problem"
        )


def _templates(setup: Setup, engines: Mapping[Role, Engine]) -> Iterator[Check]:
    """Yield whether each chat template takes the prompt, and how each opens the answer."""
    messages = prompt_of(_PROBLEM, setup.run_policy)
    thinks = dict[Role, bool]()
    for role, engine in engines.items():
        try:
            ids = engine.tokenizer.render(messages)
        except ATTSError as error:
            yield Check("templates", "fail", f"{role}: {error}")
            continue
        plain = engine.tokenizer.render([Message("user", _PROBLEM.text)])
        how = "with" if any(message.role == "system" for message in messages) else "without"
        seen = f"{role}: {len(ids)} tokens for a short problem, {how} a system prompt ({len(plain)} for the problem alone)"
        thinks[role] = engine.tokenizer.decode(ids).rstrip().endswith("<think>")
        yield Check("templates", "ok", seen)
    if len(set(thinks.values())) == 2:
        opens = next(role for role, opened in thinks.items() if opened)
        advice = (
            "Its first chunks look odd to the other model: expect more of them to be handed over"
        )
        yield Check(
            "templates",
            "warn",
            f"the template of the {opens} alone opens the answer with <think>",
            advice,
        )


def _draft_and_target(engines: Mapping[Role, Engine]) -> tuple[Engine, Engine]:
    """Return both engines; one that is alone stands for both, as in a run."""
    only, *_ = engines.values()
    return engines.get("draft", only), engines.get("target", only)


async def _trial(setup: Setup, engines: Mapping[Role, Engine]) -> Check:
    """Write one short chunk, and score it if the method has a target that scores."""
    draft, target = _draft_and_target(engines)
    messages = prompt_of(_PROBLEM, setup.run_policy)
    try:
        ids = draft.tokenizer.render(messages)
        written = await draft.sample(
            SampleRequest(ids, _TRIED, setup.run_policy.sampling, logprobs="unneeded")
        )
        if len(engines) < 2 or "score" not in target.spec.capabilities or not written.text:
            writer = setup.roles[0]
            return Check("trial", "ok", f"the {writer} wrote {len(written.ids)} tokens")
        suffix = target.tokenizer.encode(written.text)
        scores = await target.score(ScoreRequest(target.tokenizer.render(messages), suffix))
    except ATTSError as error:
        return Check("trial", "fail", str(error))
    mean = sum(scores.logprobs) / len(scores.logprobs)
    return Check(
        "trial",
        "ok",
        f"the draft wrote {len(written.ids)} tokens, the target scored them ({mean:.2f} nats each)",
    )
