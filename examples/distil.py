"""Distil the draft: export a run, train the draft on it, and run again with fewer escalations.

This is on-policy distillation: the draft writes, the target lists its most likely tokens at every
position (`atts export RUN --as opd --teacher MODEL`), and training reduces the divergence of the
draft from the target. Every second problem is only used for the measurements, not for training.
`--noise` first disturbs the draft's weights, to imitate a draft that was never distilled.
"""

import argparse
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from atts import Policy, Setup, evaluate_sync
from atts.analysis import ExportOptions, export_run
from atts.api import open_teacher
from atts.core import Problem, Sampling
from atts.evaluators import load_dataset
from atts.journal import open_run
from atts.models import path as embedded
from atts.pipelines import ThresholdGate

Record = dict[str, Any]
# measurements, keyed by problem and by name of the measure
Found = dict[str, dict[str, list[float]]]
ON_POLICY = Policy(samples=4, early_stop="none", sampling=Sampling(temperature=1.0))


def rollouts(
    draft: str, problems: list[Problem], bar: float, seed: int, folder: Path
) -> list[Record]:
    """Run draft and target, escalate chunks with a perplexity above `bar`, and return the exported
    records.
    """
    setup = Setup(
        draft=draft, target="embedded", policy=ON_POLICY, gate=ThresholdGate(bar), seed=seed
    )
    evaluate_sync(problems, setup, directory=folder)
    file = folder / "opd.jsonl"
    with open_teacher("embedded:target", top=20) as teacher:
        export_run(open_run(folder), file, ExportOptions("opd"), teacher)
    return [json.loads(line) for line in file.read_text().splitlines()]


def divergence(model: Any, records: list[Record]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(draft || target) at every position, and a mask of the positions used for training.

    The divergence is computed over the tokens that the target lists; all other tokens count as one
    token.
    """
    texts = [record["prompt_ids"] + record["ids"] for record in records]
    length = max(map(len, texts))
    ids = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    listed = torch.zeros(len(records), length - 1, 20, dtype=torch.long)
    theirs = torch.full(listed.shape, -30.0)
    mask = torch.zeros(len(records), length - 1)
    for row, record in enumerate(records):
        places = slice(len(record["prompt_ids"]) - 1, len(texts[row]) - 1)
        listed[row, places] = torch.tensor(record["top_ids"])
        theirs[row, places] = torch.tensor(record["top_logprobs"])
        mask[row, places] = torch.tensor(record["mask"], dtype=torch.float32)
    # The padding comes after the text, so causal attention never reads the padding.
    ours = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, listed)
    rest = torch.log1p(-ours.exp().sum(-1).clamp(max=1 - 1e-6))
    their_rest = torch.log1p(-theirs.exp().sum(-1).clamp(max=1 - 1e-6))
    places = (ours.exp() * (ours - theirs)).sum(-1) + rest.exp() * (rest - their_rest)
    return places * mask, mask


def batches(records: list[Record], size: int = 16) -> list[list[Record]]:
    """Divide records into batches of similar length."""
    ordered = sorted(records, key=lambda one: len(one["prompt_ids"]) + len(one["ids"]))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def train(model: Any, records: list[Record], epochs: int, seed: int, rate: float = 3e-4) -> None:
    """Train the draft with AdamW; the learning rate falls to zero."""
    order = random.Random(seed)
    steps = batches(records) * epochs
    order.shuffle(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(steps))
    for batch in steps:
        places, mask = divergence(model, batch)
        loss = places.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def saved(model: Any, folder: Path) -> str:
    """Save the draft with its tokenizer in a folder, and return its address as an engine."""
    shutil.copytree(embedded("draft"), folder)
    model.save_pretrained(folder)
    return f"hf:{folder}"


def per_problem(model: Any, records: list[Record]) -> Found:
    """Return, for each problem, the divergences, the escalations and whether answers are correct."""
    found: Found = defaultdict(lambda: defaultdict(list))
    with torch.inference_mode():
        for batch in batches(records):
            places, mask = divergence(model, batch)
            for record, place, counts in zip(batch, places, mask, strict=True):
                found[record["problem"]]["KL"] += place[counts > 0].tolist()
    for record in records:
        if record["part"] == "rollout":
            actions = [decision["action"] for decision in record["decisions"]]
            found[record["problem"]]["escalated"] += [float(one == "escalate") for one in actions]
            found[record["problem"]]["correct"].append(float(record["correct"] is True))
    return found


def interval(pairs: np.ndarray[Any, Any], seed: int = 0) -> tuple[float, float, float]:
    """Return the difference of two means and its 95 % interval, computed by a bootstrap over
    problems.

    Each row of `pairs` is a problem: sum and count after training, sum and count before training.
    """
    draws = np.random.default_rng(seed).integers(len(pairs), size=(2000, len(pairs)))
    sums = np.vstack([pairs.sum(0), pairs[draws].sum(1)])
    differences = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]
    low, high = np.quantile(differences[1:], [0.025, 0.975])
    return float(differences[0]), float(low), float(high)


def round_trip(
    problems: list[Problem], noise: float, epochs: int, seed: int
) -> tuple[Found, Found]:
    """Return the measurements before and after training the draft on an export.

    Every second problem is used for training, and the others for the measurements.
    """
    torch.manual_seed(seed)
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(embedded("draft"), dtype=torch.float32)
    for weight in model.parameters():
        if noise and weight.ndim > 1:
            weight.data += torch.randn_like(weight) * weight.std() * noise
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draft = saved(model, folder / "before")
        learned = rollouts(draft, problems[::2], 1e9, seed, folder / "learn")
        scores = [step["score"] for one in learned for step in one["decisions"]]
        bar = float(np.quantile([score for score in scores if score is not None], 0.8))
        first = rollouts(draft, problems[1::2], bar, seed, folder / "first")
        before = per_problem(model, first)
        train(model, learned, epochs, seed)
        draft = saved(model, folder / "after")
        second = rollouts(draft, problems[1::2], bar, seed, folder / "second")
        return before, per_problem(model, second)


def by_measure(trips: Iterable[tuple[Found, Found]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return, for each measure, the rows for `interval`. Each problem has one row, summed over all
    training runs.
    """
    sums: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(lambda: np.zeros(4)))
    for before, after in trips:
        for name, measures in before.items():
            for measure, was in measures.items():
                now = after[name][measure]
                sums[measure][name] += [sum(now), len(now), sum(was), len(was)]
    return {measure: np.array(list(rows.values())) for measure, rows in sums.items()}


def main(words: list[str] | None = None) -> None:
    """Train once per seed, and print the changes on the problems that were left out of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--problems", type=int, default=24, help="number of problems; half of them are for training"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="noise relative to the standard deviation of each matrix",
    )
    options = parser.parse_args(words)
    problems = list(load_dataset(f"arithmetic[:{options.problems}]").problems)
    trips = [
        round_trip(problems, options.noise, options.epochs, seed) for seed in range(options.seeds)
    ]
    print(
        f"{options.problems // 2} problems left out of training, 4 rollouts of each, "
        f"seeds: {options.seeds}"
    )
    for measure, pairs in by_measure(trips).items():
        difference, low, high = interval(pairs)
        now, counted, was, counts = pairs.sum(0)
        print(
            f"{measure:10} {was / counts:.4f} -> {now / counted:.4f}, "
            f"difference {difference:+.4f} [{low:+.4f}, {high:+.4f}], n = {counts:.0f}"
        )


if __name__ == "__main__":
    main()
