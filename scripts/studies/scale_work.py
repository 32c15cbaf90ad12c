"""What reasoning looks like to an engine without a model: lengths, scores and answers drawn from
recorded runs.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median, stdev
from typing import Any

import numpy as np

from atts.core import Completion, Message, Problem, Role, SampleRequest, ScoreRequest, TokenIds
from atts.engine import EngineSpec
from atts.pipelines import Answers
from atts.sampling import Seed, generator
from scripts.studies.calibration import traces

CHUNK = 500  # tokens of a full chunk in the recorded runs
PROMPT = 150  # tokens of a problem with its instructions; the traces do not say
_WORD = 1
_END = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded rollout: tokens until its answer (inf: it never came to one), and its scores
    along the way.
    """

    tokens: float
    starts: tuple[float, ...]  # tokens before each scored chunk
    scores: tuple[float, ...]
    answer: str | None


@dataclass(frozen=True, slots=True)
class Library:
    """Recorded rollouts by question, and where they come from."""

    questions: tuple[tuple[Recorded, ...], ...]
    origin: str

    @property
    def spread(self) -> float:
        """The deviation of a rollout's log length within its question."""
        each = [
            [math.log(r.tokens) for r in lines if math.isfinite(r.tokens)]
            for lines in self.questions
        ]
        return float(np.sqrt(np.mean([stdev(logs) ** 2 for logs in each if len(logs) > 1])))


def find_library() -> Library:
    """The recorded run where its data is at hand, else a synthetic one that says so."""
    found = recorded_rollouts()
    return synthetic_library() if found is None else read_library(found)


def recorded_rollouts(folder: Path | None = None, run: str = "ct0") -> list[dict[str, Any]] | None:
    """The rollouts of one recorded run, turn by turn, where they are at hand."""
    place = folder or traces()
    if place is None:
        return None
    with gzip.open(place / "draft_target.jsonl.gz", "rt") as lines:
        return [record for line in lines if (record := json.loads(line))["run"] == run]


def read_library(found: Sequence[Mapping[str, Any]]) -> Library:
    """The rollouts of a run; characters become tokens at the rate of chunks that were cut at their
    limit.
    """
    full = [
        t["draft_chars"]
        for r in found
        for t in r["turns"][:-1]
        if t["draft_chars"] and not t["draft_boxed"]
    ]
    characters = median(full) / CHUNK
    questions: dict[int, list[Recorded]] = {}
    for record in found:
        questions.setdefault(record["question_id"], []).append(_rollout(record, characters))
    words = f"{len(found)} rollouts of {len(questions)} MATH-500 questions, R1-Distill-Llama-8B with QwQ-32B"
    return Library(
        tuple(tuple(questions[q]) for q in sorted(questions)), f"run {found[0]['run']}: {words}"
    )


def _rollout(record: Mapping[str, Any], characters: float) -> Recorded:
    starts = list[float]()
    scores = list[float]()
    tokens = 0.0
    for turn in record["turns"]:
        if turn["ppl"] is not None:
            starts.append(tokens)
            scores.append(float(turn["ppl"]))
        tokens += ((turn["draft_chars"] or 0) + (turn["target_chars"] or 0)) / characters
    answer = record["answer_direct"].strip()
    found = answer if answer and answer != "invalid" else None
    return Recorded(max(tokens, 1.0) if found else math.inf, tuple(starts), tuple(scores), found)


def synthetic_library(questions: int = 100, samples: int = 16, seed: int = 0) -> Library:
    """Where the traces are not at hand: log-normal lengths and scores with about the spreads that
    were recorded.

    Between questions and within, the deviations are .75 and .45 (log tokens) and .55 and .47 (log
    of mean negative log-probability, median .47 nats); one rollout in twenty never ends; wrong
    answers come in a few kinds.
    """
    draw = np.random.default_rng(seed)
    table = list[tuple[Recorded, ...]]()
    for question in range(questions):
        length = draw.normal(7.0, 0.75)
        level = draw.normal(math.log(0.47), 0.55)
        skill = draw.beta(2.4, 0.6)
        lines: list[Recorded] = []
        for _ in range(samples):
            tokens = math.exp(draw.normal(length, 0.45))
            starts = tuple(float(start) for start in range(0, int(tokens) + 1, CHUNK))
            scores = tuple(math.exp(math.exp(draw.normal(level, 0.47))) for _ in starts)
            kind = "right" if draw.random() < skill else f"wrong {draw.integers(3)}"
            ends = draw.random() > 0.05
            lines.append(
                Recorded(
                    tokens if ends else math.inf,
                    starts,
                    scores,
                    f"{question} {kind}" if ends else None,
                )
            )
        table.append(tuple(lines))
    return Library(
        tuple(table),
        "synthetic: log-normal lengths and scores (the recorded traces are not at hand)",
    )


