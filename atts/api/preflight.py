"""Check a configuration before it runs: estimate its cost without models, or diagnose its models
and machine.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from atts.api.config import Configuration
from atts.api.engines import INSTRUCT, budget_of_folder, speculation_words
from atts.api.pairs import (
    CARDS,
    USUAL_CARDS,
    GpuPlacement,
    LocalPlacement,
    Pair,
    find_pair,
    gpu_placement,
    local_placement,
)
from atts.api.setup import LENGTHS, Setup
from atts.core import Message, Problem, Role, SampleRequest, ScoreRequest, Usage
from atts.engine import Engine
from atts.errors import ATTSError, EngineUnavailable, JournalError, OptionError, counted
from atts.evaluators import paired_power, variance_split
from atts.files import write_atomic
from atts.journal import FACTS, MANIFEST, FinishedProblem, Setting, open_run
from atts.methods import preset
from atts.pipelines import FixedGate, Policy, check_engines, needed_logprobs, prompt_of
from atts.run import Shard

Status = Literal["ok", "warn", "fail"]
# The first line of a settings file that `atts doctor` wrote. `atts doctor` replaces only files with
# this line.
_SIGNATURE = "# Written by `atts doctor`"
_TIGHT_GB = 2.0
_FULL_GB = 0.2
_PROBLEM = Problem("doctor", "What is (17 + 25) * 3?")
# The doctor lets the draft write a chunk of at most this many tokens, and lets the target score it.
_TRIED = 16


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token counts: tokens written by the draft, tokens scored by the target, and tokens written by
    the target.
    """

    draft: float
    scored: float
    target: float

    def times(self, factor: float) -> Tokens:
        """Return a copy with all token counts multiplied by a factor."""
        return Tokens(self.draft * factor, self.scored * factor, self.target * factor)


