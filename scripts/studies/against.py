"""The published implementation and what else a user would pick, on the same work: time, rates, promises."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
import numpy as np
import torch

from atts.api import Setup
from atts.api.setup import CalibrationMode
from atts.calibration.metrics import rate_metrics
from atts.core import Message, Outcome, Problem
from atts.engine import Engine
from atts.evaluators import mean_estimate
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.graph import Limit
from atts.models import path as model_path
from atts.pipelines import Policy
from atts.run import Session, evaluate
from atts.testing import Latency, ScriptedEngine, run_virtual, toy_problems
from scripts.studies.harness import Cell, Options, Spread, Table, say
from scripts.studies.pipelines_arms import Pair
from scripts.studies.pipelines_tables import interval

RATE = 0.2
Schedule = Literal["all together", "question by question"]
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A method under a schedule."""

    name: str
    method: str
    schedule: Schedule = "all together"
    mode: CalibrationMode = Setup().mode


CASES = (
    Case("atts (ours), as it comes", "atts"),
    Case("the paper's policy, our gate by question and turn", "paper", mode="question-turn"),
    Case("published: static scores, question by question", "published", "question by question"),
    Case("published rule on our scheduler", "published"),
    Case("sorted rounds (top-b)", "top-b"),
    Case("SpecReason", "spec-reason"),
    Case("Speculative Thinking", "speculative-thinking"),
    Case("target-only", "target-only"),
    Case("draft-only", "draft-only"),
)
DRAFT = Latency(per_sample=0.02, sampled_token=0.012, prefilled_token=2e-5, jitter=0.4)
TARGET = Latency(
    per_sample=0.05, sampled_token=0.045, per_score=0.05, scored_token=3e-4, prefilled_token=1e-4, jitter=0.4
)
SLOTS = {"draft": Limit(slots=16), "target": Limit(slots=4)}


