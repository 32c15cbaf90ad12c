"""Padded pairs on the device: the embedded models' answers, at the cost of large ones, method
beside method.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio

from atts.calibration import HOLD, Calibrator, StoredScores, Tuning
from atts.concurrency import collect
from atts.core import Outcome, Problem, SampleRequest, Sampling, TokenIds
from atts.evaluators import extract
from atts.evaluators.datasets.arithmetic import problems
from atts.graph import Graph
from atts.local import LocalEngine, LocalOptions
from atts.methods import GateInputs, preset
from atts.models import path, scores_path
from atts.pipelines import (
    SMALL,
    Answers,
    Context,
    Gate,
    Policy,
    RoundGate,
    needed_logprobs,
    prompt_of,
    solve,
)
from atts.run import EngineCalls
from atts.sampling import Seed
from scripts.studies.gpu_lab import Lab, OutOfTime
from scripts.studies.padded import padded_folder

ARMS = ("target-only", "atts", "exact", "draft-only")
RATE = 0.2
_BLOCK = 6  # questions under one number of rollouts before the next


def folder_of(model: Literal["draft", "target"], pad: str) -> Path:
    """Return the embedded model's folder, padded to that size where one is named."""
    folder = Path(path(model))
    return padded_folder(folder, pad) if pad else folder


def options(lab: Lab, **changes: Any) -> LocalOptions:
    """Return the options of an engine on the device; a process of its own on a GPU."""
    settings: dict[str, Any] = {"device": lab.device.type, "kv_tokens": lab.sizes.cache}
    settings |= {"worker": "process" if lab.is_cuda else "thread", "chunk_tokens": 2048}
    settings |= {"kernel": "torch", "dtype": str(lab.half).removeprefix("torch.")}
    return LocalOptions(**{**settings, **changes})


class Pair:
    """Both engines, open."""

    def __init__(self, draft: LocalEngine, target: LocalEngine) -> None:
        self._draft = draft
        self._target = target
        # each learns from one question for the next
        self._gates: dict[tuple[str, int], Gate | RoundGate] = {}

    async def answer(self, arm: str, problem: Problem, samples: int, seed: int) -> dict[str, Any]:
        """What one question comes to, its rollouts side by side, and the seconds until the vote."""
        chosen = preset(arm)
        policy = chosen.policy(Policy(samples=samples)).filled(SMALL)
        gate = self._gates.setdefault((arm, samples), chosen.gate(GateInputs(_calibrator(samples))))
        answers = Answers(
            partial(extract, kind="math", fallback="none"), _by_spelling, extract_finished=extract
        )
        needed = needed_logprobs(policy, gate, self._draft.spec, self._target.spec)
        context = Context(
            self._draft,
            self._target,
            gate,
            answers=answers,
            bind=EngineCalls,
            seed=seed,
            logprobs=needed,
        )
        began = anyio.current_time()
        (result,) = await Graph(rollouts=samples).run(
            [problem], lambda one, scope: solve(one, policy, context, scope)
        )
        if result.error is not None:
            raise result.error
        assert result.value is not None, "no error, so an outcome"
        return {"seconds": anyio.current_time() - began, **_figures(result.value)}


def _figures(outcome: Outcome) -> dict[str, float]:
    usage = outcome.usage
    answer = outcome.problem.answer
    ended = [line for line in outcome.rollouts if line.finish not in ("settled", "cancelled")]
    return {
        "right": float(outcome.answer == answer),
        "share": sum(line.answer == answer for line in ended) / max(1, len(ended)),
        "draft": usage.draft_tokens,
        "scored": usage.scored_tokens,
        "target": usage.target_tokens,
        "drawn": usage.drawn_tokens,
    }


def _calibrator(samples: int) -> Calibrator:
    tuning = Tuning.for_rollouts(samples)
    return Calibrator(RATE, "aci", stored=_stored(), hold=max(HOLD, samples), tuning=tuning)


def _by_spelling(answers: Sequence[str]) -> list[int]:
    """Answers of the embedded models are whole numbers: equal ones are spelled alike."""
    known: dict[str, int] = {}
    return [known.setdefault(answer.strip(), len(known)) for answer in answers]


def _stored() -> StoredScores:
    """The scores that come with the pair, read without their conditions: padding and types differ
    from those.
    """
    state: dict[str, Any] = json.loads(scores_path().read_text(encoding="utf-8"))
    scores, questions, turns, lengths = (
        tuple(state[name]) for name in ("scores", "questions", "turns", "lengths")
    )
    return StoredScores(scores, questions, turns, lengths=lengths)