@dataclass(frozen=True, slots=True)
class DryRun:
    """A description of the run that a configuration would start.

    `expected` is the estimated number of tokens, or None if no estimate is possible. `basis` is the
    source of the estimate.
    """

    dataset: str
    problems: int
    rollouts: int
    directory: Path
    done: int  # number of problems that earlier sessions of the run finished
    expected: Tokens | None
    basis: str
    at_most: Tokens
    roles: tuple[Role, ...]  # the roles ("draft", "target") that the method uses
    # for each token limit of rollouts and chunks: its value and the origin of the value
    budget: Mapping[str, Setting]
    # the source of the tokens that speculative decoding proposes to the target, as a text
    proposes: str = ""
    lengths_advice: str = ""  # advice on token limits of models of unknown kind, or ""
    # warnings about token limits that look too small, and about a kind of score that is not
    # suitable
    warnings: tuple[str, ...] = ()
    # differences between the method of this run and its published implementation
    departures: tuple[str, ...] = ()
    # texts that say which differences in accuracy the run can detect; empty without an earlier
    # graded run
    power: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return all fields as a dictionary for JSON; the directory becomes a string."""
        return {
            **asdict(replace(self, budget={})),
            "budget": self.budget,
            "directory": str(self.directory),
        }


@dataclass(frozen=True, slots=True)
class _Past:
    """The mean cost of a rollout in an earlier run, with the run's nominal rate and graded
    rollouts.
    """

    directory: Path
    rollouts: int
    mean: Tokens
    rate: float
    dataset: str
    max_tokens: object  # the limit of tokens per rollout
    # one tuple for each graded problem: for each of its rollouts, whether it is correct
    correct: tuple[tuple[bool, ...], ...]


def dry_run(configuration: Configuration, shard: Shard | None = None) -> DryRun:
    """Describe the run that this configuration would start, or one shard of the run, without
    loading a model.

    The cost is estimated from earlier runs of the same models, or from worked solutions of the
    dataset.

    :raises DatasetError: the dataset cannot be read, or has no problems.
    :raises OptionError: a setting is impossible.
    """
    setup = configuration.setup()
    job = configuration.job
    directory = configuration.directory_of(shard)
    problems = job.load().problems
    if shard is not None:
        problems = shard.take(problems)
    # Building engines loads no model, but it raises an error for each wrong setting, as a run
    # would.
    setup.engines()
    policy = setup.run_policy
    rollouts = len(problems) * policy.samples
    done = len(_finished(directory))
    mean, basis = _mean_rollout(configuration, setup, problems)
    return DryRun(
        job.dataset,
        len(problems),
        rollouts,
        directory,
        done=done,
        expected=mean.times(rollouts) if mean else None,
        basis=basis,
        at_most=_token_limits(setup, policy).times(rollouts),
        roles=setup.roles,
        budget={name: configuration.settings[name] for name in LENGTHS},
        proposes=_proposer(setup),
        lengths_advice=setup.unknown_kind_advice,
        warnings=setup.warnings,
        departures=preset(setup.method).departures,
        power=tuple(_power(configuration, setup, len(problems))),
    )


def _power(configuration: Configuration, setup: Setup, problems: int) -> Iterator[str]:
    """Yield the differences in accuracy that the run can detect, estimated from the graded rollouts
    of an earlier run.
    """
    past = _best_past(configuration, setup.roles)
    split = None if past is None else variance_split(past.correct)
    if past is None or split is None or problems < 2:
        return
    if split.within > 0:
        yield str(paired_power(split, problems, setup.run_policy.samples))
    yield f"{split}, in {past.directory}"


def _best_past(configuration: Configuration, roles: Sequence[Role]) -> _Past | None:
    """Return the earlier run with the most rollouts. If some earlier runs have the same dataset,
    choose among these runs only.
    """
    dataset = _without_slice(configuration["dataset"])
    return max(
        _earlier_runs(configuration, roles),
        key=lambda run: (run.dataset == dataset, run.rollouts),
        default=None,
    )


def _proposer(setup: Setup) -> str:
    """Describe the source of the tokens that speculation proposes to the target."""
    if "target" not in setup.roles:
        return "nothing: the method does not use the target"
    return speculation_words(setup.draft, setup.target, setup.speculation)


def _token_limits(setup: Setup, policy: Policy) -> Tokens:
    """Return an upper bound on the tokens of one rollout, including discarded draft chunks."""
    tokens, turns, drafted, written, _ = policy.bounds()
    length = min(tokens, turns * (drafted + written))
    drafted = min(drafted, length)
    written = min(written, length)
    if policy.escalates == "problem":
        by_draft = length * policy.waves[0].stop / policy.samples
        return Tokens(by_draft, 0, length - by_draft)
    if policy.drafter == "target":
        return Tokens(0, 0, length)
    if _accepts_everything(setup):
        return Tokens(min(length, turns * drafted), 0, 0)
    draft = turns * drafted
    if policy.escalates in ("rest", "rollout"):
        # After an escalation, the target may write the whole remaining rollout. So its limit is the
        # limit of a rollout, not of a chunk.
        return Tokens(min(draft, tokens), min(draft, tokens), tokens)
    if policy.takeover == "continue":
        draft = min(draft, length)
    return Tokens(draft, draft, min(length, turns * written))


def _accepts_everything(setup: Setup) -> bool:
    """Return whether the method's gate accepts every chunk of the draft."""
    gate, _ = setup.decider()
    return isinstance(gate, FixedGate)


def _mean_rollout(
    configuration: Configuration, setup: Setup, problems: Sequence[Problem]
) -> tuple[Tokens | None, str]:
    """Return the expected token usage of one rollout, and the source of this estimate."""
    dataset = _without_slice(configuration["dataset"])
    past = _best_past(configuration, setup.roles)
    if past is not None:
        words = (
            f"estimated from {counted(past.rollouts, 'rollout')} of {past.directory}, a run with "
            "the same models and method"
        )
        grown = setup.rate / past.rate if past.rate > 0 else 1.0
        if not math.isclose(grown, 1.0):
            words += (
                f" at rate {past.rate:g}; atts assumes that the target's tokens grow in proportion "
                "to the rate"
            )
        if past.dataset != dataset:
            words += f"; that run used the dataset {past.dataset}, so the estimate is only a guess"
        if past.max_tokens != configuration["max_tokens"]:
            words += f"; that run had at most {past.max_tokens:,} tokens per rollout"
        return Tokens(past.mean.draft, past.mean.scored, past.mean.target * grown), words
    if set(setup.asked) == {"embedded"}:
        return _from_solutions(setup, problems)
    return (
        None,
        "no earlier run of these models, so the cost is unknown; run a few problems (--limit 5) "
        "first",
    )


