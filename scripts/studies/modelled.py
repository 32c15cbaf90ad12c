"""Model engines without a model: what their steps cost, and how long reasoning texts are."""

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
from scripts.studies.harness import traces


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step: `step` + `sequence` x batch + `cached` x KV tokens read + `prefilled` x
    tokens fed.

    `request` is what the step that takes a request in costs more (admission, cache, another batch);
    `call` what a request costs its host beside steps (hand-over, event loop, pipeline). `share` is
    by how much a step is stretched while the other engine is at work on the same processors; 1:
    they do not share any.
    """

    step: float
    sequence: float
    cached: float
    prefilled: float
    request: float = 0.0
    call: float = 0.0
    share: float = 1.0
    origin: str = ""

    def seconds(self, batch: int, cached: float, fed: float = 0.0) -> float:
        """Return the seconds of a step that decodes `batch` sequences with `cached` tokens between
        them and feeds `fed` tokens.
        """
        return self.step + self.sequence * batch + self.cached * cached + self.prefilled * fed

    def steps(self, count: int, batch: int, cached: float) -> float:
        """Return the seconds of `count` decoding steps in a row, in which every sequence grows by
        one token per step.
        """
        grown = cached * count + batch * count * (count - 1) / 2
        return count * (self.step + self.sequence * batch) + self.cached * grown

    def steps_within(self, seconds: float, batch: int, cached: float) -> int:
        """Return how many such steps have ended after that long."""
        linear = self.step + self.sequence * batch + self.cached * cached - self.cached * batch / 2
        square = self.cached * batch / 2
        if square <= 0:
            return int(seconds / linear + 1e-9)
        return int(
            (-linear + math.sqrt(linear * linear + 4 * square * seconds)) / (2 * square) + 1e-9
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one installation: costs, and how many KV tokens each has room for."""

    name: str
    draft: Cost
    target: Cost
    draft_kv: int
    target_kv: int


_MS = 1e-3
_OVERHEAD = 1.207 * _MS
"""Per step beside the model, of the same simulator the 8B row comes from."""

TARGET_70B = Cost(
    18.35 * _MS,
    0.0243 * _MS,
    6.24e-5 * _MS,
    0.0640 * _MS,
    origin="Llama 70B, 4 x H100, fitted in the TurboSpec fork",
)
DRAFT_8B = Cost(
    5.886 * _MS + _OVERHEAD,
    0.02101 * _MS,
    3.93e-5 * _MS,
    0.02101 * _MS,
    origin="Llama 8B, H100, SpecDecode-Bench",
)
DRAFT_1B = Cost(
    5.886 * _MS * 1.54 / 8.03 + _OVERHEAD,
    0.02101 * _MS * 1.54 / 8.03,
    3.93e-5 * _MS * 14336 / 65536,
    0.02101 * _MS * 1.54 / 8.03,
    origin="ours: the 8B row scaled by weights (1.54/8.03) and by KV bytes a token, step overhead "
    "kept",
)
# bytes left after weights / bytes a token (80 layers, 8 KV heads)
_ROOM_70B = int((4 * 80e9 * 0.9 - 141e9) / 327_680)
_ROOM_8B = int((80e9 * 0.9 - 16.1e9) / 131_072)
_ROOM_1B = int((80e9 * 0.9 - 3.1e9) / 28_672)

PAIRS: Mapping[str, Pair] = {
    "1.5B/70B": Pair("1.5B/70B", DRAFT_1B, TARGET_70B, _ROOM_1B, _ROOM_70B),
    "8B/70B": Pair("8B/70B", DRAFT_8B, TARGET_70B, _ROOM_8B, _ROOM_70B),
}
"""Each with one H100 for the draft and four for the target."""


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
        """Return the deviation of a rollout's log length within its question."""
        each = [
            [math.log(r.tokens) for r in lines if math.isfinite(r.tokens)]
            for lines in self.questions
        ]
        return float(np.sqrt(np.mean([stdev(logs) ** 2 for logs in each if len(logs) > 1])))


def find_library() -> Library:
    """Return the recorded run if its data is at hand, else a synthetic one that says so."""
    found = recorded_rollouts()
    return synthetic_library() if found is None else read_library(found)


def recorded_rollouts(folder: Path | None = None, run: str = "ct0") -> list[dict[str, Any]] | None:
    """Return the rollouts of one recorded run, turn by turn, if they are at hand."""
    place = folder or traces()
    if place is None:
        return None
    with gzip.open(place / "draft_target.jsonl.gz", "rt") as lines:
        return [record for line in lines if (record := json.loads(line))["run"] == run]


def read_library(found: Sequence[Mapping[str, Any]]) -> Library:
    """Return the rollouts of a run.

    Characters become tokens at the rate of chunks that were cut at their limit.
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
    """Make log-normal lengths and scores with about the recorded spreads, for machines without the
    traces.

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
        """Return one id, whatever the text."""
        return (_WORD,)

    def decode(self, ids: Sequence[int]) -> str:
        """Return no text."""
        return ""

    def render(self, messages: Sequence[Message]) -> TokenIds:
        """Return as many ids as a prompt has."""
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
        """Return an engine that any text fits into."""
        return EngineSpec(role, f"law of {role}", self.tokenizer.digest, 1 << 24, (_END,), 8)

    def problems(self, count: int) -> list[Problem]:
        """Return problems with the recorded questions' habits, each question equally often."""
        return [Problem(f"q{number}", f"q{number}", None, "text") for number in range(count)]

    def write(self, role: Role, request: SampleRequest) -> Completion:
        """Write as much as is asked for, or what is left until the answer."""
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
        """Return the score recorded nearest to this place of the rollout."""
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
    """Group equal strings."""
    places = {answer: place for place, answer in enumerate(dict.fromkeys(answers))}
    return [places[answer] for answer in answers]


ANSWERS = Answers(lambda text: text or None, _classes)
"""The answer of a law's text: what was written, if anything."""