@dataclass(slots=True)
class Sum:
    """One case: its outcomes, and by block the seconds of the loop's clock and of the processors."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    seconds: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])


def study(options: Options) -> list[Table]:
    """Scripted engines in virtual time, the embedded pair, target-only beside transformers, and the promises."""
    torch.set_num_threads(1)
    tables = [_table("scripted engines, virtual time", "seconds", _scripted(options))]
    tables.append(_table("embedded pair, live", "processor", anyio.run(_embedded, options)))
    return [*tables, _single(options), guarantees()]


def _scripted(options: Options) -> dict[str, Sum]:
    problems = toy_problems(options.pick(16, 40, 200), seed=options.seed)
    found: dict[str, Sum] = {}
    stored = run_virtual(_stored_scripted, options.seed)
    for case in CASES:
        say(f"against: scripted, {case.name}")
        found[case.name] = run_virtual(_one_scripted, case, problems, stored, options.seed)
    return found


async def _one_scripted(case: Case, problems: Sequence[Problem], stored: Sequence[float], seed: int) -> Sum:
    done = Sum()
    policy = Policy(samples=8, early_stop="none")
    async with (
        ScriptedEngine("draft", latency=DRAFT) as draft,
        ScriptedEngine("target", latency=TARGET) as target,
    ):
        await _run(case, draft, target, [problems], _setup(case, policy, stored, seed), done)
    return done


async def _stored_scripted(seed: int) -> list[float]:
    async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
        return await _stored(draft, target, toy_problems(20, seed=seed + 1), Policy(samples=4))


async def _embedded(options: Options) -> dict[str, Sum]:
    count, block = options.pick(12, 40, 500), options.pick(4, 20, 50)
    problems = arithmetic("test", count)
    blocks = [problems[i : i + block] for i in range(0, count, block)]
    found = {case.name: Sum() for case in CASES}
    base = replace(Setup().policy, samples=8, early_stop="none")
    async with Pair(worker="thread") as pair:  # whose processor time is this process's
        draft, target = pair.draft, pair.targets[1]
        stored = await _stored(draft, target, arithmetic("calibration", options.pick(8, 30, 60)), base)
        setups = {case: _setup(case, base, stored, options.seed + number) for number, case in enumerate(CASES)}
        plans = {case: setup.plan(draft, target) for case, setup in setups.items()}
        for number, part in enumerate(blocks):
            say(f"against: embedded, block {number + 1} of {len(blocks)}")
            turn = number % len(CASES)
            for case in CASES[turn:] + CASES[:turn]:
                await _run(case, draft, target, [part], setups[case], found[case.name], plans[case])
    return found


async def _stored(draft: Engine, target: Engine, problems: Sequence[Problem], policy: Policy) -> list[float]:
    """Turn-0 scores on calibration problems: what the published rule wants before a run."""
    setup = Setup(method="atts", seed=9_999, policy=replace(policy, turns=1, early_stop="none", samples=4))
    result = await evaluate(problems, setup.plan(draft, target), Session(engines="are open", signals="ignore"))
    turns = [turn for outcome in result.kept for line in outcome.rollouts for turn in line.turns]
    return [turn.score for turn in turns if turn.score is not None]


def _setup(case: Case, policy: Policy, stored: Sequence[float], seed: int) -> Setup:
    own = tuple(stored) if case.method == "published" else ()
    # the target goes on after the chunk; a chunk with an answer is judged as well
    if case.method in ("published", "paper"):
        policy = replace(policy, takeover="continue", answers="verify", repeats=15)
    return Setup(method=case.method, mode=case.mode, rate=RATE, seed=seed, policy=policy, stored=own, limits={})


async def _run(
    case: Case,
    draft: Engine,
    target: Engine,
    blocks: Sequence[Sequence[Problem]],
    setup: Setup,
    done: Sum,
    plan: Any = None,
) -> None:
    """Blocks of problems; a gate lives through all of them."""
    plan = plan or replace(setup.plan(draft, target), limits=SLOTS)
    for block in blocks:
        parts = [[problem] for problem in block] if case.schedule == "question by question" else [list(block)]
        began, used = anyio.current_time(), time.process_time()
        for part in parts:
            result = await evaluate(part, plan, Session(engines="are open", signals="ignore"))
            done.outcomes += result.kept
        done.seconds.append(anyio.current_time() - began)
        done.processor.append(time.process_time() - used)


def _table(where: str, clock: Literal["seconds", "processor"], found: Mapping[str, Sum]) -> Table:
    alone = found["target-only"]
    rows = [_row(name, clock, done, alone) for name, done in found.items()]
    count = len(alone.outcomes)
    by = {"seconds": "in virtual time", "processor": "in processor time"}[clock]
    columns = (
        "method", "vote right", f"speed-up, {by}", "target tokens, of target-only",
        "draft and scored tokens", "realised rate", "turn RMS",
        "question RMS", "worst 500 in a row",
    )  # fmt: skip
    notes = (
        "Speed-up over target-only, median over blocks. RMS: root mean square of realised minus nominal rate, of the "
        "decision each turn ended with (where the draft tries again, rejections before that one are not among them). "
        "No vote is stopped early, so all methods do all of their work. Methods without a rate show what "
        "theirs came to; the ratings that SpecReason asks for mean little to targets that never learned to rate.",
        "Live: both engines share two cores, so processor time is what a run costs here; wall time would tell how busy "
        "the machine was."
        if clock == "processor"
        else "A toy model with honest log-probabilities; 16 draft and 4 target requests at once, a draft token 12 ms, "
        "a target token 45 ms, about as in the published runs.",
    )
    title = f"Methods side by side: {where}, {count} problems x 8 samples, nominal rate {RATE:g}"
    return Table(title, columns, tuple(rows), notes)


def _row(name: str, clock: Literal["seconds", "processor"], done: Sum, alone: Sum) -> Row:
    rights = [float(outcome.answer == outcome.problem.answer) for outcome in done.outcomes]
    made = [t.decision for o in done.outcomes for line in o.rollouts for t in line.turns if t.decision is not None]
    made.sort(key=lambda d: d.issue if d.issue is not None else 0)
    scores = [d.score if d.score is not None else 1.0 for d in made]
    metrics = rate_metrics([d.question for d in made], [d.turn for d in made], scores, [d.escalate for d in made], RATE)
    pairs = zip(getattr(alone, clock), getattr(done, clock), strict=True)
    target = sum(o.usage.target_tokens for o in done.outcomes) / sum(o.usage.target_tokens for o in alone.outcomes)
    return (
        name, interval(mean_estimate(rights, len(rights))), str(Spread.of([a / b for a, b in pairs])), f"{target:.1%}",
        f"{sum(o.usage.draft_tokens for o in done.outcomes)}, {sum(o.usage.scored_tokens for o in done.outcomes)}",
        sum(d.escalate for d in made) / len(made) if made else None, metrics["turn_rms"], metrics["question_rms"],
        metrics["worst_rolling_500"],
    )  # fmt: skip


def _single(options: Options) -> Table:
    """Target-only through four programs: processor seconds for the same problems, interleaved."""
    count, samples, rounds = options.pick(2, 4, 24), options.pick(2, 4, 8), options.pick(1, 3, 5)
    arms: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    anyio.run(_alone, count, samples, rounds, arms, tokens)
    ours = arms["atts, target-only"]
    rows: list[Row] = []
    for name, seconds in arms.items():
        ratios = [b / a for a, b in zip(ours, seconds, strict=True)]
        rows.append((name, str(Spread.of(seconds)), tokens[name] / seconds[-1], str(Spread.of(ratios))))
    return Table(
        f"Target-only, four ways: {count} problems x {samples} samples, temperature 0.7, up to 256 tokens",
        ("program", "processor seconds", "tokens per processor second", "over ours"),
        tuple(rows),
        ("One thread each, interleaved. Assisted generation (speculative decoding with the draft) is limited to one "
         "sequence at a time by transformers; plain generation batches all samples of a problem.",),
    )  # fmt: skip


async def _alone(count: int, samples: int, rounds: int, arms: dict[str, list[float]], tokens: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model_path("target"), dtype=torch.float32).eval()
    small: Any = AutoModelForCausalLM.from_pretrained(model_path("draft"), dtype=torch.float32).eval()
    policy = replace(Setup().policy, samples=samples, early_stop="none", max_tokens=256)
    async with Pair(worker="thread") as pair:  # whose processor time is this process's
        target = pair.targets[1]
        for number in range(-1, rounds):
            say(f"against: target-only, round {number + 1} of {rounds}")
            problems = arithmetic("calibration", (number + 2) * count)[-count:]  # new to every cache
            prompts = [
                target.tokenizer.render([Message("system", policy.system), Message("user", p.text)]) for p in problems
            ]
            began = time.process_time()
            setup = Setup(method="target-only", seed=number + 50, policy=policy)
            plan = setup.plan(pair.draft, target)
            result = await evaluate(problems, plan, Session(engines="are open", signals="ignore"))
            seen = {"atts, target-only": (time.process_time() - began, result.usage.target_tokens)}
            seen["transformers generate, a problem's samples at once"] = _generate(theirs, prompts, samples, None)
            seen["transformers generate, one at a time"] = _generate(theirs, prompts, 1, None, samples)
            seen["transformers assisted generation"] = _generate(theirs, prompts, 1, small, samples)
            for name, (seconds, written) in seen.items() if number >= 0 else ():
                arms.setdefault(name, []).append(seconds)
                tokens[name] = written


def _generate(
    model: Any, prompts: Sequence[Sequence[int]], batch: int, small: Any, times: int = 1
) -> tuple[float, int]:
    """Processor seconds, and tokens up to each text's end."""
    written, began = 0, time.process_time()
    assisted = {} if small is None else {"assistant_model": small}
    end = model.generation_config.eos_token_id
    ends = torch.tensor(end if isinstance(end, list) else [end])
    with torch.inference_mode():
        for ids in [prompt for prompt in prompts for _ in range(times)]:
            rows = torch.tensor([list(ids)] * batch)
            out = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=256,
                do_sample=True,
                temperature=0.7,
                top_k=0,
                pad_token_id=0,
                **assisted,
            )
            new = out[:, rows.shape[1] :]
            over = torch.isin(new, ends)
            lengths = np.where(over.any(1).numpy(), over.float().argmax(1).numpy() + 1, new.shape[1])
            written += int(lengths.sum())
    return time.process_time() - began, written