def _from_solutions(setup: Setup, problems: Sequence[Problem]) -> tuple[Tokens | None, str]:
    """Estimate the tokens of a rollout from the worked solutions on which the embedded models were
    trained.
    """
    from tokenizers import Tokenizer

    from atts.evaluators import exercises
    from atts.models import path

    parts = problems[0].id.split("-")
    if (
        parts[0] != "arithmetic"
        or len(parts) != 4
        or parts[1] not in ("train", "calibration", "test")
    ):
        return (
            None,
            "no earlier run of the embedded models on these problems, so the cost is unknown",
        )
    split = parts[1]
    seed = int(parts[2])
    exercise_list = exercises(split, 5 * len(problems), seed)  # type: ignore[arg-type]  # checked above
    known = {exercise.text: exercise.solution for exercise in exercise_list}
    texts = [known[problem.text] for problem in problems if problem.text in known]
    if not texts:
        return (
            None,
            "no earlier run of the embedded models on the given problems, so the cost is unknown",
        )
    tokenizer = Tokenizer.from_file(str(path("draft") / "tokenizer.json"))
    length = sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts)) / len(texts)
    words = (
        f"the worked solutions of {len(texts)} of the problems have {length:.0f} tokens on average"
    )
    if setup.method == "target-only":
        return Tokens(0, 0, length), words
    if _accepts_everything(setup):
        return Tokens(length, 0, 0), words
    drafted = length
    if setup.policy.takeover == "continue":
        # With takeover "continue", the draft's chunk stays in the text and the target adds a chunk.
        # So a rollout needs fewer chunks of the draft.
        drafted = length / (1 + setup.rate)
    words += f"; atts assumes that a fraction {setup.rate:g} of the draft's chunks is escalated"
    return Tokens(drafted, drafted, drafted * setup.rate), words


def _earlier_runs(configuration: Configuration, roles: Sequence[Role]) -> Iterator[_Past]:
    """Yield the costs of earlier runs with the same models and method. If this run already has
    finished problems, it counts as an earlier run.
    """
    folders = {path.parent for path in Path(configuration["runs"]).glob(f"*/{MANIFEST}")}
    for folder in sorted({*folders, configuration.directory}):
        finished = _finished(folder)
        rollouts = sum(len(one.samples) for one in finished)
        if not rollouts:
            continue
        settings = {
            name: setting.value for name, setting in open_run(folder).manifest.settings.items()
        }
        if any(settings.get(name) != configuration[name] for name in (*roles, "method")):
            continue
        usage = sum((one.usage for one in finished), Usage())
        tokens = Tokens(usage.draft_tokens, usage.scored_tokens, usage.target_tokens)
        dataset = _without_slice(str(settings.get("dataset", "other problems")))
        rate = float(str(settings["rate"]))
        correct = tuple(
            tuple(sample.verdict == "correct" for sample in one.complete_samples)
            for one in finished
            if one.verdict is not None
        )
        yield _Past(
            folder,
            rollouts,
            tokens.times(1 / rollouts),
            rate=rate,
            dataset=dataset,
            max_tokens=settings.get("max_tokens"),
            correct=correct,
        )


def _finished(directory: Path) -> list[FinishedProblem]:
    """Return every complete problem of a run, or an empty list if the run cannot be read."""
    try:
        state = open_run(directory).state(FACTS)
    except JournalError:
        return []
    return [one for one in state.finished.values() if one.is_complete]


def _without_slice(dataset: str) -> str:
    return dataset.partition("[")[0]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a configuration, with its result and advice."""

    name: str
    status: Status
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        """Return the check as one line of text."""
        advice = f". {self.advice}" if self.advice else ""
        return f"{self.status:<5} {self.name:<12} {self.seen}{advice}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of a configuration, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> int:
        """Return how many checks failed."""
        return sum(check.status == "fail" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return all checks and the number of checks with each result, as JSON data."""
        counts = {
            status: sum(check.status == status for check in self.checks)
            for status in get_args(Status)
        }
        return {"ok": not self.failed, **counts, "checks": [asdict(check) for check in self.checks]}


