"""Record a bank of rollouts of a real pair, and measure on the bank how well each score finds
mistakes.

The first part records the bank: the draft's rollouts, the target's scores, and the effects of
takeovers. `RECORDING` describes the contents of a bank.

The second part computes every table from a bank, without a model: how well a score predicts
mistakes, and the gain of takeovers chosen by the score. All intervals of this part resample
problems.

The last part compares stopping rules on other recorded rollouts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from atts.analysis import Referee, RefereeOptions, RuleRow, referee_run
from atts.calibration import Examples, cross_validated, fit_judge
from atts.concurrency import collect
from atts.core import (
    Completion,
    Message,
    Problem,
    Role,
    SampleRequest,
    Sampling,
    ScoreRequest,
    TokenIds,
)
from atts.engine import Engine
from atts.evaluators import Estimate, extract, group, judge
from atts.importers import FORMATS, ImportOptions, import_rollouts
from atts.journal import RecordedRun, open_run
from atts.local import LocalEngine, LocalOptions
from atts.pipelines import Policy, judge_features
from atts.pipelines.judging import RATING
from atts.sampling import Seed
from scripts.studies.harness import Chart, Options, Row, Table, rows_of, say, traces

RECORDING = """Record a bank of rollouts of a real pair, and measure what takeovers change.

For each problem, the bank has `SAMPLES` rollouts of the draft, with the log-probabilities of both
models and the draft's entropies. It also has `TARGET_SAMPLES` rollouts of the target alone, and the
target's verdict on every finished rollout of the draft.

At some chunks of each problem, the bank has an experiment. The draft finishes the rollout
`CONTINUATIONS` times after its own chunk, and as many times after a chunk that the target wrote in
its place. The share of correct answers in the second case, minus the share in the first case, is the
measured advantage of a takeover. The target also finishes the rollout `FINISHED_BY_TARGET` times.

