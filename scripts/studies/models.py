"""The embedded pair measured: accuracy by level, voting, recovery, scores as evidence, early exits,
cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atts.evaluators import Estimate, Samples, score
from atts.evaluators.datasets.arithmetic import Exercise, exercises
from atts.models import EMBEDDED, Embedded, info, path
from scripts.studies.harness import Cell, Options, Row, Table, say
from scripts.studies.train_data import ALARM, Encoder, prompt
from scripts.studies.train_eval import (
    answer,
    chunked,
    drafted_starts,
    first_wrong,
    generate,
    planted_starts,
    rate,
    recovery,
)
from scripts.studies.train_model import Llama, load

TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Sampled:
    """Solutions of one model: for each exercise, its texts, whose last boxed integer is the answer."""

    tests: Sequence[Exercise]
    texts: Sequence[Sequence[str]]

    @property
    def answers(self) -> list[list[int | None]]:
        """Of every text."""
        return [[answer(text) for text in texts] for texts in self.texts]

    def marks(self, level: int | None = None) -> list[list[bool]]:
        """Which are right, of one level or of all."""
        pairs = zip(self.tests, self.answers, strict=True)
        return [
            [given == one.answer for given in answers]
            for one, answers in pairs
            if level in (None, one.level)
        ]


def study(options: Options) -> list[Table]:
    """Every table of docs/models.md but the training record."""
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
        held = [
            Samples("", tuple(m), tuple(a))
            for m, a in zip(found.marks(), found.answers, strict=True)
        ]
        rates = score(held, ks=(samples,)).estimates
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
    """How well the target's mean log-probability tells the draft's first wrong chunks from the
    right ones before.
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
    _, *told = torch.split(logprobs, [len(pieces[0]) - 1, *map(len, pieces[1:])])
    return [float(each.mean()) for each in told]


@torch.inference_mode()
def _exits(target: Llama, encoder: Encoder, tests: Sequence[Exercise]) -> Table:
    """How often each layer, read by the output matrix, already names the last layer's best token."""
    agree = [0] * target.config.num_layers
    tokens = 0
    for one in tests:
        asked, told = encoder.ids([prompt(one.text), one.solution])
        ids = torch.tensor([asked + told])
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