async def diagnose(configuration: Configuration, card: str | None = None) -> Diagnosis:
    """Check the token limits, disk, GPUs, engines and prompts that a run of this configuration
    needs.

    The models write only one short chunk.

    :raises OptionError: if a setting is impossible with any server.
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
    """Write the settings that were given to a file for `--config`, with the results of the checks
    as comments.

    :raises OptionError: the path has a file that this command did not write.
    :raises StorageError: the file cannot be written.
    """
    if path.exists():
        earlier = path.read_text(encoding="utf-8", errors="replace")
        if not earlier.startswith(_SIGNATURE):
            raise OptionError(
                "out", f"{path} exists and was not written by this command; name another file"
            )
    given = {
        name: setting.value
        for name, setting in configuration.settings.items()
        if _is_given(name, configuration)
    }
    lines = [_SIGNATURE, *(f"# {check}" for check in diagnosis.checks)]
    lines += [f"{name} = {json.dumps(value)}" for name, value in given.items() if value is not None]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def _is_given(name: str, configuration: Configuration) -> bool:
    """Return whether a key was set by the user. An engine's address that a pair sets also counts;
    derived values do not.
    """
    origin = configuration.settings[name].origin
    if name in ("draft", "target"):
        return origin != "default"
    follows = origin.startswith(("default", "pair ", "method "))
    return name not in configuration.followed and not follows


def _lengths(configuration: Configuration, setup: Setup) -> Iterator[Check]:
    tokens, turns, draft, target, _ = setup.run_policy.bounds()
    origin = configuration.settings["max_tokens"].origin
    seen = (
        f"{tokens:,} tokens per rollout ({origin}), chunks of {draft} (draft) and {target} "
        f"(target), {counted(turns, 'turn')}"
    )
    yield Check("lengths", "ok", seen, _sentence(setup.unknown_kind_advice))
    for warning in setup.warnings:
        seen, _, advice = warning.partition("; ")
        yield Check("lengths", "warn", seen, _sentence(advice))


def _sentence(text: str) -> str:
    """Return the text with a capital first letter. `str.capitalize` would also change the rest."""
    return text[:1].upper() + text[1:]


def _disk(directory: Path) -> Iterator[Check]:
    nearest = next(
        folder for folder in (directory, *directory.absolute().parents) if folder.exists()
    )
    free = shutil.disk_usage(nearest).free / 1e9
    status: Status = "ok"
    advice = ""
    if free < _TIGHT_GB:
        status = "fail" if free < _FULL_GB else "warn"
        advice = (
            "Free some space, or put the run elsewhere with --out; the run's journal stores "
            "every token"
        )
    yield Check("disk", status, f"{free:,.1f} GB free for runs in {directory.parent}", advice)


def _memory(configuration: Configuration, pair: Pair | None, card: str | None) -> Iterator[Check]:
    """Yield a check for each kind of card: whether the method's models fit, and each server's share
    of memory.

    If this machine does not have a kind of card, its check warns instead of passing, because the
    servers may run on another machine.
    """
    if pair is None or not pair.size("target").layers:
        return
    here = [name for name, _ in _cards_here()]
    setup = configuration.setup()
    tokens = setup.run_policy.bounds().max_tokens
    if not card and not here:
        yield _memory_elsewhere(configuration, pair)
        return
    kinds = [card] if card else sorted(set(here))
    if configuration["backend"] == "local":
        for kind in kinds:
            yield _local_memory(pair, setup, kind, here)
        return
    for kind in kinds:
        placement = gpu_placement(pair, kind, tokens, roles=setup.roles)
        if placement is None:
            yield Check(
                "memory", "fail", f"{pair.name} does not fit even on eight cards of kind {kind}"
            )
            continue
        seen = f"{placement}; the cache has room for {counted(placement.rollouts, 'rollout')}"
        start = f"`atts pairs {pair.name} --card {kind}` prints the commands that start the servers"
        if kind not in here:
            advice = f"Run `atts doctor` on the machine where the servers will run; {start}"
            yield Check("memory", "warn", f"{seen}; this machine has no {kind}", advice)
        elif placement.count > here.count(kind):
            yield Check("memory", "fail", seen, "Use a smaller pair, or larger cards")
        else:
            yield Check("memory", "ok", seen, start)


def _memory_elsewhere(configuration: Configuration, pair: Pair) -> Check:
    """Return a warning that this machine has no GPU. The warning names the cards on which the
    models would fit.
    """
    setup = configuration.setup()
    tokens = setup.run_policy.bounds().max_tokens
    fitting = list[str]()
    for kind in USUAL_CARDS:
        placement: GpuPlacement | LocalPlacement | None
        if configuration["backend"] == "local":
            placement = local_placement(pair, kind, tokens, setup.concurrency, (1, 2), setup.roles)
        else:
            placement = gpu_placement(pair, kind, tokens, roles=setup.roles)
        if placement is not None:
            is_quantized = isinstance(placement, GpuPlacement) and placement.is_quantized
            form = " (target in fp8)" if is_quantized else ""
            fitting.append(f"{placement.count} x {kind}{form}")
    held_by = (
        f"{pair.name} needs {' or '.join(fitting)}"
        if fitting
        else f"no common card has room for {pair.name}"
    )
    seen = f"this machine has no GPU; {held_by}"
    return Check(
        "memory", "warn", seen, "Name a card with --card to see each model's share of its memory"
    )


def _local_memory(pair: Pair, setup: Setup, kind: str, here: Sequence[str]) -> Check:
    """Check whether the models fit on GPUs of one kind in this process, by the same rules as when
    engines open.
    """
    tokens = setup.run_policy.bounds().max_tokens
    counts = tuple(range(1, min(2, here.count(kind)) + 1)) or (1, 2)
    placement = local_placement(pair, kind, tokens, setup.concurrency, counts, setup.roles)
    serve = (
        f"`atts pairs {pair.name} --card {kind}` prints the commands that start servers for the "
        "pair"
    )
    if placement is None:
        seen = f"{pair.name} does not fit on {counts[-1]} x {kind} in this process"
        return Check(
            "memory", "fail" if kind in here else "warn", seen, f"Use servers instead: {serve}"
        )
    room = f"the cache has room for {counted(placement.rollouts, 'rollout')} at the same time"
    seen = f"{placement}; {room}"
    if kind not in here:
        return Check("memory", "warn", f"{seen}; this machine has no {kind}", serve)
    return Check("memory", "ok", seen)


def _cards_here() -> Iterator[tuple[str, float]]:
    """Yield the kind and the memory in gigabytes of every GPU of this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    for line in done.stdout.splitlines():
        if not line.strip().isdecimal():
            continue
        memory = int(line) * 1.048576e-3  # `nvidia-smi` prints MiB; CARDS has gigabytes
        # The driver reserves some memory. So a card may report up to 8 % less memory than CARDS
        # says.
        fitting = [name for name, size in CARDS.items() if size <= memory * 1.08]
        yield max(fitting, key=lambda name: CARDS[name], default="rtx4090"), memory