The bank is a file of JSON lines outside the repository. Each problem is saved when it is complete,
and the same command continues the recording. With `--rollouts-only`, only the rollouts of both
models are recorded, which is enough to compare cascades. A later run without this option adds the
scores and takeovers that are missing, and whatever an earlier version did not record.
"""

SAMPLES = 8
TARGET_SAMPLES = 4
CONTINUATIONS = 4
FINISHED_BY_TARGET = 2
MAX_TOKENS = 512
CHUNK_TOKENS = 80
STEP = "\n\n"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
SAMPLING = Sampling(temperature=0.7)
ORDERS = (("Yes", "No"), ("No", "Yes"))
PROBLEMS_AT_ONCE = 12
CACHE_TOKENS = 60_000


@dataclass(frozen=True, slots=True)
class Split:
    """Names of problems in two halves: scores are chosen on the first half and confirmed on the
    second half.
    """

    development: tuple[str, ...]
    confirmation: tuple[str, ...]


def problems() -> list[Problem]:
    """Return GSM8K's test problems and MATH-500's of levels 1 to 3, mixed by a fixed seed."""
    chosen: list[Problem] = []
    for row in rows_of("benchmarks/gsm8k_test.jsonl"):
        chosen.append(Problem(row["id"], row["problem"], row["answer"], source="gsm8k"))
    simple = [row for row in rows_of("benchmarks/math500.jsonl") if int(row["level"]) <= 3]
    for row in simple:
        chosen.append(Problem(row["id"], row["problem"], row["answer"], source="math500"))
    order = random.Random(20261126)
    gsm8k = [problem for problem in chosen if problem.source == "gsm8k"]
    math500 = [problem for problem in chosen if problem.source == "math500"]
    order.shuffle(gsm8k)
    order.shuffle(math500)
    mixed = [problem for pair in zip(gsm8k, math500, strict=False) for problem in pair]
    return mixed


def split(names: Sequence[str]) -> Split:
    """Divide problems between the development half and the confirmation half, two at a time, so
    that both halves contain both sources.
    """
    development = tuple(name for index, name in enumerate(names) if index % 4 < 2)
    confirmation = tuple(name for index, name in enumerate(names) if index % 4 >= 2)
    return Split(development, confirmation)


class Recorder:
    """Makes the records of one problem, with a draft and a target that share a tokenizer."""

    def __init__(
        self, draft: Engine, target: Engine, is_whole: bool = True, experiments: int = 1
    ) -> None:
        self.draft = draft
        self.target = target
        self.is_whole = is_whole
        # number of chunks of each problem at which a takeover is measured
        self.experiments = experiments
        self._system = Policy().system

    def prompt(self, problem: Problem) -> TokenIds:
        """Return the token ids of the problem's prompt, up to the place where the answer begins."""
        return self.draft.tokenizer.render(
            [Message("system", self._system), Message("user", problem.text)]
        )

    async def records(self, problem: Problem) -> list[dict[str, Any]]:
        """Make all records of a problem with both models, and return them."""
        prompt = self.prompt(problem)
        draft = partial(self.drafted, problem, prompt)
        rollouts = await collect([partial(draft, sample) for sample in range(SAMPLES)])
        target = partial(self.written_by_target, problem, prompt)
        others = await collect([partial(target, sample) for sample in range(TARGET_SAMPLES)])
        if not self.is_whole:
            return [*rollouts, *others]
        return [*rollouts, *others, *await self.takeovers(problem, prompt, rollouts, [])]

    async def missing(
        self, problem: Problem, recorded: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Make the records that a problem still lacks, and return them."""
        prompt = self.prompt(problem)
        drafts = [one for one in recorded if one["kind"] == "draft"]
        before = [one for one in recorded if one["kind"] == "takeover"]
        fields = await collect([partial(self.readings, problem, prompt, one) for one in drafts])
        records: list[dict[str, Any]] = []
        for one, more in zip(drafts, fields, strict=True):
            if more:
                name = {"kind": "added", "problem": problem.id, "sample": one["sample"]}
                records.append({**name, "fields": more})
        return records + await self.takeovers(problem, prompt, drafts, before)

    async def readings(
        self, problem: Problem, prompt: TokenIds, rollout: dict[str, Any]
    ) -> dict[str, Any]:
        """Compute the fields that the record of a finished draft rollout still lacks, with both
        models.
        """
        ids = tuple(rollout["ids"])
        fields: dict[str, Any] = {}
        if "chunk_texts" not in rollout:
            fields["chunk_texts"] = self.texts(ids, rollout["chunks"])
        if "draft_entropies" not in rollout:
            read = await self.draft.score(ScoreRequest(prompt, ids, entropies=True))
            fields["draft_entropies"] = _rounded([-value for value in read.logprobs])
        if "target_logprobs" not in rollout:
            scores = await self.target.score(ScoreRequest(prompt, ids))
            fields["target_logprobs"] = _rounded(scores.logprobs)
        if "said_correct" not in rollout:
            fields["said_correct"] = await self.asked(problem, rollout["text"], WHOLE)
        return fields

    async def write(
        self, role: Role, ids: TokenIds, tokens: int, seed: Seed, stop: tuple[str, ...] = ()
    ) -> Completion:
        """Let a model continue these token ids, and return the completion."""
        engine = self.draft if role == "draft" else self.target
        return await engine.sample(SampleRequest(ids, tokens, SAMPLING, seed, stop))

    def chunks(self, ids: TokenIds) -> list[int]:
        """Return the index at which each chunk ends: after a blank line, or at the maximum length
        of a chunk.
        """
        ends: list[int] = []
        begin = 0
        for index in range(len(ids)):
            length = index + 1 - begin
            if length >= CHUNK_TOKENS or STEP in self.draft.tokenizer.decode(
                ids[begin : index + 1]
            ):
                ends.append(index + 1)
                begin = index + 1
        if begin < len(ids):
            ends.append(len(ids))
        return ends

    def texts(self, ids: TokenIds, ends: Sequence[int]) -> list[str]:
        """Return the text of each chunk."""
        begins = [0, *ends[:-1]]
        decode = self.draft.tokenizer.decode
        return [decode(ids[begin:end]) for begin, end in zip(begins, ends, strict=True)]

    def verdict(self, problem: Problem, text: str) -> tuple[str | None, bool]:
        """Return the answer of a finished text, and whether the answer is correct."""
        answer = extract(text)
        return answer, answer is not None and judge(problem, answer).status == "equal"

    async def drafted(self, problem: Problem, prompt: TokenIds, sample: int) -> dict[str, Any]:
        """Return one rollout of the draft, with the target's log-probabilities and the verdict on
        the answer.
        """
        done = await self.write("draft", prompt, MAX_TOKENS, Seed(1, problem.id, sample))
        answer, is_right = self.verdict(problem, done.text)
        record = {
            "kind": "draft",
            "problem": problem.id,
            "source": problem.source,
            "sample": sample,
            "ids": done.ids,
            "text": done.text,
            "ended": done.ended,
            "chunks": self.chunks(done.ids),
            "draft_logprobs": _rounded(done.logprobs),
            "answer": answer,
            "correct": is_right,
        }
        if self.is_whole:
            record |= await self.readings(problem, prompt, record)
        return record

    async def written_by_target(
        self, problem: Problem, prompt: TokenIds, sample: int
    ) -> dict[str, Any]:
        """Return one rollout that the target writes alone."""
        done = await self.write("target", prompt, MAX_TOKENS, Seed(2, problem.id, sample))
        answer, is_right = self.verdict(problem, done.text)
        return {
            "kind": "target",
            "problem": problem.id,
            "source": problem.source,
            "sample": sample,
            "text": done.text,
            "tokens": len(done.ids),
            "ended": done.ended,
            "target_logprobs": _rounded(done.logprobs),
            "answer": answer,
            "correct": is_right,
        }

    async def asked(self, problem: Problem, text: str, question: str) -> list[float]:
        """Return how strongly the target prefers "Yes" to "No", as log-odds: once for each order in
        which the question offers these two words.
        """
        odds: list[float] = []
        for first, second in ORDERS:
            asked = question.format(first=first, second=second)
            prefix = self.target.tokenizer.render(
                [
                    Message("system", self._system),
                    Message("user", problem.text),
                    Message("assistant", text),
                    Message("user", asked),
                ]
            )
            said: list[float] = []
            for word in ("Yes", "No"):
                suffix = self.target.tokenizer.encode(word)
                said.append((await self.target.score(ScoreRequest(prefix, suffix))).logprobs[0])
            odds.append(round(said[0] - said[1], 4))
        return odds

    async def rating(self, ids: TokenIds) -> list[float]:
        """Return the target's log-probability of each rating, 0 to 9, as the next token after these
        ids.
        """
        prefix = ids + self.target.tokenizer.encode(RATING)
        given: list[float] = []
        for digit in range(10):
            suffix = self.target.tokenizer.encode(str(digit))
            given.append((await self.target.score(ScoreRequest(prefix, suffix))).logprobs[0])
        return _rounded(given)

    async def takeovers(
        self,
        problem: Problem,
        prompt: TokenIds,
        rollouts: Sequence[dict[str, Any]],
        recorded: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Measure the effect of takeovers at the problem's chunks, except those already
        recorded."""
        measured = {(one["sample"], one["chunk"]) for one in recorded}
        made: list[dict[str, Any]] = []
        for rollout, index in places(problem.id, rollouts, self.experiments):
            if (rollout["sample"], index) not in measured:
                made.append(await self.experiment(problem, prompt, rollout, index))
        return made

    async def experiment(
        self, problem: Problem, prompt: TokenIds, rollout: dict[str, Any], index: int
    ) -> dict[str, Any]:
        """Measure how a takeover by the target at one chunk changes the share of correct answers."""
        ends = rollout["chunks"]
        begin = ends[index - 1] if index else 0
        ids = tuple(rollout["ids"])
        before = prompt + ids[:begin]
        seed = Seed(3, problem.id, rollout["sample"], index, "target")
        room = MAX_TOKENS - begin
        rewritten = await self.write("target", before, min(CHUNK_TOKENS, room), seed, (STEP,))
        record = {
            "kind": "takeover",
            "problem": problem.id,
            "source": problem.source,
            "sample": rollout["sample"],
            "chunk": index,
            "rewritten": rewritten.text,
            "rewritten_tokens": len(rewritten.ids),
            "rewritten_logprobs": _rounded(rewritten.logprobs),
            "said_correct": await self.asked(
                problem, self.draft.tokenizer.decode(ids[: ends[index]]), STEPWISE
            ),
            "rating": await self.rating(prompt + ids[: ends[index]]),
        }
        kept = partial(self.finish, problem, prompt, ids[: ends[index]], "draft", 4)
        replaced = partial(self.finish, problem, prompt, (*ids[:begin], *rewritten.ids), "draft", 5)
        finished = partial(self.finish, problem, prompt, ids[:begin], "target", 6)
        runs: list[Callable[[], Awaitable[dict[str, Any]]]] = []
        for attempt in range(CONTINUATIONS):
            runs.append(partial(kept, attempt))
            runs.append(partial(replaced, attempt))
        for attempt in range(FINISHED_BY_TARGET):
            runs.append(partial(finished, attempt))
        outcomes = await collect(runs)
        pairs = outcomes[: 2 * CONTINUATIONS]
        record["kept"] = pairs[0::2]
        record["replaced"] = pairs[1::2]
        record["finished_by_target"] = outcomes[2 * CONTINUATIONS :]
        return record

    async def finish(
        self,
        problem: Problem,
        prompt: TokenIds,
        begun: TokenIds,
        role: Role,
        stream: int,
        attempt: int,
    ) -> dict[str, Any]:
        """Let the given model finish a rollout that begins with these tokens, and return the
        outcome.
        """
        ends = self.draft.spec.end_ids
        text_ids = begun
        tokens = 0
        if begun and begun[-1] in ends:
            text_ids = begun[:-1]
        elif len(begun) < MAX_TOKENS:
            seed = Seed(stream, problem.id, len(begun), attempt=attempt)
            done = await self.write(role, prompt + begun, MAX_TOKENS - len(begun), seed)
            tokens = len(done.ids)
            text_ids = begun + (done.ids[:-1] if done.ended == "end" else done.ids)
        answer, is_right = self.verdict(problem, self.draft.tokenizer.decode(text_ids))
        return {"answer": answer, "correct": is_right, "tokens": tokens}


WHOLE = "Is this solution correct? Answer with one word, {first} or {second}."
STEPWISE = (
    "Is the last step of this unfinished solution correct? "
    "Answer with one word, {first} or {second}."
)


def places(
    name: str, rollouts: Sequence[dict[str, Any]], count: int
) -> list[tuple[dict[str, Any], int]]:
    """Return the chunks at which takeovers are measured.

    The chunks are chosen at random, with the problem's name as the seed, and never the last chunk
    of a rollout. A larger `count` adds chunks to those of a smaller `count`.
    """
    left = [(rollout, index) for rollout in rollouts for index in range(len(rollout["chunks"]) - 1)]
    chosen: list[tuple[dict[str, Any], int]] = []
    for number in range(min(count, len(left))):
        # the seed of the first chunk has no number, as in banks with one experiment per problem
        place = random.Random(f"place {name}" + f" {number}" * (number > 0)).choice(left)
        left.remove(place)
        chosen.append(place)
    return chosen


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a bank, leaving out problems that are not complete."""
    pending: list[dict[str, Any]] = []
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            record = json.loads(line)
            if record["kind"] == "complete":
                yield from pending
                yield record
                pending = []
            else:
                pending.append(record)


async def record(
    draft: Path,
    target: Path,
    path: Path,
    wanted: Sequence[Problem],
    options: LocalOptions,
    is_whole: bool,
    experiments: int,
) -> None:
    """Record these problems, or the missing parts of their records, several problems at the same
    time. Each problem is saved as soon as it is complete.
    """
    trim(path)
    recorded: dict[str, list[dict[str, Any]]] = {}
    for entry in read(path):
        recorded.setdefault(entry["problem"], []).append(entry)
    recorded = {name: merged(records) for name, records in recorded.items()}
    async with (
        LocalEngine(draft, name="draft", options=options) as small,
        LocalEngine(target, name="target", options=options) as large,
    ):
        recorder = Recorder(small, large, is_whole, experiments)

        await record_all(recorder, path, wanted, recorded)


async def record_all(
    recorder: Recorder,
    path: Path,
    wanted: Sequence[Problem],
    recorded: Mapping[str, Sequence[dict[str, Any]]],
) -> None:
    """Record what each of these problems lacks. At most `PROBLEMS_AT_ONCE` problems are recorded at
    the same time.
    """
    limiter = anyio.CapacityLimiter(PROBLEMS_AT_ONCE)
    number = 0

    async def save(problem: Problem) -> None:
        async with limiter:
            nonlocal number
            before = recorded.get(problem.id)
            if before is None:
                made = await recorder.records(problem)
            else:
                made = await recorder.missing(problem, before)
            append(path, [*made, {"kind": "complete", "problem": problem.id}])
            number += 1
            say(f"bank: {number} of {len(wanted)} problems recorded")

    await collect([partial(save, problem) for problem in wanted])


def trim(path: Path) -> None:
    """Cut everything after the last complete problem off the file, because a kill may have left
    part of a problem or of a line there.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        while line := file.readline():
            if line.endswith(b"\n") and json.loads(line)["kind"] == "complete":
                end = file.tell()
        file.truncate(end)


def merged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a problem's records, merged with the records that were added later."""
    drafts: dict[int, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "added":
            drafts[record["sample"]] |= record["fields"]
        elif record["kind"] == "draft":
            drafts[record["sample"]] = dict(record)
        elif record["kind"] != "complete":
            others.append(record)
    return [*drafts.values(), *others]


def has_everything(records: Sequence[dict[str, Any]], experiments: int) -> bool:
    """Return whether a problem has all fields of its rollouts, and as many takeover experiments as
    its chunks allow.
    """
    drafts = [one for one in records if one["kind"] == "draft"]
    takeovers = [one for one in records if one["kind"] == "takeover"]
    wanted = len(places(records[0]["problem"], drafts, experiments)) if drafts else 0
    return len(takeovers) >= wanted and all(
        name in one
        for one in drafts
        for name in ("chunk_texts", "draft_entropies", "target_logprobs", "said_correct")
    )


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append lines to the file of a bank."""
    with path.open("a", encoding="utf-8") as file:
        for line in records:
            file.write(json.dumps(line) + "\n")


def begin_bank(
    out: Path,
    limit: int,
    rollouts_only: bool = False,
    experiments: int = 1,
    half: str | None = None,
) -> tuple[Path, list[Problem]]:
    """Write the split of the problems into the bank's folder before any measurement.

    Return the path of the bank's file, and the problems of one half or of both halves that are not
    completely recorded there.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bank.jsonl"
    wanted = problems()[:limit]
    parts = split([problem.id for problem in wanted])
    order = [problem.id for problem in wanted]
    halves = {"development": parts.development, "confirmation": parts.confirmation}
    text = json.dumps({"order": order, **halves})
    (out / "split.json").write_text(text, encoding="utf-8")
    if half is not None:
        wanted = [problem for problem in wanted if problem.id in getattr(parts, half)]
    recorded: dict[str, list[dict[str, Any]]] = {}
    for entry in read(path):
        recorded.setdefault(entry["problem"], []).append(entry)
    complete = {
        name
        for name, records in recorded.items()
        if rollouts_only or has_everything(merged(records), experiments)
    }
    # problems that lack only some fields are recorded last, because tables can already use them
    lacking = [problem for problem in wanted if problem.id not in complete]
    return path, sorted(lacking, key=lambda problem: problem.id in recorded)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a bank from the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.studies.judges", description=RECORDING)
    parser.add_argument("draft", type=Path, help="folder of the draft model")
    parser.add_argument("target", type=Path, help="folder of the target model")
    parser.add_argument("out", type=Path, help="folder of the bank, outside the repository")
    parser.add_argument("--limit", type=int, default=160, help="problems")
    parser.add_argument(
        "--threads", type=int, help="threads of each model (default: the models share all cores)"
    )
    parser.add_argument(
        "--rollouts-only",
        action="store_true",
        help="record neither scores nor takeovers, which is enough to compare cascades and "
        "takes a quarter of the time",
    )
    parser.add_argument(
        "--experiments", type=int, default=1, help="chunks of each problem to take over"
    )
    parser.add_argument(
        "--half",
        choices=["development", "confirmation"],
        help="record the problems of this half only (default: both halves)",
    )
    given = parser.parse_args(arguments)
    if not problems():
        parser.error("the benchmark files are missing; set ATTS_SHARED_DATA to their folder")
    path, wanted = begin_bank(
        given.out, given.limit, given.rollouts_only, given.experiments, given.half
    )
    options = LocalOptions(
        device="cpu", threads=given.threads, max_batch=128, kv_tokens=CACHE_TOKENS
    )
    is_whole = not given.rollouts_only
    anyio.run(record, given.draft, given.target, path, wanted, options, is_whole, given.experiments)


Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
RESAMPLES = 2_000
RATES = (0.1, 0.2, 0.3, 0.5)
# number of problems at the start of the bank; these were examined while this study was written
LOOKED_AT = 12
LEAST_JUDGED = 10  # a judge is fitted only if at least this many problems have takeovers
# number of problems at the start of the bank; the cascade was chosen on these, before later
# problems were recorded
CHOSEN_ON = 60


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a draft's rollout: the log-probabilities that both models give its tokens."""

    index: int
    of: int  # number of chunks of the rollout
    draft: Sequence[float]
    target: Sequence[float]
    text_bytes: int
    # entropy of the draft's distribution at each token; older banks lack entropies
    entropies: Sequence[float] = ()
    # mean entropy of the previous chunk; for a first chunk, its own mean entropy
    entropy_before: float = math.nan


@dataclass(slots=True)
class BankProblem:
    """All records of one problem in a bank."""

    name: str
    source: str = ""
    drafts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    targets: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    takeovers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def load(path: Path) -> list[BankProblem]:
    """Return the complete problems of a bank in the order in which they were recorded."""
    recorded: dict[str, list[dict[str, Any]]] = {}
    for record in read(path):
        recorded.setdefault(record["problem"], []).append(record)
    problems: list[BankProblem] = []
    for name, records in recorded.items():
        problem = BankProblem(name)
        for record in merged(records):
            problem.source = record.get("source", problem.source)
            if record["kind"] == "draft":
                problem.drafts.append(record)
            elif record["kind"] == "target":
                problem.targets.append(record)
            elif record["kind"] == "takeover":
                problem.takeovers.append(record)
        problems.append(problem)
    return problems


def chunks_of(rollout: Mapping[str, Any]) -> list[Chunk]:
    """Return the chunks of a recorded rollout of the draft."""
    ends = rollout["chunks"]
    share = len(rollout["text"].encode()) / max(1, len(rollout["ids"]))
    chunks: list[Chunk] = []
    begin = 0
    before = math.nan
    for index, end in enumerate(ends):
        draft = rollout["draft_logprobs"][begin:end]
        target = rollout["target_logprobs"][begin:end]
        text_bytes = max(1, round(share * (end - begin)))
        entropies = rollout.get("draft_entropies", ())[begin:end]
        mean = _mean(entropies) if entropies else math.nan
        before = mean if math.isnan(before) else before
        chunks.append(Chunk(index, len(ends), draft, target, text_bytes, entropies, before))
        before = mean
        begin = end
    return chunks


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


CHUNK_SCORES: Mapping[str, Callable[[Chunk], float]] = {
    "target, mean": lambda chunk: -_mean(chunk.target),
    "target, sum": lambda chunk: -math.fsum(chunk.target),
    "target, worst token": lambda chunk: -min(chunk.target),
    "target, per byte": lambda chunk: -math.fsum(chunk.target) / chunk.text_bytes,
    "speculative (sum of shortfalls)": lambda chunk: math.fsum(
        max(0.0, d - t) for d, t in zip(chunk.draft, chunk.target, strict=True)
    ),
    "speculative, mean": lambda chunk: _mean(
        [max(0.0, d - t) for d, t in zip(chunk.draft, chunk.target, strict=True)]
    ),
    "draft minus target, mean": lambda chunk: _mean(
        [d - t for d, t in zip(chunk.draft, chunk.target, strict=True)]
    ),
    "draft, mean": lambda chunk: -_mean(chunk.draft),
    "draft, sum": lambda chunk: -math.fsum(chunk.draft),
    "draft, worst token": lambda chunk: -min(chunk.draft),
    "draft entropy, mean": lambda chunk: _mean(chunk.entropies),
    "draft entropy, worst token": lambda chunk: max(chunk.entropies),
    "draft entropy, change": lambda chunk: _mean(chunk.entropies) - chunk.entropy_before,
    "length": lambda chunk: float(len(chunk.draft)),
    "position": lambda chunk: float(chunk.index),
}
"""Scores that need only data that a bank has for every chunk; a higher score is worse."""


def chunk_scores(problems: Iterable[BankProblem]) -> Mapping[str, Callable[[Chunk], float]]:
    """Return the scores that can be computed for the chunks of this bank. Older banks have no
    entropies.
    """
    has_entropies = all("draft_entropies" in one for problem in problems for one in problem.drafts)
    return {
        name: score
        for name, score in CHUNK_SCORES.items()
        if has_entropies or "entropy" not in name
    }


def worst(rollout: Mapping[str, Any], score: Callable[[Chunk], float]) -> float:
    """Return the highest, which is the worst, score of a rollout's chunks."""
    return max(score(chunk) for chunk in chunks_of(rollout))


def labels_of(problem: BankProblem, rollouts: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Return the number of each rollout's group of equal answers, or None for a rollout without an
    answer.
    """
    answers = [rollout["answer"] for rollout in rollouts]
    given = [answer for answer in answers if answer is not None]
    classes = iter(group(given)) if given else iter(())
    return [None if answer is None else next(classes) for answer in answers]


def auroc(bad: Sequence[float], good: Sequence[float]) -> float:
    """Return the probability that a bad item has a higher score than a good item; ties count half."""
    wins = sum((b > g) + 0.5 * (b == g) for b in bad for g in good)
    return wins / (len(bad) * len(good))


def within(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float, float]:
    """Return the AUROC within problems, over all pairs of rollouts, with a bootstrap interval over
    problems.

    A pair has the score of an incorrect rollout and the score of a correct rollout of one problem.
    """
    mixed = [(bad, good) for bad, good in pairs if bad and good]
    if not mixed:
        return math.nan, math.nan, math.nan
    weights = np.array([len(bad) * len(good) for bad, good in mixed], dtype=float)
    areas = np.array([auroc(bad, good) for bad, good in mixed])
    return bootstrap(
        lambda rows: float((weights * areas)[rows].sum() / weights[rows].sum()), len(mixed)
    )


def bootstrap(
    statistic: Callable[[Rows], float], problems: int, seed: int = 0
) -> tuple[float, float, float]:
    """Return a statistic of all problems and its 95 % percentile interval."""
    generator = np.random.default_rng(seed)
    whole = statistic(np.arange(problems))
    values = [statistic(generator.integers(0, problems, problems)) for _ in range(RESAMPLES)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return whole, math.nan, math.nan
    low, high = np.quantile(finite, (0.025, 0.975))
    return whole, float(low), float(high)


def shown(estimate: tuple[float, float, float], digits: int = 3) -> str:
    """Return a number with its interval, as text."""
    value, low, high = estimate
    if math.isnan(value):
        return "-"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def base_rates(problems: Sequence[BankProblem]) -> Table:
    """Return the accuracy and cost of the draft alone and of the target alone."""
    rows: list[Row] = []
    for source in ("all", "gsm8k", "math500"):
        some = [problem for problem in problems if source in ("all", problem.source)]
        if not some:
            continue
        for writer in ("draft", "target"):
            shares: list[float] = []
            votes: list[float] = []
            tokens: list[float] = []
            for problem in some:
                rollouts = problem.drafts if writer == "draft" else problem.targets
                shares.append(_mean([float(one["correct"]) for one in rollouts]))
                votes.append(vote(problem, rollouts))
                tokens.append(_mean([_tokens(one) for one in rollouts]))
            each = len(problems[0].drafts if writer == "draft" else problems[0].targets)
            rows.append(
                (
                    source,
                    writer,
                    len(some),
                    each,
                    shown(over_problems(shares)),
                    shown(over_problems(votes)),
                    round(_mean(tokens)),
                )
            )
    return Table.of(
        "The pair alone",
        "problems of | writer | problems | rollouts each | pass@1 | vote | tokens per rollout",
        rows,
    )


def _tokens(rollout: Mapping[str, Any]) -> int:
    return rollout["tokens"] if "tokens" in rollout else len(rollout["ids"])


def over_problems(values: Sequence[float]) -> tuple[float, float, float]:
    """Return a mean over problems with its interval."""
    each = np.array(values)
    return bootstrap(lambda rows: float(each[rows].mean()), len(each))


def vote(
    problem: BankProblem,
    rollouts: Sequence[Mapping[str, Any]],
    weights: Sequence[float] | None = None,
) -> float:
    """Return the probability that the vote of these rollouts is correct, if ties are broken at
    random.
    """
    labels = labels_of(problem, rollouts)
    totals: dict[int, float] = {}
    right: dict[int, bool] = {}
    for position, (label, rollout) in enumerate(zip(labels, rollouts, strict=True)):
        if label is None:
            continue
        totals[label] = totals.get(label, 0.0) + (weights[position] if weights else 1.0)
        right[label] = right.get(label, False) or rollout["correct"]
    if not totals:
        return 0.0
    most = max(totals.values())
    leaders = [label for label, total in totals.items() if total == most]
    return _mean([float(right[label]) for label in leaders])


def agreement_at_step(problem: BankProblem, rollout: Mapping[str, Any], index: int) -> float:
    """Return the share of the sibling rollouts that contain the last number of a chunk.

    A chunk without a number contradicts no sibling, so its share is 1.
    """
    numbers = NUMBER.findall(rollout["chunk_texts"][index])
    siblings = [one for one in problem.drafts if one is not rollout]
    if not numbers or not siblings:
        return 1.0
    return _mean([float(numbers[-1] in NUMBER.findall(one["text"])) for one in siblings])


def rollout_scores(problem: BankProblem) -> dict[str, list[float]]:
    """Return every score for all draft rollouts of a problem; a higher score is worse."""
    scores: dict[str, list[float]] = {}
    for name, score in chunk_scores([problem]).items():
        scores[f"{name}; worst chunk"] = [worst(one, score) for one in problem.drafts]
    for name in ("target, mean", "speculative, mean", "draft, mean"):
        score = CHUNK_SCORES[name]
        scores[f"{name}; whole rollout"] = [
            score(
                Chunk(
                    0, 1, one["draft_logprobs"], one["target_logprobs"], len(one["text"].encode())
                )
            )
            for one in problem.drafts
        ]
    scores["verdict in one token, both orders"] = [
        -_mean(one["said_correct"]) for one in problem.drafts
    ]
    scores["verdict in one token, one order"] = [-one["said_correct"][0] for one in problem.drafts]
    if all("chunk_texts" in one for one in problem.drafts):
        scores["agreement with siblings at the step; worst chunk"] = [
            -min(agreement_at_step(problem, one, index) for index in range(len(one["chunks"])))
            for one in problem.drafts
        ]
    labels = labels_of(problem, problem.drafts)
    sizes = [0 if label is None else labels.count(label) for label in labels]
    scores["agreement of answers"] = [-float(size) for size in sizes]
    scores["no answer"] = [float(label is None) for label in labels]
    return scores


ROLLOUTS_TITLE = "Incorrect rollouts distinguished from correct ones"
TAKEOVERS_TITLE = "What a takeover gains where a score is worst"
CONFIRMED = ", on the confirmation half"


def rollouts_table(problems: Sequence[BankProblem], title: str = ROLLOUTS_TITLE) -> Table:
    """Return the table of how well each score distinguishes incorrect rollouts from correct ones."""
    scored = [rollout_scores(problem) for problem in problems]
    rows: list[Row] = []
    for name in [name for name in scored[0] if all(name in scores for scores in scored)]:
        pairs: list[tuple[list[float], list[float]]] = []
        for problem, scores in zip(problems, scored, strict=True):
            bad = [
                s for s, one in zip(scores[name], problem.drafts, strict=True) if not one["correct"]
            ]
            good = [
                s for s, one in zip(scores[name], problem.drafts, strict=True) if one["correct"]
            ]
            pairs.append((bad, good))
        everywhere = auroc(
            [value for bad, _ in pairs for value in bad],
            [value for _, good in pairs for value in good],
        )
        ended = [
            (
                [
                    s
                    for s, one in zip(scores[name], problem.drafts, strict=True)
                    if not one["correct"] and one["answer"] is not None
                ],
                good,
            )
            for problem, scores, (_, good) in zip(problems, scored, pairs, strict=True)
        ]
        rows.append((name, shown(within(pairs)), shown(within(ended)), round(everywhere, 3)))
    mixed = sum(
        0 < sum(one["correct"] for one in problem.drafts) < len(problem.drafts)
        for problem in problems
    )
    return Table.of(
        title,
        "score | AUROC within problems | AUROC within problems, rollouts with an answer | "
        "AUROC over all rollouts",
        rows,
        f"{len(problems)} problems, of which {mixed} have both correct and incorrect rollouts. "
        "A score without information has AUROC 0.5.",
    )


def takeover_scores(problem: BankProblem, takeover: Mapping[str, Any]) -> dict[str, float]:
    """Return every score for the chunk at which a takeover was measured; a higher score is worse."""
    rollout = next(one for one in problem.drafts if one["sample"] == takeover["sample"])
    chunk = chunks_of(rollout)[takeover["chunk"]]
    scores = {name: score(chunk) for name, score in chunk_scores([problem]).items()}
    scores["verdict on the step, both orders"] = -_mean(takeover["said_correct"])
    masses = np.exp(np.array(takeover["rating"]) - max(takeover["rating"]))
    scores["rating 0 to 9"] = -float((masses * np.arange(10)).sum() / masses.sum())
    scores["target's own chunk likelier, mean"] = _mean(takeover["rewritten_logprobs"]) - _mean(
        chunk.target
    )
    if all("chunk_texts" in one for one in problem.drafts):
        scores["agreement with siblings at the step"] = -agreement_at_step(
            problem, rollout, takeover["chunk"]
        )
    labels = labels_of(problem, problem.drafts)
    label = labels[problem.drafts.index(rollout)]
    scores["agreement of siblings' answers"] = -max(
        (labels.count(other) for other in set(labels) if other is not None), default=0
    )
    scores["agreement with siblings, at the end"] = -float(
        0 if label is None else labels.count(label)
    )
    return scores


def advantage(takeover: Mapping[str, Any]) -> float:
    """Return the measured advantage of the target's chunk: the share of correct answers if the
    target writes the chunk, minus the share if the draft writes it.
    """
    replaced = _mean([float(one["correct"]) for one in takeover["replaced"]])
    kept = _mean([float(one["correct"]) for one in takeover["kept"]])
    return replaced - kept


def finishing_advantage(takeover: Mapping[str, Any]) -> float:
    """Return how much the share of correct answers rises if the target finishes the rollout,
    instead of the draft.
    """
    finished = _mean([float(one["correct"]) for one in takeover["finished_by_target"]])
    kept = _mean([float(one["correct"]) for one in takeover["kept"]])
    return finished - kept


def replacing_advantage(problem: BankProblem, takeover: Mapping[str, Any]) -> float:
    """Return the gain in the share of correct answers if a rollout that the target writes alone
    replaces the draft's rollout.
    """
    fresh = _mean([float(one["correct"]) for one in problem.targets])
    kept = _mean([float(one["correct"]) for one in takeover["kept"]])
    return fresh - kept


def mean_takeovers_table(problems: Sequence[BankProblem]) -> Table:
    """Return the mean gain of takeovers at randomly chosen chunks, whatever their scores."""
    takeovers = [takeover for problem in problems for takeover in problem.takeovers]
    written = _mean([float(one["rewritten_tokens"]) for one in takeovers])
    finished = _mean(
        [float(end["tokens"]) for one in takeovers for end in one["finished_by_target"]]
    )
    rows: list[Row] = [
        (
            "the chunk; the draft finishes",
            shown(over_problems([advantage(one) for one in takeovers])),
            round(written),
        ),
        (
            "the chunk and the rest of the rollout",
            shown(over_problems([finishing_advantage(one) for one in takeovers])),
            round(finished),
        ),
    ]
    fresh = [(problem, one) for problem in problems for one in problem.takeovers if problem.targets]
    if fresh:
        rows.append(
            (
                "a whole rollout instead of the draft",
                shown(over_problems([replacing_advantage(*pair) for pair in fresh])),
                round(_mean([_tokens(one) for problem, _ in fresh for one in problem.targets])),
            )
        )
    return Table.of(
        "Takeovers at any chunk, both halves",
        "the target writes | gain in the share of correct answers | target tokens",
        rows,
        f"The table uses {len(takeovers)} chunks. The study chose one random chunk per problem, "
        "with the problem's name as seed.",
    )


def takeovers_table(
    problems: Sequence[BankProblem],
    title: str = TAKEOVERS_TITLE,
    fitted_on: Sequence[BankProblem] = (),
    rate: float = 0.25,
) -> Table:
    """Return the table of how well each score predicts the measured advantage of a takeover.

    The learned judge is fitted on other problems if these are given, and is cross-validated
    otherwise.
    """
    measured = [(problem, takeover) for problem in problems for takeover in problem.takeovers]
    gains = np.array([advantage(takeover) for _, takeover in measured])
    finished = np.array([finishing_advantage(takeover) for _, takeover in measured])
    scored = [takeover_scores(problem, takeover) for problem, takeover in measured]
    names = [name for name in scored[0] if all(name in scores for scores in scored)]
    count = len(measured)
    rows: list[Row] = [
        (
            "coin",
            "0",
            shown(bootstrap(lambda rows: float(gains[rows].mean()), count)),
            shown(bootstrap(lambda rows: float(finished[rows].mean()), count)),
        )
    ]
    for name in names:
        values = np.array([scores[name] for scores in scored])

        rows.append(
            (
                name,
                shown(bootstrap(partial(_spearman, values, gains), count), 2),
                shown(bootstrap(partial(_above_coin, values, gains, rate), count)),
                shown(bootstrap(partial(_above_coin, values, finished, rate), count)),
            )
        )
    learners = [problem for problem in fitted_on or problems if problem.takeovers]
    if len(learners) >= LEAST_JUDGED:
        predicted = learned(measured, advantage, fitted_on, rate)
        finishing = learned(measured, finishing_advantage, fitted_on, rate)
        rows.append(
            (
                "learned judge, fitted on the development half"
                if fitted_on
                else "learned judge, cross-validated by problem",
                shown(bootstrap(partial(_spearman, predicted, gains), count), 2),
                shown(bootstrap(partial(_above_coin, predicted, gains, rate), count)),
                shown(bootstrap(partial(_above_coin, finishing, finished, rate), count)),
            )
        )
    return Table.of(
        title,
        "score | rank correlation with the advantage | advantage minus a coin's, worst quarter "
        "| advantage minus a coin's, worst quarter, if the target finishes",
        rows,
        f"The table uses {count} chunks. The study chose one random chunk per problem, with the "
        "problem's name as seed. The row *coin* shows the mean advantage of a takeover over "
        f"all {count} chunks.",
    )


Measured = tuple[BankProblem, Mapping[str, Any]]  # a problem and one of its measured takeovers


def learned(
    measured: Sequence[Measured],
    gain: Callable[[Mapping[str, Any]], float],
    fitted_on: Sequence[BankProblem],
    rate: float,
) -> Floats:
    """Return the gain that a judge predicts at each chunk.

    Without problems to fit on, the prediction for a problem comes from a judge that was fitted on
    the other problems.
    """
    if not fitted_on:
        return np.array(cross_validated(_examples(measured, gain)))
    others = [(problem, one) for problem in fitted_on for one in problem.takeovers]
    fitted = fit_judge(_examples(others, gain), rate)
    return np.array([fitted.advantage(row) for row in _examples(measured, gain).features])


def _examples(measured: Sequence[Measured], gain: Callable[[Mapping[str, Any]], float]) -> Examples:
    """Return the features and gains from which a judge learns.

    The features are those of the score `learned`, and the answers of the target and the draft when
    they were asked about the chunk.
    """
    rows: list[list[float]] = []
    for problem, takeover in measured:
        rollout = next(one for one in problem.drafts if one["sample"] == takeover["sample"])
        chunk = chunks_of(rollout)[takeover["chunk"]]
        labels = labels_of(problem, [one for one in problem.drafts if one is not rollout])
        given = [label for label in labels if label is not None]
        share = max(map(given.count, given)) / len(given) if given else None
        known = judge_features(chunk.target, chunk.draft, chunk.index, share)
        others = takeover_scores(problem, takeover)
        asked = ("verdict on the step, both orders", "rating 0 to 9", "draft entropy, mean")
        rows.append([*known, *(others.get(name, 0.0) for name in asked)])
    names = tuple(str(index) for index in range(len(rows[0])))
    gains = [gain(takeover) for _, takeover in measured]
    return Examples(names, rows, gains, [problem.name for problem, _ in measured])


def _above_coin(values: Floats, gains: Floats, rate: float, rows: Rows) -> float:
    """Return the mean gain at the chunks with the worst values, minus the mean gain at all chunks."""
    order = np.argsort(-values[rows], kind="stable")
    top = order[: max(1, round(rate * len(order)))]
    return float(gains[rows][top].mean() - gains[rows].mean())


def _spearman(one: Floats, other: Floats, rows: Rows) -> float:
    first = _ranks(one[rows])
    second = _ranks(other[rows])
    if first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse].astype(np.float64)


@dataclass(frozen=True, slots=True)
class Arm:
    """The results of one policy: for each problem, the probability that the vote is correct, and
    the numbers of draft and target tokens.
    """

    name: str
    rollouts: str  # number of rollouts that each model writes for a problem
    rate: float  # share of problems that are escalated
    right: Floats
    target_tokens: Floats
    draft_tokens: Floats


def cascade_arms(
    problems: Sequence[BankProblem], drafts: int, targets: int, rates: Sequence[float] = RATES
) -> list[Arm]:
    """Return cascades that escalate the problems with the least agreement, at several rates, each
    followed by a coin at the same rate.

    As in `method=cascade`, the rollouts of draft and target vote together with equal weights.
    """
    before: list[float] = []
    after: list[float] = []
    cost: list[float] = []
    written: list[float] = []
    disagreements: list[float] = []
    for problem in problems:
        first = problem.drafts[:drafts]
        more = problem.targets[:targets]
        labels = labels_of(problem, first)
        lead = max((labels.count(label) for label in labels if label is not None), default=0.5)
        disagreements.append(drafts / lead)
        before.append(vote(problem, first))
        after.append(vote(problem, [*first, *more]))
        cost.append(sum(_tokens(one) for one in more))
        written.append(sum(_tokens(one) for one in first))
    kept = np.array(before)
    gained = np.array(after) - kept
    spent = np.array(cost)
    scores = np.array(disagreements)
    arms: list[Arm] = []
    for rate in rates:
        chance = _escalated(scores, rate)
        coin = np.full(len(scores), rate)
        name = f"cascade {drafts} + {targets}"
        rollouts = f"{drafts} + {targets}"
        draft_tokens = np.array(written)
        arms.append(Arm(name, rollouts, rate, kept + chance * gained, chance * spent, draft_tokens))
        arms.append(
            Arm(
                f"{name}, by a coin",
                rollouts,
                rate,
                kept + coin * gained,
                coin * spent,
                draft_tokens,
            )
        )
    return arms


def _escalated(scores: Floats, rate: float) -> Floats:
    """Return for each problem the probability that it belongs to the share `rate` of problems with
    the worst scores.

    Problems with equal scores are chosen at random.
    """
    wanted = rate * len(scores)
    chances = np.zeros(len(scores))
    for score in sorted(set(scores.tolist()), reverse=True):
        members = scores == score
        share = min(1.0, wanted / members.sum())
        chances[members] = share
        wanted -= share * members.sum()
        if wanted <= 1e-9:
            break
    return chances


def alone(problems: Sequence[BankProblem], writer: str, rollouts: int) -> Arm:
    """Return the arm in which one model alone writes the given number of rollouts, and these
    rollouts vote.
    """
    right: list[float] = []
    tokens: list[float] = []
    for problem in problems:
        some = (problem.drafts if writer == "draft" else problem.targets)[:rollouts]
        right.append(vote(problem, some))
        tokens.append(sum(_tokens(one) for one in some))
    spent = np.array(tokens, dtype=float)
    nothing = np.zeros(len(problems))
    is_draft = writer == "draft"
    return Arm(
        f"{writer} alone",
        str(rollouts),
        float(not is_draft),
        np.array(right),
        nothing if is_draft else spent,
        spent if is_draft else nothing,
    )


def _at_equal_tokens(arm: Arm, coin: Arm, kept: Arm, rows: Rows) -> float:
    """Return how much more accurate a cascade is than a coin that spends the same number of target
    tokens.
    """
    more = arm.target_tokens[rows].mean() / coin.target_tokens[rows].mean()
    gained = arm.right[rows] - kept.right[rows]
    by_coin = coin.right[rows] - kept.right[rows]
    return float((gained - more * by_coin).mean())


def cascade_table(
    problems: Sequence[BankProblem], title: str = "Whole problems, on the development half"
) -> Table:
    """Return accuracy and cost of cascades, of coins, and of draft and target alone."""
    arms = [alone(problems, "draft", count) for count in (1, 4, 8)]
    arms += [alone(problems, "target", count) for count in (1, 2, 4)]
    for drafts, targets in ((4, 4), (8, 4)):
        arms += cascade_arms(problems, drafts, targets)
    rows: list[Row] = []
    for index, arm in enumerate(arms):
        gain = "-"
        fair = "-"
        if arm.name.startswith("cascade") and "coin" not in arm.name:
            coin = arms[index + 1]
            gain = shown(over_problems((arm.right - coin.right).tolist()))
            kept = alone(problems, "draft", int(arm.rollouts.partition(" ")[0]))
            fair = shown(bootstrap(partial(_at_equal_tokens, arm, coin, kept), len(problems)))
        accuracy = over_problems(arm.right.tolist())
        rows.append(
            (
                arm.name,
                arm.rollouts,
                arm.rate,
                round(accuracy[0], 4),
                shown(accuracy),
                gain,
                fair,
                round(float(arm.target_tokens.mean())),
                round(float(arm.draft_tokens.mean())),
            )
        )
    return Table.of(
        title,
        "arm | rollouts | rate | accuracy | accuracy, 95 % interval | minus a coin's | minus a "
        "coin's at equal target tokens | target tokens | draft tokens",
        rows,
        f"{len(problems)} problems; tokens are per problem. In *cascade 4 + 4*, four draft "
        "rollouts of each problem vote. On the problems where the four draft rollouts agree "
        "least, four target rollouts join the vote. The escalated problems have longer "
        "solutions than average, so a coin that spends as many target tokens escalates a few "
        "more problems.",
        chart=Chart("target tokens", "accuracy", "arm"),
    )


def simulated(draft: float, target: float, count: int = 400, seed: int = 0) -> list[BankProblem]:
    """Return simulated problems on which agreement is informative: if a draft is unsure, its
    answers spread over five values.

    `draft` and `target` are the mean accuracies of single rollouts. As in real pairs, both models
    find the same problems hard. Each problem has its own accuracy between 0 and 1.
    """
    random = np.random.default_rng(seed)
    problems: list[BankProblem] = []
    for index in range(count):
        ease = random.random()
        # this exponent gives the simulated problems the requested mean accuracy
        chances = [ease ** (1 / share - 1) for share in (draft, target)]
        rollouts: list[list[dict[str, Any]]] = []
        for chance, number in zip(chances, (8, 4), strict=True):
            some: list[dict[str, Any]] = []
            for _ in range(number):
                is_right = bool(random.random() < chance)
                answer = "1" if is_right else str(2 + int(random.integers(5)))
                some.append({"answer": answer, "correct": is_right, "tokens": 300})
            rollouts.append(some)
        problems.append(BankProblem(f"p{index}", "simulated", rollouts[0], rollouts[1]))
    return problems


def simulated_classes() -> list[Table]:
    """Return the comparison of classes on simulated problems of a weak and of a strong draft."""
    tables: list[Table] = []
    for name, draft, target in (("a weak draft", 0.2, 0.45), ("a strong draft", 0.6, 0.8)):
        table = classes_table(simulated(draft, target))
        title = f"Classes of problems, simulated: {name}"
        notes = (f"{table.notes[0]} Mean accuracies {draft} and {target}.",)
        tables.append(replace(table, title=title, notes=notes))
    return tables


def classes_table(problems: Sequence[BankProblem], rate: float = 0.3) -> Table:
    """Compare the cascade with rules that divide the problems into other classes, at equal numbers
    of target rollouts.

    The cascade has two classes. Problems with enough agreement stop, and all other problems get
    four target rollouts, which vote with the draft's rollouts. Each other arm changes one of these
    rules. The rate of each arm is set such that the target writes as many rollouts as in the
    cascade.
    """
    two = cascade_arms(problems, 4, 4, [rate])[0]
    arms = [
        two,
        _renamed(cascade_arms(problems, 4, 1, [min(1.0, 4 * rate)])[0], "one target rollout each"),
        _target_alone(problems, rate),
        _one_or_four(problems, rate),
        _more_drafts_first(problems, rate),
    ]
    rows: list[Row] = []
    for arm in arms:
        gain = "-" if arm is two else shown(over_problems((arm.right - two.right).tolist()))
        rows.append(_row_of(arm, gain))
    return Table.of(
        "Classes of problems beside stop and escalate",
        "classes | rollouts | share escalated | accuracy | minus the cascade's | target tokens | "
        "draft tokens",
        rows,
        f"{len(problems)} problems. Every arm requests {4 * rate:.2g} target rollouts per "
        "problem on average, or fewer if it reaches rate 1 first.",
    )


def of_run(run: RecordedRun) -> dict[str, BankProblem]:
    """Return the problems of a run with their rollouts, in the form of a bank's problems."""
    problems: dict[str, BankProblem] = {}
    for outcome in run.outcomes():
        problem = BankProblem(outcome.problem.id, outcome.problem.source)
        for rollout in outcome.rollouts:
            answer = rollout.answer
            record = {
                "answer": answer,
                "correct": answer is not None and judge(outcome.problem, answer).status == "equal",
                "tokens": sum(chunk.tokens for chunk in rollout.chunks),
                "is_whole": rollout.finish not in ("settled", "cancelled", "failed"),
            }
            is_by_target = any(chunk.author == "target" for chunk in rollout.chunks)
            (problem.targets if is_by_target else problem.drafts).append(record)
        problems[problem.name] = problem
    return problems


def live_arms(cascade: RecordedRun, targets: Sequence[RecordedRun]) -> list[Arm]:
    """Return five arms: the draft's vote, a live cascade, its coin, the cascade with random ties,
    and the target's vote.

    Agreement is equally low on many problems, so chance decided which of these problems the run
    escalated. The cascade with random ties is the mean over all such choices.

    `targets` are runs of the target alone on the problems that the cascade did not escalate. They
    provide the target's rollouts that a coin would have used. If several of these runs have the
    same problem, the last one counts.
    """
    escalated = {
        decision.decision.question for decision in cascade.decisions() if decision.decision.escalate
    }
    drafted = of_run(cascade)
    added = {name: problem for run in targets for name, problem in of_run(run).items()}
    problems: list[BankProblem] = []
    for name, problem in drafted.items():
        if name not in escalated:
            if name not in added:
                raise SystemExit(f"no run of the target alone has rollouts of {name}")
            problem.targets = added[name].targets
        if not all(one["is_whole"] for one in (*problem.drafts, *problem.targets)):
            # cancelled rollouts are refused, because they would count as free and as abstentions
            raise SystemExit(
                f"{name}: a rollout was cancelled or failed, so its cost and answer are unknown; run "
                "the problem again with --set early_stop=none"
            )
        problems.append(problem)
    chance = np.array([float(problem.name in escalated) for problem in problems])
    rate = float(chance.mean())
    drafts = max(len(problem.drafts) for problem in problems)
    count = max(len(problem.targets) for problem in problems)
    kept = _votes(problems, drafts, 0)
    gained = _votes(problems, drafts, count) - kept
    spent, written = _written(problems, drafts, count)
    both = f"{drafts} + {count}"
    return [
        alone(problems, "draft", drafts),
        Arm("cascade, live", both, rate, kept + chance * gained, chance * spent, written),
        Arm("coin", both, rate, kept + rate * gained, rate * spent, written),
        _renamed(cascade_arms(problems, drafts, count, (rate,))[0], "cascade, ties by lot"),
        alone(problems, "target", 1),
        alone(problems, "target", count),
    ]


def live_table(cascade: RecordedRun, targets: Sequence[RecordedRun]) -> Table:
    """Return the table of accuracy and cost of a live cascade, and its gain over a coin."""
    arms = live_arms(cascade, targets)
    kept, live, coin, *_ = arms
    rows: list[Row] = []
    for arm in arms:
        gain = "-"
        fair = "-"
        if arm.name.startswith("cascade"):
            gain = shown(over_problems((arm.right - coin.right).tolist()))
            fair = shown(bootstrap(partial(_at_equal_tokens, arm, coin, kept), len(arm.right)))
        rows.append(_row_of(arm, gain, fair))
    return Table.of(
        "A live run of the cascade",
        "arm | rollouts | rate | accuracy | minus the coin's | minus the coin's at equal "
        "target tokens | target tokens | draft tokens",
        rows,
        f"{len(live.right)} problems; tokens are per problem. The cascade decided online which "
        "problems to escalate. On the other problems, the coin's target rollouts come from a "
        "separate run of the target alone. The row *coin* is the mean over all random choices "
        "at the cascade's realised rate. If many problems have equal agreement, chance decides "
        "which are escalated; the row *cascade, ties by lot* is the mean over all choices "
        "among problems with equal agreement.",
    )


def _row_of(arm: Arm, *gains: str) -> Row:
    """Return an arm's row of the table: its accuracy, the given gains, and its tokens per problem."""
    return (
        arm.name,
        arm.rollouts,
        round(arm.rate, 3),
        shown(over_problems(arm.right.tolist())),
        *gains,
        round(float(arm.target_tokens.mean())),
        round(float(arm.draft_tokens.mean())),
    )


def _renamed(arm: Arm, name: str) -> Arm:
    return replace(arm, name=name)


def _disagreements(problems: Sequence[BankProblem], drafts: int) -> Floats:
    values: list[float] = []
    for problem in problems:
        labels = labels_of(problem, problem.drafts[:drafts])
        lead = max((labels.count(label) for label in labels if label is not None), default=0.5)
        values.append(drafts / lead)
    return np.array(values)


def _votes(problems: Sequence[BankProblem], drafts: int, targets: int) -> Floats:
    return np.array([vote(one, [*one.drafts[:drafts], *one.targets[:targets]]) for one in problems])


def _written(problems: Sequence[BankProblem], drafts: int, targets: int) -> tuple[Floats, Floats]:
    """Return the tokens of the given number of target rollouts, and the tokens of the draft."""
    target = [float(sum(_tokens(one) for one in problem.targets[:targets])) for problem in problems]
    draft = [float(sum(_tokens(one) for one in problem.drafts[:drafts])) for problem in problems]
    return np.array(target), np.array(draft)


def _target_alone(problems: Sequence[BankProblem], rate: float) -> Arm:
    """Return the cascade in which the draft's rollouts do not vote on escalated problems."""
    chance = _escalated(_disagreements(problems, 4), rate)
    kept = _votes(problems, 4, 0)
    target, draft = _written(problems, 4, 4)
    right = kept + chance * (_votes(problems, 0, 4) - kept)
    return Arm("target alone where escalated", "4, or 0 + 4", rate, right, chance * target, draft)


def _one_or_four(problems: Sequence[BankProblem], rate: float) -> Arm:
    """Return a cascade with three classes of problems.

    The problems with the least agreement get four target rollouts, the next ones get one, and all
    others get none. A third of the target's rollouts goes to the problems that get one.
    """
    scores = _disagreements(problems, 4)
    four = rate * 2 / 3
    single = min(1.0 - four, 4 * rate / 3)
    of_four = _escalated(scores, four)
    of_any = _escalated(scores, four + single)
    kept = _votes(problems, 4, 0)
    one = _votes(problems, 4, 1)
    all_four = _votes(problems, 4, 4)
    right = kept + (of_any - of_four) * (one - kept) + of_four * (all_four - kept)
    tokens_of_one, draft = _written(problems, 4, 1)
    tokens_of_four, _ = _written(problems, 4, 4)
    spent = (of_any - of_four) * tokens_of_one + of_four * tokens_of_four
    return Arm("stop, one, four", "4 + 0, 1 or 4", four + single, right, spent, draft)


def _more_drafts_first(problems: Sequence[BankProblem], rate: float) -> Arm:
    """Return a cascade that first asks for more draft rollouts.

    The half of the problems with less agreement gets four more draft rollouts. Then the cascade
    decides which problems of this half to escalate.
    """
    doubted = _escalated(_disagreements(problems, 4), 0.5)
    # problems with enough agreement stop, so only the half with more draft rollouts can be
    # escalated
    again = _escalated(_disagreements(problems, 8) + 8 * (doubted > 0), rate)
    chance = np.minimum(again, doubted)
    first = _votes(problems, 4, 0)
    eight = _votes(problems, 8, 0)
    both = _votes(problems, 8, 4)
    target, four = _written(problems, 4, 4)
    _, all_eight = _written(problems, 8, 0)
    right = first + doubted * (eight - first) + chance * (both - eight)
    drafts = four + doubted * (all_eight - four)
    return Arm("more drafts, then four", "4 or 8 + 4", rate, right, chance * target, drafts)


def study(options: Options) -> list[Table]:
    """Compute the table of the live runs in ATTS_LIVE, and every table of the bank in ATTS_BANK."""
    tables: list[Table] = []
    if live := os.environ.get("ATTS_LIVE"):
        folder = Path(live)
        alone = [open_run(path) for path in sorted(folder.glob("target-only*"))]
        tables.append(live_table(open_run(folder / "cascade"), alone))
    return tables + bank_tables()


def bank_tables() -> list[Table]:
    """Compute every table of the bank that ATTS_BANK names."""
    folder = Path(os.environ.get("ATTS_BANK", "bank"))
    path = folder / "bank.jsonl"
    whole = load(path)
    if not whole:
        say(
            "no bank of recordings found: record one with `python -m scripts.studies.judges "
            "DRAFT TARGET FOLDER`, and set ATTS_BANK to the folder"
        )
        return []
    parts = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    # problems are saved in the order in which they were complete; banks of earlier versions used
    # the order of the list
    order = parts.get("order", [problem.name for problem in whole])
    whole.sort(key=lambda problem: order.index(problem.name))
    first = [problem for problem in whole if problem.name in order[:CHOSEN_ON]]
    later = [problem for problem in whole if problem.name in order[CHOSEN_ON:]]
    problems = [problem for problem in first if problem.name in parts["development"]]
    confirming = set(parts["confirmation"]) & set(order[LOOKED_AT:])
    fresh = [problem for problem in first if problem.name in confirming]
    tables = [
        base_rates(whole),
        mean_takeovers_table(first),
        rollouts_table(problems),
        takeovers_table(problems),
        cascade_table(problems),
        classes_table(problems),
    ]
    if fresh:
        tables.append(cascade_table(fresh, f"Whole problems{CONFIRMED}"))
    if later:
        tables.append(cascade_table(later, "Whole problems, on those recorded later"))
        tables.append(cascade_table([*fresh, *later], "Whole problems, on all that were fresh"))
        tables.append(classes_table([*fresh, *later]))
    # the last tables, because charts are named by the number of their table
    if fresh and all(problem.takeovers for problem in fresh):
        tables.append(rollouts_table(fresh, ROLLOUTS_TITLE + CONFIRMED))
        tables.append(takeovers_table(fresh, TAKEOVERS_TITLE + CONFIRMED, problems))
    return tables


RECORDED_FILE = "draft_target.jsonl.gz"
RECORDED_RUN = "ct0"
RULES_TITLE = "Rival rules on recorded rollouts"


def recorded_answers(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the recorded rollouts of the run; rollouts without an answer abstain."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if record["run"] != RECORDED_RUN:
                continue
            answer = (record["answer_balanced"] or "").strip()
            yield {
                "id": str(record["question_id"]),
                "answer": "" if answer == "invalid" else answer,
                "reference": record["gold"],
                "sample": record["problem_index"] % 16,
                "seconds": record["duration_seconds"],
            }


def play(path: Path, orders: int, seed: int) -> Referee:
    """Import the rollouts, and apply all stopping rules to them."""

    async def main(folder: Path) -> None:
        columns = {"answer": "answer"}
        await import_rollouts(
            FORMATS["jsonl"], folder / "rollouts.jsonl", folder / "run", ImportOptions(columns)
        )

    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = "".join(json.dumps(row) + "\n" for row in recorded_answers(path))
        (folder / "rollouts.jsonl").write_text(lines, encoding="utf-8")
        anyio.run(main, folder)
        return referee_run(open_run(folder / "run"), RefereeOptions(orders=orders, seed=seed))


def row(played: RuleRow) -> Row:
    """Return the table's row for one stopping rule."""
    fixed = played.against_fixed
    need = played.problems_for_a_point
    return (
        played.rule,
        played.whose,
        _number(played.samples),
        round(played.seconds),
        f"{100 * played.changed.value:.2f} %",
        _share(played.accuracy),
        "" if fixed is None else _share(fixed.difference, "+"),
        "" if need is None else need,
    )


def _number(found: Estimate) -> str:
    if not found.low < found.high:
        return f"{found.value:.1f}"
    return f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"


def _share(found: Estimate, sign: str = "") -> str:
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def study_rules(options: Options) -> list[Table]:
    """Apply every stopping rule to the recorded rollouts, if their files are available."""
    folder = traces()
    if folder is None:
        return []
    found = play(folder / RECORDED_FILE, options.pick(20, 200, 1_000), options.seed)
    by_rule = {played.rule: played for played in found.rows}
    beta = by_rule["beta"]
    headline = (
        f"of {found.most} samples, exact stops after **{by_rule['exact'].samples.value:.1f}** and "
        f"changes no vote; Beta after **{beta.samples.value:.1f}** and changes "
        f"{100 * beta.changed.value:.2f} %; doubling after "
        f"**{by_rule['doubling'].samples.value:.1f}** and changes "
        f"{100 * by_rule['doubling'].changed.value:.2f} %"
    )
    return [
        Table.of(
            RULES_TITLE,
            "rule | whose | samples | seconds | votes changed | accuracy | "
            "gain over a fixed number | problems for 1 point",
            map(row, found.rows),
            f"{found.problems} problems, {found.most} rollouts each, {found.orders} random orders "
            f"(seed {found.seed}). Brackets are 95 % intervals over problems.",
            *(f"- {played.rule}: {played.about}." for played in found.rows),
            headline=headline,
        )
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
