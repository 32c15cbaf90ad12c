"""Measure the embedded pair: accuracy by level, voting, recovery from errors, and scores as evidence."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from random import Random

import anyio
import torch

from atts.api import Setup, calibrate
from atts.calibration import StoredScores, write_state
from atts.concurrency import collect
from atts.core import SampleRequest, Sampling
from atts.evaluators import Estimate, Samples, mean_estimate, score
from atts.evaluators.datasets.arithmetic import Exercise, exercises, problems
from atts.local import LocalEngine, LocalOptions
from atts.models import EMBEDDED, Embedded, info, path
from atts.sampling import Seed
from scripts.studies.harness import Cell, Options, Row, Table, say
from scripts.studies.train_model import ALARM, Encoder, Llama, load, prompt, wrong_chunk

BOX = re.compile(r"\\boxed\{(-?\d+)\}")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (?:\d+ [-+] \d+ = )?(\d+)")


def generate(
    folder: Path, prompts: Sequence[str], *, temperature: float, seed: int, max_tokens: int = 400
) -> list[str]:
    """Return a saved model's continuation of each rendered prompt, until its end or `max_tokens`."""
    encoder = Encoder.open(folder)
    law = Sampling(temperature)
    requests = [
        SampleRequest(tuple(ids), max_tokens, law, Seed(seed, sample=n))
        for n, ids in enumerate(encoder.ids(prompts))
    ]

    async def write() -> list[str]:
        async with LocalEngine(folder, options=LocalOptions(worker="thread", threads=1)) as engine:
            return [
                encoder.text(one.ids)
                for one in await collect([partial(engine.sample, ask) for ask in requests])
            ]

    return anyio.run(write)


def answer(text: str) -> int | None:
    """Return the last boxed integer."""
    found = BOX.findall(text)
    return int(found[-1]) if found else None


def rate(marks: Sequence[Sequence[bool]]) -> Estimate:
    """Return the share of correct samples, with an interval over problems."""
    return mean_estimate([sum(row) / len(row) for row in marks], sum(map(len, marks)))


def chunked(text: str) -> list[str]:
    """Cut a solution after every blank line; nothing is lost."""
    parts = text.split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def first_wrong(exercise: Exercise, text: str) -> int | None:
    """Return the first chunk whose computation or answer differs from the reference's, or None.

    Wording is free; an order of steps other than the reference's counts as wrong.
    """
    chunks = chunked(text)
    for place, chunk in enumerate(chunks):
        if place < len(exercise.steps):
            wanted = exercise.steps[place].operation
            found = EQUATION.search(chunk)
            expected = (str(wanted.left), wanted.operator, str(wanted.right), str(wanted.value))
            if found is None or found.groups() != expected or BOX.search(chunk):
                return place
        elif place > len(exercise.steps) or answer(chunk) != exercise.answer:
            return place
    return None


def recovery(
    folder: Path, starts: Sequence[tuple[Exercise, str]], *, temperature: float, seed: int
) -> Estimate:
    """Measure how often the model reaches the correct answer after a solution that starts with a
    wrong chunk.
    """
    prompts = [prompt(item.text) + begun for item, begun in starts]
    texts = generate(folder, prompts, temperature=temperature, seed=seed)
    pairs = zip(texts, starts, strict=True)
    return rate(
        [
            [answer(begun + text) == item.answer and answer(text) is not None]
            for text, (item, begun) in pairs
        ]
    )


