"""The embedded pair measured: accuracy by level, voting, recovery, scores as evidence, early exits, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atts.evaluators import Estimate
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
    """Solutions of one model: for each exercise, its texts."""

    tests: Sequence[Exercise]
    texts: Sequence[Sequence[str]]

    def marks(self, level: int | None = None) -> list[list[bool]]:
        """Which are right, of one level or of all: the last boxed integer is the answer."""
        pairs = zip(self.tests, self.texts, strict=True)
        return [[answer(text) == one.answer for text in texts] for one, texts in pairs if level in (None, one.level)]


def study(options: Options) -> list[Table]:
    """Every table of docs/models.md but the training record."""
    torch.set_num_threads(1)
    count, samples = options.pick(50, 200, 1000), options.pick(2, 2, 8)
    encoder, target = Encoder.open(path("target")), load(path("target"))
    tests, sampled = exercises("test", count, seed=options.seed), dict[Embedded, Sampled]()
    for name in EMBEDDED:
        say(f"{name}: {count} problems, {samples} samples each")
        prompts = [prompt(one.text) for one in tests for _ in range(samples)]
        texts = generate(path(name), prompts, temperature=TEMPERATURE, seed=options.seed)
        sampled[name] = Sampled(tests, [texts[start : start + samples] for start in range(0, len(texts), samples)])
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
        rows += [(name, level or "all", *_cells(rate(found.marks(level)))) for level in (None, 1, 2, 3, 4, 5)]
    note = f"Temperature {TEMPERATURE}, graded by exact match of the last boxed integer; 95 % intervals by problem."
    return Table.of("pass@1 by level", "model | level | pass@1 | low | high | problems", rows, note)


def _voting(sampled: Mapping[Embedded, Sampled], samples: int) -> Table:
    rows: list[Row] = []
    for name, found in sampled.items():
        voted, held, wrong, same = list[list[bool]](), list[list[bool]](), 0, 0
        for one, texts in zip(found.tests, found.texts, strict=True):
            answers = [answer(text) for text in texts]
            voted.append([Counter(answers).most_common(1)[0][0] == one.answer])
            held.append([one.answer in answers])
            errors = Counter(given for given in answers if given != one.answer)
            wrong += sum(count * (samples - 1) for count in errors.values())
            same += sum(count * (count - 1) for count in errors.values())
        agree = round(same / wrong, 3) if wrong else None
        rows.append((name, *(rate(marks).value for marks in (found.marks(), voted, held)), agree))
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
    calm = [prompt(one.text) + "".join(one.chunks[: 1 + index % len(one.steps)]) for index, one in enumerate(tests)]
    texts = generate(path("target"), calm, temperature=TEMPERATURE, seed=seed)
    alarms = rate([[text.startswith(ALARM.strip())] for text in texts])
    rows.append(("target", "false alarm after a right step", *_cells(alarms)))
    return Table.of(
        "Recovery",
        "continued by | wrong chunk | rate | low | high | problems",
        rows,
        "Share of solutions that end right after a wrong chunk; last row: share of right chunks called wrong.",
    )


@torch.inference_mode()
def _evidence(target: Llama, encoder: Encoder, drafts: Sampled, limit: int) -> Table:
    """How well the target's mean log-probability tells the draft's first wrong chunks from the right ones before."""
    right, wrong = list[float](), list[float]()
    for one, texts in zip(drafts.tests, drafts.texts, strict=True):
        if len(right) + len(wrong) >= limit:
            break
        place, chunks = first_wrong(one, texts[0]), chunked(texts[0])
        known = chunks if place is None else chunks[: place + 1]
        for index, score in enumerate(_scores(target, encoder, one, known)):
            (wrong if index == place else right).append(score)
    below = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong) / max(1, len(right) * len(wrong))
    return Table.of(
        "Chunk scores as evidence",
        "right chunks | wrong chunks | area",
        [(len(right), len(wrong), below)],
        "Area under the curve: the chance that a right chunk scores better than a wrong one.",
    )


def _scores(target: Llama, encoder: Encoder, one: Exercise, chunks: Sequence[str]) -> list[float]:
    pieces = encoder.ids([prompt(one.text), *chunks])
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    states = target.states(ids[:, :-1], target.where(ids.shape[1] - 1, torch.float32))
    logprobs = target.logits(states[-1], torch.float32).log_softmax(-1)
    found = logprobs[0].gather(1, ids[0, 1:, None])[:, 0]
    scores, start = list[float](), len(pieces[0]) - 1
    for piece in pieces[1:]:
        scores.append(float(found[start : start + len(piece)].mean()))
        start += len(piece)
    return scores


@torch.inference_mode()
def _exits(target: Llama, encoder: Encoder, tests: Sequence[Exercise]) -> Table:
    """How often each layer, read by the output matrix, already names the last layer's best token."""
    agree, tokens = [0] * target.config.num_layers, 0
    for one in tests:
        asked, told = encoder.ids([prompt(one.text), one.solution])
        ids = torch.tensor([asked + told])
        states = target.states(ids, target.where(ids.shape[1], torch.float32))
        best = [target.logits(state, torch.float32)[0, len(asked) - 1 :].argmax(-1) for state in states]
        agree = [count + int((layer == best[-1]).sum()) for count, layer in zip(agree, best, strict=True)]
        tokens += best[-1].numel()
    rows = [(layer + 1, count / tokens) for layer, count in enumerate(agree)]
    return Table.of("Early exits of the target", "layers used | same best token as all layers", rows)


def _cost() -> Table:
    known, contexts = {name: info(name) for name in EMBEDDED}, (0, 128, 256)
    rows: list[Row] = []
    for name, found in known.items():
        flops = [round(found.flops_per_token(context) / 1e6, 3) for context in contexts]
        rows.append((name, found.layers, found.hidden_size, found.weights_per_token, *flops, found.bytes))
    ratios = [known["target"].flops_per_token(c) / known["draft"].flops_per_token(c) for c in contexts]
    rows.append(("ratio", None, None, None, *ratios, None))
    header = "model | layers | hidden | weights/token | MFLOP, no context | at 128 | at 256 | bytes"
    return Table.of("Cost of a token, output matrix included", header, rows)


def _cells(found: Estimate) -> tuple[Cell, ...]:
    return round(found.value, 4), round(found.low, 4), round(found.high, 4), found.n_problems