async def _engines(setup: Setup, pair: Pair | None) -> AsyncIterator[Check]:
    """Yield the checks of each engine, and then the checks of both engines together if all could be
    opened.
    """
    opened: dict[Role, Engine] = {}
    async with AsyncExitStack() as stack:
        draft, target = setup.engines()
        for role in setup.roles:
            engine = draft if role == "draft" else target
            try:
                if engine not in opened.values():
                    await stack.enter_async_context(engine)
                opened[role] = engine
            except ATTSError as error:
                advice = ""
                # The start command of the server helps only if no server answered at the address.
                if pair is not None and isinstance(error, EngineUnavailable):
                    advice = (
                        f"`atts pairs {pair.name} --card CARD` prints the start command of "
                        "the server"
                    )
                yield Check(role, "fail", str(error), advice)
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
            f"the server runs {spec.model}, but the pair names {wanted}",
            "The pair's calibration scores and prompts may not suit this model",
        )
    finding = dict(spec.findings).get("speculation", "")
    if finding and "does not speculate" not in finding:
        yield Check(
            role,
            "warn" if finding.startswith("unknown") else "ok",
            f"speculation: {finding.partition(': ')[2]}",
        )
    for name, finding in spec.findings:
        if finding.startswith("no") and name in ("cache", "abort", "seeds"):
            yield Check(
                role,
                "warn",
                f"{name}: {finding}",
                "See docs/servers.md for the server flag that enables this feature",
            )