def planted_starts(tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """Return each exercise correct up to a random step and wrong in it, as in training."""
    random = Random(seed)
    starts: list[tuple[Exercise, str]] = []
    for item in tests:
        place = random.randrange(len(item.steps))
        starts.append((item, "".join(item.chunks[:place]) + wrong_chunk(random, item, place)))
    return starts


def drafted_starts(draft: Path, tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """Return the draft's own solutions up to its first wrong chunk, if it makes one."""
    texts = generate(draft, [prompt(item.text) for item in tests], temperature=0.7, seed=seed)
    starts: list[tuple[Exercise, str]] = []
    for item, text in zip(tests, texts, strict=True):
        place = first_wrong(item, text)
        if place is not None:
            starts.append((item, "".join(chunked(text)[: place + 1])))
    return starts


TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Sampled:
    """Solutions of one model: for each exercise, its texts, whose last boxed integer is the answer."""

    tests: Sequence[Exercise]
    texts: Sequence[Sequence[str]]

    @property
    def answers(self) -> list[list[int | None]]:
        """Return the answers of all texts."""
        return [[answer(text) for text in texts] for texts in self.texts]

    def marks(self, level: int | None = None) -> list[list[bool]]:
        """Return which answers are correct, of one level or of all."""
        pairs = zip(self.tests, self.answers, strict=True)
        return [
            [given == one.answer for given in answers]
            for one, answers in pairs
            if level in (None, one.level)
        ]


def study(options: Options) -> list[Table]:
    """Return the tables of docs/models.md except the training record."""
    torch.set_num_threads(1)
    count = options.pick(50, 200, 1000)
    samples = options.pick(2, 2, 8)
    encoder = Encoder.open(path("target"))
    target = load(path("target"))
    tests = exercises("test", count, seed=options.seed)
    sampled = dict[Embedded, Sampled]()
    for name in EMBEDDED:
        say(f"{name}: {count} problems, {samples} samples each")
        prompts = [prompt(one.text) for one in tests for _ in range(samples)]
        texts = generate(path(name), prompts, temperature=TEMPERATURE, seed=options.seed)
        sampled[name] = Sampled(
            tests, [texts[start : start + samples] for start in range(0, len(texts), samples)]
        )
    return [
        _accuracy(sampled),
        _voting(sampled, samples),
        _recovery(tests, options.seed),
        _evidence(target, encoder, sampled["draft"], options.pick(200, 1000, 4000)),
        _exits(target, encoder, tests[:200]),
        _cost(),
    ]


def _accuracy(sampled: Mapping[Embedded, Sampled]) -> Table:
    rows: list[Row] = []
    for name, found in sampled.items():
        rows += [
            (name, level or "all", *_cells(rate(found.marks(level))))
            for level in (None, 1, 2, 3, 4, 5)
        ]
    note = f"Temperature {TEMPERATURE}, graded by exact match of the last boxed integer; 95 % intervals by problem."
    return Table.of("pass@1 by level", "model | level | pass@1 | low | high | problems", rows, note)


def _voting(sampled: Mapping[Embedded, Sampled], samples: int) -> Table:
    rows: list[Row] = []
    for name, found in sampled.items():
        graded = [
            Samples("", tuple(m), tuple(a))
            for m, a in zip(found.marks(), found.answers, strict=True)
        ]
        rates = score(graded, ks=(samples,)).estimates
        given = zip(found.tests, found.answers, strict=True)
        wrong = [Counter(each for each in answers if each != one.answer) for one, answers in given]
        again = sum(count * (count - 1) for errors in wrong for count in errors.values())
        asked = sum(errors.total() * (samples - 1) for errors in wrong)
        accuracies = (rates[kind].value for kind in ("pass@1", f"maj@{samples}", f"pass@{samples}"))
        rows.append((name, *accuracies, round(again / asked, 3) if asked else None))
    return Table.of(
        "Voting",
        f"model | pass@1 | maj@{samples} | pass@{samples} | same wrong answer again",
        rows,
        "Last column: how often another sample repeats a wrong answer.",
    )


def _recovery(tests: Sequence[Exercise], seed: int) -> Table:
    starts = {
        "planted": planted_starts(tests, seed + 1),
        "the draft's own": drafted_starts(path("draft"), tests, seed + 2),
    }
    rows: list[Row] = []
    for name in reversed(EMBEDDED):
        for kind, begun in starts.items():
            found = recovery(path(name), begun, temperature=TEMPERATURE, seed=seed)
            rows.append((name, kind, *_cells(found)))
    calm = [
        prompt(one.text) + "".join(one.chunks[: 1 + index % len(one.steps)])
        for index, one in enumerate(tests)
    ]
    texts = generate(path("target"), calm, temperature=TEMPERATURE, seed=seed)
    alarms = rate([[text.startswith(ALARM.strip())] for text in texts])
    rows.append(("target", "false alarm after a right step", *_cells(alarms)))
    return Table.of(
        "Recovery",
        "continued by | wrong chunk | rate | low | high | problems",
        rows,
        "Share of solutions that end right after a wrong chunk; last row: share of right chunks "
        "called wrong.",
    )


@torch.inference_mode()
def _evidence(target: Llama, encoder: Encoder, drafts: Sampled, limit: int) -> Table:
    """Measure how well the target's mean log-probability separates the draft's first wrong chunks
    from the correct ones before.
    """
    right = list[float]()
    wrong = list[float]()
    for one, texts in zip(drafts.tests, drafts.texts, strict=True):
        if len(right) + len(wrong) < limit:
            place = first_wrong(one, texts[0])
            chunks = chunked(texts[0])
            scores = _scores(target, encoder, one, chunks if place is None else chunks[: place + 1])
            wrong += scores[len(scores) if place is None else place :]
            right += scores[:place]
    better = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong) / max(
        1, len(right) * len(wrong)
    )
    return Table.of(
        "Chunk scores as evidence",
        "right chunks | wrong chunks | area",
        [(len(right), len(wrong), better)],
        "Area under the curve: the chance that a right chunk scores better than a wrong one.",
    )


def _scores(target: Llama, encoder: Encoder, one: Exercise, chunks: Sequence[str]) -> list[float]:
    pieces = encoder.ids([prompt(one.text), *chunks])
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    states = target.states(ids[:, :-1], target.where(ids.shape[1] - 1, torch.float32))
    logprobs = (
        target.logits(states[-1], torch.float32)
        .log_softmax(-1)[0]
        .gather(1, ids[0, 1:, None])[:, 0]
    )
    _, *scored = torch.split(logprobs, [len(pieces[0]) - 1, *map(len, pieces[1:])])
    return [float(each.mean()) for each in scored]


@torch.inference_mode()
def _exits(target: Llama, encoder: Encoder, tests: Sequence[Exercise]) -> Table:
    """Measure how often each layer, read by the output matrix, names the last layer's best token."""
    agree = [0] * target.config.num_layers
    tokens = 0
    for one in tests:
        asked, solution = encoder.ids([prompt(one.text), one.solution])
        ids = torch.tensor([asked + solution])
        states = target.states(ids, target.where(ids.shape[1], torch.float32))
        best = [
            target.logits(state, torch.float32)[0, len(asked) - 1 :].argmax(-1) for state in states
        ]
        agree = [
            count + int((layer == best[-1]).sum()) for count, layer in zip(agree, best, strict=True)
        ]
        tokens += best[-1].numel()
    rows = [(layer + 1, count / tokens) for layer, count in enumerate(agree)]
    return Table.of(
        "Early exits of the target", "layers used | same best token as all layers", rows
    )


def _cost() -> Table:
    known = {name: info(name) for name in EMBEDDED}
    contexts = (0, 128, 256)
    flops = {
        name: [found.flops_per_token(context) / 1e6 for context in contexts]
        for name, found in known.items()
    }
    rows: list[Row] = [
        (
            name,
            one.layers,
            one.hidden_size,
            one.weights_per_token,
            *(round(each, 3) for each in flops[name]),
            one.bytes,
        )
        for name, one in known.items()
    ]
    ratios = (target / draft for target, draft in zip(flops["target"], flops["draft"], strict=True))
    rows.append(("ratio", None, None, None, *ratios, None))
    header = "model | layers | hidden | weights/token | MFLOP, no context | at 128 | at 256 | bytes"
    return Table.of("Cost of a token, output matrix included", header, rows)


def _cells(found: Estimate) -> tuple[Cell, ...]:
    return round(found.value, 4), round(found.low, 4), round(found.high, 4), found.n_problems


PROBLEMS = 200
SEED = 77
"""Seed of the calibration split, which neither training nor the benchmark uses."""
_LASTING = ("model", "tokenizer", "weights")


def main() -> None:
    """Score chunks of the embedded draft, and write the stored scores that the package ships."""
    parser = argparse.ArgumentParser(prog="models", description=main.__doc__)
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--out", type=Path, default=Path(str(files("atts.models"))) / "scores.json")
    asked = parser.parse_args()
    setup = Setup(seed=SEED, policy=replace(Setup().policy, samples=1))
    found = anyio.run(calibrate, problems("calibration", asked.problems, SEED), setup)
    write_state(asked.out, compact(found).state())
    print(f"{asked.out}: {len(found)} scores of {len(set(found.questions))} problems")


def compact(found: StoredScores) -> StoredScores:
    """Return scores with short names, five digits, and only the conditions that the package itself
    settles.
    """
    names = {name: f"{number}" for number, name in enumerate(dict.fromkeys(found.questions))}
    conditions = {
        name: value
        for name, value in found.fingerprint.items()
        if name.partition(".")[0] not in ("draft", "target") or name.partition(".")[2] in _LASTING
    }
    return replace(
        found,
        scores=tuple(float(f"{score:.5g}") for score in found.scores),
        questions=tuple(names[name] for name in found.questions),
        fingerprint=conditions,
    )


if __name__ == "__main__":
    main()