@asynccontextmanager
async def opened(lab: Lab, draft: str, target: str) -> AsyncGenerator[Pair]:
    """The pair padded to these sizes."""
    small = LocalEngine(folder_of("draft", draft), name="draft", options=options(lab))
    large = LocalEngine(folder_of("target", target), name="target", options=options(lab))
    async with large, small:  # the large one first: what it needs is known, the other takes little
        yield Pair(small, large)


def pair_cells(lab: Lab, draft: str, target: str) -> None:
    """Question after question, arms in turn, for every number of rollouts; whatever is finished is
    kept.

    :raises OutOfTime: there is not enough left for another question.
    """
    cells = {
        f"pair | {draft} | {target} | {samples} | {number} | {arm}": (samples, number, arm)
        for block in range(0, lab.sizes.questions, _BLOCK)
        for samples in lab.sizes.samples
        for number in range(block, min(block + _BLOCK, lab.sizes.questions))
        for arm in (*ARMS[number % len(ARMS) :], *ARMS[: number % len(ARMS)])
    }
    if missing := lab.missing(cells, 40.0):
        anyio.run(_answer_all, lab, draft, target, {name: cells[name] for name in missing})


async def _answer_all(
    lab: Lab, draft: str, target: str, cells: Mapping[str, tuple[int, int, str]]
) -> None:
    asked = problems("test", 2 + lab.sizes.questions)
    warmed = set[int]()
    async with opened(lab, draft, target) as pair:
        for name, (samples, number, arm) in cells.items():
            if samples not in warmed:  # sizes of steps are captured, kernels compiled
                for each in ARMS:
                    await pair.answer(each, asked[-1], samples, 7)
                warmed.add(samples)
            found = await pair.answer(arm, asked[number], samples, 11 + number)
            lab.cell(name, partial(dict, found))
            if lab.left < 3 * found["seconds"]:
                raise OutOfTime


_WAYS: Mapping[str, dict[str, Any]] = {
    "off": {},
    "auto": {"speculate": "auto"},
    "k=3": {"speculate": "draft", "k": 3},
    "k=6": {"speculate": "draft", "k": 6},
    "suffix": {"speculate": "suffix"},
}


def speculation_cells(lab: Lab, draft: str, target: str) -> None:
    """The target alone, writing with and without proposals, at several numbers of rollouts."""
    for way, changes in _WAYS.items():
        cells = {
            f"speculation | {draft} | {target} | {way} | {count}": count
            for count in lab.sizes.rollouts
        }
        if missing := lab.missing(cells, 30.0):
            lent = {"drafter": str(folder_of("draft", draft))} if changes else {}
            own = options(lab, **lent, **changes)
            todo = {name: cells[name] for name in missing}
            anyio.run(_write_all, lab, folder_of("target", target), own, todo)


async def _write_all(
    lab: Lab, folder: Path, options: LocalOptions, cells: Mapping[str, int]
) -> None:
    async with LocalEngine(folder, name="target", options=options) as engine:
        prompts = [
            engine.tokenizer.render(prompt_of(problem, Policy())) for problem in problems("test", 8)
        ]
        for name, count in cells.items():
            done = [
                await _round(engine, prompts[seed], count, seed, 2 * lab.sizes.tokens)
                for seed in range(5)
            ][2:]
            stats = engine.loop_stats().speculation
            found = {"tokens": sum(n for n, _ in done), "seconds": sum(s for _, s in done)}
            found |= {"proposed": stats.proposed, "accepted": stats.accepted} if stats else {}
            lab.cell(name, partial(dict, found))
            if lab.left < 10.0:
                raise OutOfTime


async def _round(
    engine: LocalEngine, prompt: TokenIds, count: int, seed: int, tokens: int
) -> tuple[int, float]:
    """Tokens and seconds of some rollouts on one question."""
    seeds = [Seed(seed, sample=n) for n in range(count)]
    requests = [
        SampleRequest(prompt, tokens, Sampling(0.7), one, rollout=str(one.sample)) for one in seeds
    ]
    began = anyio.current_time()
    replies = await collect([partial(engine.sample, request) for request in requests])
    return sum(len(reply.ids) for reply in replies), anyio.current_time() - began