def _together(setup: Setup, engines: Mapping[Role, Engine]) -> Iterator[Check]:
    """Yield checks of the capabilities, tokenizers, chat templates and contexts of the models that
    the method uses.
    """
    gate, _ = setup.decider()
    policy = setup.run_policy
    draft, target = _draft_and_target(engines)
    both = "both models" if len(engines) == 2 else "the model"
    try:
        check_engines(policy, gate, draft.spec, target.spec)
        yield Check("abilities", "ok", f"{both} can do what the method {setup.method} needs")
    except ATTSError as error:
        yield Check("abilities", "fail", str(error))
    for role, engine in engines.items():
        is_hot = "processed" in dict(engine.spec.findings).get("convention", "")
        if is_hot and role in needed_logprobs(policy, gate, draft.spec, target.spec):
            advice = "Start SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
            yield Check(
                role,
                "warn",
                "the server's log-probabilities depend on the temperature, so atts scores every "
                "chunk again to get raw ones",
                advice,
            )
    if len(engines) == 2:
        seen = "one tokenizer for both models"
        if draft.spec.tokenizer != target.spec.tokenizer:
            seen = (
                "the models have different tokenizers: atts encodes each chunk once for each "
                "model, and scores are means per token"
            )
        yield Check("tokenizers", "ok", seen)
    yield from _templates(setup, engines)
    yield from _unknown_kinds(setup, engines)
    shortest = min(draft.spec.context_length, target.spec.context_length)
    most = policy.bounds().max_tokens
    # A run reduces a default limit to the context, but not a limit that the user set.
    used = setup.policy_within(shortest).bounds().max_tokens
    if shortest <= used:
        yield Check(
            "context",
            "warn",
            f"the context has only {shortest:,} tokens, but a rollout may have {most:,}, not "
            "counting its prompt",
            "Serve with a longer context (--max-model-len), or leave --max-tokens out: atts then "
            "reduces the default to the context",
        )
    elif used < most:
        yield Check(
            "context",
            "warn",
            f"the context has only {shortest:,} tokens, so rollouts get at most {used:,} tokens "
            f"instead of {most:,}",
            "For longer rollouts, serve with a longer context (--max-model-len)",
        )
    else:
        yield Check(
            "context",
            "ok",
            f"the context of {shortest:,} tokens has room for a problem and a rollout of "
            f"{most:,} tokens",
        )


def _templates(setup: Setup, engines: Mapping[Role, Engine]) -> Iterator[Check]:
    """Yield checks of whether each chat template accepts the prompt, and whether it begins the
    answer with <think>.
    """
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
            "The target will therefore give the draft's first chunks a low probability, so expect "
            "more escalations"
        )
        yield Check(
            "templates",
            "warn",
            f"only the template of the {opens} begins the answer with <think>",
            advice,
        )


def _unknown_kinds(setup: Setup, engines: Mapping[Role, Engine]) -> Iterator[Check]:
    """Yield a warning if models of unknown kind turn out not to reason, once their servers have
    named their tokenizers.
    """
    folders: dict[str, Path | None] = {
        role: getattr(engine.tokenizer, "folder", None) for role, engine in engines.items()
    }
    are_instruct = all(
        folder is not None and budget_of_folder(folder) == INSTRUCT for folder in folders.values()
    )
    if not setup.unknown_kind_advice or not are_instruct:
        return
    added = [
        f"?tokenizer={folders[role]} to the address of the {role}"
        for role, address in zip(setup.roles, map(str, setup.asked), strict=True)
        if "://" in address and "tokenizer=" not in address
    ]
    if not added:
        return
    yield Check(
        "lengths",
        "warn",
        "the chat templates have no reasoning marks, but rollouts get the limits of reasoning models",
        f"Add {' and '.join(added)}",
    )


def _draft_and_target(engines: Mapping[Role, Engine]) -> tuple[Engine, Engine]:
    """Return the engines of draft and target; if the method uses only one engine, return it for
    both roles.
    """
    only, *_ = engines.values()
    return engines.get("draft", only), engines.get("target", only)


async def _trial(setup: Setup, engines: Mapping[Role, Engine]) -> Check:
    """Let the draft write one short chunk, and let the target score the chunk if it can score."""
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
    return Check(
        "trial",
        "ok",
        f"the draft wrote {len(written.ids)} tokens with a perplexity of {scores.perplexity:.2f} "
        f"under the target",
    )
