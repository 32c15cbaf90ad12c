"""The embedded pair measured: accuracy by level, voting, recovery, scores as evidence, early exits, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atts.evaluators.datasets.arithmetic import Exercise, exercises
from atts.models import EMBEDDED, Embedded, info, path
from scripts.studies.harness import Cell, Options, Table, say
from scripts.studies.train_data import ALARM, Encoder, prompt
from scripts.studies.train_eval import (
    Rate,
    answer,
    chunked,
    drafted_starts,
    first_wrong,
    generate,
    planted_starts,
    rate,
    recovery,
    wilson,
)
from scripts.studies.train_model import Llama, load

TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Sampled:
    """Solutions of one model: for each exercise, its texts."""

    tests: Sequence[Exercise]
    texts: Sequence[Sequence[str]]

    def marks(self) -> list[list[bool]]:
        """Which are right: the last boxed integer is the answer."""
        pairs = zip(self.tests, self.texts, strict=True)
        return [[answer(text) == item.answer for text in texts] for item, texts in pairs]


def study(options: Options) -> list[Table]:
    """Every table of docs/models.md but the training record."""
    torch.set_num_threads(1)
    count, samples = options.pick(50, 200, 1000), options.pick(2, 2, 8)
    encoder = Encoder.open(path("target"))
    models: dict[Embedded, Llama] = {name: load(path(name)) for name in EMBEDDED}
    tests = exercises("test", count, seed=options.seed)
    sampled: dict[Embedded, Sampled] = {}
    for name in EMBEDDED:
        say(f"{name}: {count} problems, {samples} samples each")
        sampled[name] = _sampled(models[name], encoder, tests, samples, options.seed)
    return [
        _accuracy(sampled),
        _voting(sampled, samples),
        _recovery(models, encoder, tests, options.seed),
        _evidence(models["target"], encoder, sampled["draft"], options.pick(200, 1000, 4000)),
        _exits(models["target"], encoder, tests[:200]),
        _cost(),
    ]


def _sampled(model: Llama, encoder: Encoder, tests: Sequence[Exercise], samples: int, seed: int) -> Sampled:
    prompts = [prompt(item.text) for item in tests for _ in range(samples)]
    texts = generate(model, encoder, prompts, temperature=TEMPERATURE, seed=seed)
    return Sampled(tests, [texts[start : start + samples] for start in range(0, len(texts), samples)])


def _accuracy(sampled: dict[Embedded, Sampled]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, found in sampled.items():
        marks = found.marks()
        for level in (None, 1, 2, 3, 4, 5):
            pairs = zip(marks, found.tests, strict=True)
            rows.append((name, level or "all", *_cells(rate([m for m, e in pairs if level in (None, e.level)]))))
    note = f"Temperature {TEMPERATURE}, graded by exact match of the last boxed integer; 95 % intervals by problem."
    return Table("pass@1 by level", ("model", "level", "pass@1", "low", "high", "problems"), tuple(rows), (note,))


def _voting(sampled: dict[Embedded, Sampled], samples: int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, found in sampled.items():
        voted, any_right, wrong, same = list[list[bool]](), list[list[bool]](), 0, 0
        for item, texts in zip(found.tests, found.texts, strict=True):
            answers = [answer(text) for text in texts]
            voted.append([Counter(answers).most_common(1)[0][0] == item.answer])
            any_right.append([item.answer in answers])
            errors = Counter(one for one in answers if one != item.answer)
            wrong += sum(count * (samples - 1) for count in errors.values())
            same += sum(count * (count - 1) for count in errors.values())
        agree = round(same / wrong, 3) if wrong else None
        rows.append((name, rate(found.marks()).right, rate(voted).right, rate(any_right).right, agree))
    columns = ("model", "pass@1", f"maj@{samples}", f"pass@{samples}", "same wrong answer again")
    return Table("Voting", columns, tuple(rows), ("Last column: how often another sample repeats a wrong answer.",))


def _recovery(models: dict[Embedded, Llama], encoder: Encoder, tests: Sequence[Exercise], seed: int) -> Table:
    planted = planted_starts(tests, seed + 1)
    drafted = drafted_starts(models["draft"], encoder, tests, seed + 2)
    rows: list[tuple[Cell, ...]] = []
    for name in reversed(EMBEDDED):
        for kind, starts in (("planted", planted), ("the draft's own", drafted)):
            found = recovery(models[name], encoder, starts, temperature=TEMPERATURE, seed=seed)
            rows.append((name, kind, *_cells(found)))
    calm = [(item, "".join(item.chunks[: 1 + index % len(item.steps)])) for index, item in enumerate(tests)]
    texts = generate(
        models["target"],
        encoder,
        [prompt(item.text) + begun for item, begun in calm],
        temperature=TEMPERATURE,
        seed=seed,
    )
    alarms = sum(text.startswith(ALARM.strip()) for text in texts)
    rows.append(("target", "false alarm after a right step", *_cells(wilson(alarms / len(texts), len(texts)))))
    note = "Share of solutions that end right after a wrong chunk; last row: share of right chunks called wrong."
    return Table("Recovery", ("continued by", "wrong chunk", "rate", "low", "high", "problems"), tuple(rows), (note,))


@torch.inference_mode()
def _evidence(target: Llama, encoder: Encoder, drafts: Sampled, limit: int) -> Table:
    """How well the target's mean log-probability tells the draft's first wrong chunks from the right ones before."""
    right, wrong = list[float](), list[float]()
    for item, texts in zip(drafts.tests, drafts.texts, strict=True):
        if len(right) + len(wrong) >= limit:
            break
        place, chunks = first_wrong(item, texts[0]), chunked(texts[0])
        known = chunks if place is None else chunks[: place + 1]
        for index, score in enumerate(_scores(target, encoder, item, known)):
            (wrong if index == place else right).append(score)
    below = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong) / max(1, len(right) * len(wrong))
    rows = ((len(right), len(wrong), below),)
    note = "Area under the curve: the chance that a right chunk scores better than a wrong one."
    return Table("Chunk scores as evidence", ("right chunks", "wrong chunks", "area"), rows, (note,))


def _scores(target: Llama, encoder: Encoder, item: Exercise, chunks: Sequence[str]) -> list[float]:
    pieces = encoder.ids([prompt(item.text), *chunks])
    ids = torch.tensor([[one for piece in pieces for one in piece]])
    states = target.states(ids[:, :-1], target.where(ids.shape[1] - 1, torch.float32))
    laws = target.logits(states[-1], torch.float32).log_softmax(-1)
    found = laws[0].gather(1, ids[0, 1:, None])[:, 0]
    scores, start = list[float](), len(pieces[0]) - 1
    for piece in pieces[1:]:
        scores.append(float(found[start : start + len(piece)].mean()))
        start += len(piece)
    return scores


@torch.inference_mode()
def _exits(target: Llama, encoder: Encoder, tests: Sequence[Exercise]) -> Table:
    """How often each layer, read by the output matrix, already names the last layer's best token."""
    agree, tokens = [0] * target.config.num_layers, 0
    for item in tests:
        asked, told = encoder.ids([prompt(item.text), item.solution])
        ids = torch.tensor([asked + told])
        states = target.states(ids, target.where(ids.shape[1], torch.float32))
        best = [target.logits(state, torch.float32)[0, len(asked) - 1 :].argmax(-1) for state in states]
        agree = [count + int((one == best[-1]).sum()) for count, one in zip(agree, best, strict=True)]
        tokens += best[-1].numel()
    rows = tuple((layer + 1, count / tokens) for layer, count in enumerate(agree))
    return Table("Early exits of the target", ("layers used", "same best token as all layers"), rows)


def _cost() -> Table:
    known = {name: info(name) for name in EMBEDDED}
    rows: list[tuple[Cell, ...]] = []
    for name, found in known.items():
        flops = [round(found.flops_per_token(context) / 1e6, 3) for context in (0, 128, 256)]
        rows.append((name, found.layers, found.hidden_size, found.weights_per_token, *flops, found.bytes))
    ratios = [known["target"].flops_per_token(c) / known["draft"].flops_per_token(c) for c in (0, 128, 256)]
    rows.append(("ratio", None, None, None, *ratios, None))
    columns = ("model", "layers", "hidden", "weights/token", "MFLOP, no context", "at 128", "at 256", "bytes")
    return Table("Cost of a token, output matrix included", columns, tuple(rows))


def _cells(found: Rate) -> tuple[Cell, ...]:
    return round(found.right, 4), round(found.low, 4), round(found.high, 4), found.count