def guarantees() -> Table:
    """What each method promises, for what, and what voids it."""
    rows: tuple[Row, ...] = (
        ("atts (ours), online", "share of chunks handed over, by question and turn, in the long run; p-values exact "
         "under exchangeability", "nothing", "every call resumable; decisions journalled", "an adversary who picks "
         "scores after seeing decisions"),
        ("atts (ours), split", "marginal share within 1/(n+1), finite sample", "nothing", "the same",
         "drift, other settings than calibrated (refused by fingerprint)"),
        ("atts (ours), hard cap", "never more than burst + rate x n of any n decisions", "nothing", "the same", "-"),
        ("atts (ours), certified", "accuracy loss against target-only below a bound, with stated confidence",
         "nothing", "the same", "other problems than those the certificate was earned on"),
        ("published", "marginal share at turn 0 if calibration and test questions are exchangeable",
         "all samples of a question", "existing result files are trusted", "later turns, questions, drift"),
        ("sorted rounds (top-b)", "the share of every round, exactly", "all samples of a question, every turn",
         "as atts, run by the same code", "-"),
        ("SpecReason, Speculative Thinking", "none", "nothing", "-", "-"),
        ("target-only, speculative decoding", "the target's law, exactly (ours and transformers': up to float order)",
         "nothing", "-", "-"),
    )  # fmt: skip
    columns = ("method", "promise", "waits for", "resume", "what voids it")
    return Table("What each promises", columns, rows, ("docs/guarantees.md has the statements and their tests.",))
