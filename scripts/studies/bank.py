"""Record a bank of rollouts of a real pair: the draft's, scored by the target, and what takeovers
change.

Each problem brings `SAMPLES` rollouts of the draft with the log-probabilities of both models and the
draft's entropies, `TARGET_SAMPLES` rollouts of the target alone, the target's verdict on every
finished rollout of the draft, and experiments on some of its chunks: the draft finishes the rollout `CONTINUATIONS` times
after its own chunk, and as often after the target's chunk in its place. The share of correct
answers after the second less that after the first is the measured advantage of a takeover there.

The bank is a file of JSON lines outside the repository. It is written problem by problem, and the
same command continues where it ended. It also adds what complete problems lack, because an earlier
version did not record it or because they were recorded with `--rollouts-only`: the rollouts of both
models, which comparisons of cascades need, and no score or takeover.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

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
from atts.evaluators import extract, judge
from atts.local import LocalEngine, LocalOptions
from atts.pipelines import Policy
from atts.pipelines.judging import RATING
from atts.sampling import Seed
from scripts.studies.harness import rows_of, say

SAMPLES = 8
TARGET_SAMPLES = 4
CONTINUATIONS = 4
FINISHED_BY_TARGET = 2
MAX_TOKENS = 512
CHUNK_TOKENS = 80
STEP = "\n\n"
SAMPLING = Sampling(temperature=0.7)
ORDERS = (("Yes", "No"), ("No", "Yes"))
PROBLEMS_AT_ONCE = 12
CACHE_TOKENS = 60_000


@dataclass(frozen=True, slots=True)
class Split:
    """Problem names in two halves: scores are chosen on the first, and confirmed on the second."""

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
    """Deal problems to development and confirmation in turns of two, so both hold both sources."""
    development = tuple(name for index, name in enumerate(names) if index % 4 < 2)
    confirmation = tuple(name for index, name in enumerate(names) if index % 4 >= 2)
    return Split(development, confirmation)


class Recorder:
    """Makes the records of one problem with a draft and a target that share a tokenizer."""

    def __init__(
        self, draft: Engine, target: Engine, is_whole: bool = True, experiments: int = 1
    ) -> None:
        self.draft = draft
        self.target = target
        self.is_whole = is_whole
        self.experiments = experiments  # chunks of each problem at which a takeover is measured
        self._system = Policy().system

    def prompt(self, problem: Problem) -> TokenIds:
        """Return the ids of the problem, ending where the answer begins."""
        return self.draft.tokenizer.render(
            [Message("system", self._system), Message("user", problem.text)]
        )

    async def records(self, problem: Problem) -> list[dict[str, Any]]:
        """Return all records of a problem."""
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
        """Return the records that a complete problem lacks."""
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
        """Return what both models say of a finished rollout, as far as its record lacks it."""
        ids = tuple(rollout["ids"])
        fields: dict[str, Any] = {}
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
        """Let a model continue these ids."""
        engine = self.draft if role == "draft" else self.target
        return await engine.sample(SampleRequest(ids, tokens, SAMPLING, seed, stop))

    def chunks(self, ids: TokenIds) -> list[int]:
        """Return the end of each chunk: after a blank line, or at its greatest length."""
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

    def verdict(self, problem: Problem, text: str) -> tuple[str | None, bool]:
        """Return the answer of a finished text, and whether it is right."""
        answer = extract(text)
        return answer, answer is not None and judge(problem, answer).status == "equal"

    async def drafted(self, problem: Problem, prompt: TokenIds, sample: int) -> dict[str, Any]:
        """Return one rollout of the draft with the target's log-probabilities and verdict."""
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
        """Return one rollout of the target alone."""
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
        """Return, for both orders of the choice, log-odds of the target's "Yes" against its "No"."""
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
        """Return the target's log-probabilities of the ratings 0 to 9 after these ids."""
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
        """Measure what takeovers change at the problem's chunks, as far as that is not recorded."""
        measured = {(one["sample"], one["chunk"]) for one in recorded}
        made: list[dict[str, Any]] = []
        for rollout, index in places(problem.id, rollouts, self.experiments):
            if (rollout["sample"], index) not in measured:
                made.append(await self.experiment(problem, prompt, rollout, index))
        return made

    async def experiment(
        self, problem: Problem, prompt: TokenIds, rollout: dict[str, Any], index: int
    ) -> dict[str, Any]:
        """Measure what a takeover changes at one chunk."""
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
        """Return the outcome of a begun rollout if this model finishes it."""
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
    """Return the chunks at which takeovers are measured, chosen by the problem's name.

    No rollout's last chunk is among them. More of them begin with the same ones.
    """
    left = [(rollout, index) for rollout in rollouts for index in range(len(rollout["chunks"]) - 1)]
    chosen: list[tuple[dict[str, Any], int]] = []
    for number in range(min(count, len(left))):
        # the first name is that of banks with one experiment a problem
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
    """Record these problems, some at a time, or what they lack."""
    recorded: dict[str, list[dict[str, Any]]] = {}
    for entry in read(path):
        recorded.setdefault(entry["problem"], []).append(entry)
    recorded = {name: merged(records) for name, records in recorded.items()}
    async with (
        LocalEngine(draft, name="draft", options=options) as small,
        LocalEngine(target, name="target", options=options) as large,
    ):
        recorder = Recorder(small, large, is_whole, experiments)

        async def records(problem: Problem) -> list[dict[str, Any]]:
            before = recorded.get(problem.id)
            if before is None:
                return await recorder.records(problem)
            return await recorder.missing(problem, before)

        for begin in range(0, len(wanted), PROBLEMS_AT_ONCE):
            some = wanted[begin : begin + PROBLEMS_AT_ONCE]
            answers = await collect([partial(records, problem) for problem in some])
            lines: list[dict[str, Any]] = []
            for problem, made in zip(some, answers, strict=True):
                lines += [*made, {"kind": "complete", "problem": problem.id}]
            append(path, lines)
            say(f"bank: {begin + len(some)} of {len(wanted)} problems recorded")


