"""Measure the embedded pair: accuracy by level, voting, recovery from errors, and scores as
evidence.

The last part exports the training data of a run, trains the draft on them, and measures whether the
trained draft escalates less.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch

from atts.api import Setup, calibrate
from atts.calibration import StoredScores, write_state
from atts.evaluators import Estimate, Samples, load_dataset, mean_estimate, score
from atts.evaluators.datasets.arithmetic import Exercise, exercises, problems
from atts.models import EMBEDDED, Embedded, info, path
from scripts.studies.harness import Cell, Options, Parts, Row, Table, say
from scripts.studies.train import (
    ALARM,
    Encoder,
    Llama,
    answer,
    chunked,
    first_wrong,
    generate,
    load,
    prompt,
    wrong_chunk,
)


def rate(marks: Sequence[Sequence[bool]]) -> Estimate:
    """Return the share of correct samples, with an interval over problems."""
    return mean_estimate([sum(row) / len(row) for row in marks], sum(map(len, marks)))


def recovery(
    folder: Path, starts: Sequence[tuple[Exercise, str]], *, temperature: float, seed: int
) -> Estimate:
    """Measure how often the model reaches the correct answer if it continues a solution whose last
    chunk is wrong.
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
    """Return each exercise with the start of a solution, as in training: its last chunk is wrong,
    and the chunks before it are correct.
    """
    random = Random(seed)
    starts: list[tuple[Exercise, str]] = []
    for item in tests:
        place = random.randrange(len(item.steps))
        starts.append((item, "".join(item.chunks[:place]) + wrong_chunk(random, item, place)))
    return starts


def drafted_starts(draft: Path, tests: Sequence[Exercise], seed: int) -> list[tuple[Exercise, str]]:
    """Return the start of each solution that the draft got wrong, up to its first wrong chunk."""
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
    """Solutions that one model wrote for each exercise; the last boxed integer of a text is its
    answer.
    """

    tests: Sequence[Exercise]
    texts: Sequence[Sequence[str]]

    @property
    def answers(self) -> list[list[int | None]]:
        """Return the answers of all texts."""
        return [[answer(text) for text in texts] for texts in self.texts]

    def marks(self, level: int | None = None) -> list[list[bool]]:
        """Return whether each answer is correct, for one level or for all levels."""
        pairs = zip(self.tests, self.answers, strict=True)
        return [
            [given == one.answer for given in answers]
            for one, answers in pairs
            if level in (None, one.level)
        ]


def study(options: Options) -> list[Table]:
    """Return the tables of docs/models.md, except the record of the training."""
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
    note = (
        f"Temperature {TEMPERATURE}, answers graded by exact match of the last boxed integer; "
        "*low* and *high* are 95 % intervals over problems."
    )
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
        "*Same wrong answer again* is the probability that another sample of the problem "
        "repeats a wrong answer.",
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
        "*Rate* is the share of solutions that end correctly after a wrong chunk; in the last "
        "row, it is the share of correct chunks that the target calls wrong.",
    )


@torch.inference_mode()
def _evidence(target: Llama, encoder: Encoder, drafts: Sampled, limit: int) -> Table:
    """Measure how well the target's mean log-probability separates correct chunks of the draft from
    the first wrong chunk.
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
        "correct chunks | wrong chunks | AUROC",
        [(len(right), len(wrong), better)],
        "AUROC is the probability that a correct chunk scores better than a wrong chunk.",
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
    """Measure for each layer how often its state gives the same most likely token as the last
    layer's state, under the same output matrix.
    """
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
    """Return a compact copy: short names, scores of five digits, and only conditions that the
    package determines.
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


DISTILLED_DRAFTS = (("disturbed", 0.08), ("as shipped", 0.0))
"""Each draft with the noise added to its weights, as a share of each matrix's standard deviation.
"""
ROUND_TRIP = "The round trip: export, train the draft, run again"
_SCALES = {"KL": 1.0, "escalated": 100.0, "correct": 100.0}


def study_distillation(options: Options) -> list[Table]:
    """Train each draft with each seed on the export of a run, and measure the trained draft on
    problems outside the training data.
    """
    from examples.distil import by_measure, interval, round_trip

    count = options.pick(16, 60, 120)
    epochs = options.pick(3, 6, 6)
    seeds = options.pick(1, 2, 4)
    problems = list(load_dataset(f"arithmetic[:{count}]").problems)
    rows: list[Row] = []
    found: dict[str, Any] = {}
    parts = Parts(options.file("distil-parts.jsonl"))
    for draft, noise in DISTILLED_DRAFTS:
        trips: list[Any] = []
        for seed in range(options.seed, options.seed + seeds):
            name = f"{draft}, seed {seed}, {count} problems, {epochs} epochs"
            if name not in parts:
                say(f"distil: {name}")
                parts.keep(name, round_trip(problems, noise, epochs, seed))
            trips.append(parts[name])
        measured = by_measure(trips)
        cells: list[str | int] = [draft, seeds]
        for measure, scale in _SCALES.items():
            now, counted, was, counts = measured[measure].sum(0)
            difference, low, high = (scale * one for one in interval(measured[measure]))
            digits = 3 if scale == 1 else 1
            before, after = scale * was / counts, scale * now / counted
            cells += [
                f"{before:.{digits}f} to {after:.{digits}f}",
                f"{difference:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]",
            ]
            found[f"{draft} {measure}"] = cells[-1]
        rows.append(tuple(cells))
    return [
        Table.of(
            ROUND_TRIP,
            "draft | seeds | KL per token | change | chunks escalated, % | change, points | "
            "rollouts correct, % | change, points",
            rows,
            f"Measured on {count // 2} problems that were not trained on, with 4 rollouts each, "
            f"after {epochs} epochs of training; 95 % intervals over problems. The disturbed "
            f"draft has noise of {DISTILLED_DRAFTS[0][1]} on its weights.",
            headline=f"a disturbed draft that is distilled on a run's export escalates "
            f"**{found['disturbed escalated']} points** of chunks, with "
            f"{found['disturbed correct']} points of rollouts correct",
        )
    ]


if __name__ == "__main__":
    main()