class NoText:
    """A tokenizer for texts that are never read."""

    def __init__(self, grain: int) -> None:
        self._prompt: TokenIds = (_WORD,) * max(1, PROMPT // grain)
        self.digest = "no text"

    def encode(self, text: str) -> TokenIds:
        """One id, whatever the text."""
        return (_WORD,)

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing."""
        return ""

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """As many ids as a prompt has."""
        return self._prompt


class TraceLaw:
    """Reasoning as work to be done: a rollout's answer comes once so many tokens were written,
    whichever model writes.

    How many is drawn per (problem, sample) from the question's recorded rollouts, smoothed (a
    log-normal kernel of Silverman's width), so that 256 samples do not repeat 16. Scores and
    answers are those recorded at that place. So methods differ in who writes and who waits, not in
    how much is written: accuracy is not a result of this law.
    """

    def __init__(self, library: Library, seed: int = 0, grain: int = 10) -> None:
        self.library = library
        self.grain = grain  # real tokens per id
        self.tokenizer = NoText(grain)
        self._seed = seed
        self._kernel = 1.06 * library.spread * 16 ** (-1 / 5)
        self.rollout = lru_cache(maxsize=1 << 16)(self._rollout)

    def spec(self, role: Role) -> EngineSpec:
        """An engine that any text fits into."""
        return EngineSpec(role, f"law of {role}", self.tokenizer.digest, 1 << 24, (_END,), 8)

    def problems(self, count: int) -> list[Problem]:
        """Problems with the recorded questions' habits, each question equally often."""
        return [Problem(f"q{number}", f"q{number}", None, "text") for number in range(count)]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """As much as is asked for, or what is left until the answer."""
        needed, recorded = self.rollout(request.seed.problem, request.seed.sample)
        left = needed - self._written(len(request.ids))
        count = min(
            request.max_tokens,
            max(1, math.ceil(left / self.grain) if math.isfinite(left) else 1 << 30),
        )
        is_done = count * self.grain >= left
        text = (recorded.answer or "") if is_done else ""
        return Completion((_WORD,) * count, text, "end" if is_done else "length", (-0.5,) * count)

    def score(self, request: ScoreRequest) -> tuple[float, ...]:
        """The score recorded nearest to this place of the rollout."""
        problem, _, sample = request.rollout.rpartition("/")
        needed, recorded = self.rollout(problem, int(sample))
        if not recorded.scores:
            return (-0.5,) * len(request.suffix)
        stretch = needed / recorded.tokens if math.isfinite(needed) else 1.0
        place = bisect_right(recorded.starts, self._written(len(request.prefix)) / stretch) - 1
        return (-math.log(recorded.scores[max(0, place)]),) * len(request.suffix)

    def _written(self, ids: int) -> float:
        return (ids - len(self.tokenizer.render(()))) * self.grain

    def _rollout(self, problem: str, sample: int) -> tuple[float, Recorded]:
        draw = generator(Seed(self._seed, problem, sample, purpose="length"))
        lines = self.library.questions[int(problem[1:]) % len(self.library.questions)]
        recorded = lines[int(draw.integers(len(lines)))]
        return recorded.tokens * math.exp(self._kernel * float(draw.standard_normal())), recorded


def _classes(answers: Sequence[str]) -> Sequence[int]:
    """Classes of equal strings."""
    places = {answer: place for place, answer in enumerate(dict.fromkeys(answers))}
    return [places[answer] for answer in answers]


ANSWERS = Answers(lambda text: text or None, _classes)
"""The answer of a law's text: what was written, if anything."""