def merged(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a problem's records with what was added to them later."""
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
    """Return whether a problem has every reading, and as many experiments as it has room for."""
    drafts = [one for one in records if one["kind"] == "draft"]
    takeovers = [one for one in records if one["kind"] == "takeover"]
    wanted = len(places(records[0]["problem"], drafts, experiments)) if drafts else 0
    return len(takeovers) >= wanted and all(
        name in one
        for one in drafts
        for name in ("draft_entropies", "target_logprobs", "said_correct")
    )


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Add lines to a bank."""
    with path.open("a", encoding="utf-8") as file:
        for line in records:
            file.write(json.dumps(line) + "\n")


def begin_bank(
    out: Path, limit: int, rollouts_only: bool = False, experiments: int = 1
) -> tuple[Path, list[Problem]]:
    """Write down the split before anything is measured.

    Return the file, and the problems that it lacks or of which something is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bank.jsonl"
    wanted = problems()[:limit]
    parts = split([problem.id for problem in wanted])
    text = json.dumps({"development": parts.development, "confirmation": parts.confirmation})
    (out / "split.json").write_text(text, encoding="utf-8")
    recorded: dict[str, list[dict[str, Any]]] = {}
    for entry in read(path):
        recorded.setdefault(entry["problem"], []).append(entry)
    complete = {
        name
        for name, records in recorded.items()
        if rollouts_only or has_everything(merged(records), experiments)
    }
    # what is new comes first: problems that only lack a reading can be used already
    lacking = [problem for problem in wanted if problem.id not in complete]
    return path, sorted(lacking, key=lambda problem: problem.id in recorded)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a bank from the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.studies.bank", description=__doc__)
    parser.add_argument("draft", type=Path, help="folder of the draft model")
    parser.add_argument("target", type=Path, help="folder of the target model")
    parser.add_argument("out", type=Path, help="folder of the bank, outside the repository")
    parser.add_argument("--limit", type=int, default=160, help="problems")
    parser.add_argument("--threads", type=int, default=2, help="of each model's steps")
    parser.add_argument(
        "--rollouts-only",
        action="store_true",
        help="neither scores nor takeovers: enough to compare cascades, in a quarter of the time",
    )
    parser.add_argument(
        "--experiments", type=int, default=1, help="chunks of each problem to take over"
    )
    given = parser.parse_args(arguments)
    if not problems():
        parser.error("no benchmark files at hand: name their folder in ATTS_SHARED_DATA")
    path, wanted = begin_bank(given.out, given.limit, given.rollouts_only, given.experiments)
    options = LocalOptions(
        device="cpu", threads=given.threads, max_batch=128, kv_tokens=CACHE_TOKENS
    )
    is_whole = not given.rollouts_only
    anyio.run(record, given.draft, given.target, path, wanted, options, is_whole, given.experiments)


if __name__ == "__main__":
    main(sys.argv[1:])
