"""Trains the embedded pair from a seed: tokenizer, draft, its errors, then the target that corrects
them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from atts.evaluators.datasets.arithmetic import exercises
from scripts.studies.models import answer, chunked, first_wrong, generate
from scripts.studies.train_data import (
    Batch,
    Cursor,
    Encoder,
    Errors,
    Mixture,
    batches,
    build_tokenizer,
    prompt,
)
from scripts.studies.train_model import Descent, Llama, ModelConfig, Workers, save
from scripts.studies.train_proposers import (
    DrafterRecipe,
    HeadsRecipe,
    train_deep_drafter,
    train_exit_and_streams,
)

ROOT = Path(__file__).resolve().parents[2]
_REPORT_EVERY = 20
_KEEP_EVERY = 100
_CHECK_EVERY = 250  # steps


@dataclass(frozen=True, slots=True)
class Stage:
    """What is learned from a step on."""

    start: int
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what a model becomes, its seed included."""

    model: ModelConfig
    steps: int
    seed: int
    stages: tuple[Stage, ...]
    # (step, share of the peak rates), joined by straight lines
    schedule: tuple[tuple[int, float], ...]
    micro_tokens: int = 2048
    micro_batches: int = 4
    workers: int = 2  # processes a step's micro-batches are dealt to; decides the order of sums
    muon_rate: float = 0.02
    adam_rate: float = 0.004
    decay: float = 0.0  # of the weights Muon moves

    def stage(self, step: int) -> Stage:
        """The stage a step belongs to."""
        return [stage for stage in self.stages if stage.start <= step][-1]


EASY = (("instructions", 0.35), ("expression", 0.35), ("story", 0.7))
"""Kinds whose next operation is simply the next one told are learned first; later there is less of
them.
"""

LEARNED = (("instructions", 0.5), ("story", 0.4), ("variables", 0.5), ("shopping", 0.6))
"""What the target can do by then; comparisons and long expressions take longest."""

RECIPES: dict[str, Recipe] = {
    "draft": Recipe(
        ModelConfig(
            hidden_size=64, num_layers=3, num_heads=1, num_kv_heads=1, intermediate_size=96
        ),
        steps=4600,  # it is meant to be wrong often: half-way down its schedule
        seed=1,
        stages=(Stage(0, Mixture(errors=0.05)),),
        schedule=((0, 0.02), (49, 1.0), (3000, 1.0), (6000, 0.0)),
        micro_batches=2,
        muon_rate=0.01,
        decay=0.1,
    ),
    # Few errors to correct until solving is learned; then more of them, and the draft's own.
    "target": Recipe(
        ModelConfig(
            hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2, intermediate_size=640
        ),
        steps=2400,
        seed=2,
        stages=(
            Stage(0, Mixture(errors=0.12)),
            Stage(900, Mixture(errors=0.2, kept=EASY)),
            Stage(1400, Mixture(errors=0.25, kept=EASY, drafted=0.15)),
            Stage(1900, Mixture(errors=0.25, kept=LEARNED, drafted=0.15)),
        ),
        schedule=((0, 0.02), (49, 1.0), (1300, 1.0), (2400, 0.0)),
        muon_rate=0.01,
        decay=0.1,
    ),
}


@dataclass(slots=True)
class Progress:
    """Where a run stands; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)


class Trainer:
    """One model in training; the same seed, thread count and machine kind give the same weights."""

    def __init__(self, name: str, recipe: Recipe, work: Path, encoder: Encoder) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.encoder = encoder
        self.checkpoint = work / f"{name}.pt"
        self.model = Llama(recipe.model)
        self.descent = Descent.of(self.model, recipe.muon_rate, recipe.adam_rate, recipe.decay)
        self.progress = Progress()

    def keep(self) -> None:
        """Write the state in one step, so that a kill leaves the old one or the new one."""
        part = self.checkpoint.with_suffix(".part")
        optimizers = [optimizer.state_dict() for optimizer, _ in self.descent.optimizers]
        plain = {"progress": asdict(self.progress), "recipe": asdict(self.recipe)}
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers, **plain}, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Take up a checkpoint if there is one; says whether it did."""
        if not self.checkpoint.exists():
            return False
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), stored in zip(
            self.descent.optimizers, state["optimizers"], strict=True
        ):
            optimizer.load_state_dict(stored)
        stored = state["progress"]
        self.progress = Progress(**stored | {"cursor": Cursor(**stored["cursor"])})
        return True

    def factor(self) -> float:
        """The learning rate now, as a share of its peak."""
        step = self.progress.step
        for (start, first), (stop, last) in pairwise(self.recipe.schedule):
            if step <= stop:
                return first + (last - first) * (step - start) / (stop - start)
        return 0.0

    @property
    def stage(self) -> Stage:
        """What is being learned now."""
        return self.recipe.stage(self.progress.step)

    def stream(self, errors: Errors) -> Iterator[tuple[Batch, Cursor]]:
        """The data from here on, as this stage wants it."""
        recipe = self.recipe
        return batches(
            self.encoder,
            self.stage.mixture,
            recipe.seed,
            self.progress.cursor,
            errors,
            recipe.micro_tokens,
        )

    def step(self, data: Iterator[tuple[Batch, Cursor]], workers: Workers) -> float:
        """One update; gives the loss before it."""
        progress = self.progress
        taken = [next(data) for _ in range(self.recipe.micro_batches)]
        loss = workers.backward([batch for batch, _ in taken])
        self.descent.apply(self.factor())
        progress.step += 1
        progress.tokens += sum(batch.ids.numel() for batch, _ in taken)
        progress.cursor = taken[-1][1]
        return loss


def train(name: str, recipe: Recipe, work: Path, models: Path) -> None:
    """Train or take up one model until its recipe ends, then save it."""
    trainer = Trainer(name, recipe, work, Encoder.open(models / name))
    log = partial(_say, work / f"{name}.jsonl")
    if trainer.resume():
        log(resumed=trainer.progress.step)
    progress = trainer.progress
    stage = None
    data = trainer.stream(())
    started = time.perf_counter() - progress.seconds
    before = (progress.tokens, progress.seconds)
    with Workers(trainer.model, recipe.workers) as workers:
        while progress.step < recipe.steps:
            if trainer.stage != stage:
                stage = trainer.stage
                data = trainer.stream(draft_errors(work, models) if stage.mixture.drafted else ())
            loss = trainer.step(data, workers)
            step = progress.step
            is_last = progress.step == recipe.steps
            progress.seconds = time.perf_counter() - started
            if step % _REPORT_EVERY == 0:
                speed = (progress.tokens - before[0]) / (progress.seconds - before[1])
                before = (progress.tokens, progress.seconds)
                told = {"loss": round(loss, 4), "rate": round(trainer.factor(), 4)}
                log(step=step, of=recipe.steps, tokens=progress.tokens, speed=round(speed), **told)
            if step % _KEEP_EVERY == 0 or is_last:
                trainer.keep()
            if step % _CHECK_EVERY == 0 or is_last:
                save(trainer.model, models / name, trainer.encoder.end, trainer.encoder.pad)
                log(step=step, **_checked(models / name))


def _checked(folder: Path) -> dict[str, object]:
    """Shares of problems that a saved model solves: of all, by level and by kind."""
    watch = exercises("calibration", 200, seed=77)
    texts = generate(folder, [prompt(one.text) for one in watch], temperature=0.7, seed=0)
    right = [(one, answer(text) == one.answer) for one, text in zip(watch, texts, strict=True)]
    levels = [
        fmean(mark for one, mark in right if one.level == n)
        for n in sorted({one.level for one in watch})
    ]
    kinds = {
        name: fmean(mark for one, mark in right if one.kind == name)
        for name in sorted({o.kind for o in watch})
    }
    shares = {name: round(value, 3) for name, value in kinds.items()}
    return {
        "pass@1": fmean(mark for _, mark in right),
        "levels": [round(one, 3) for one in levels],
        "kinds": shares,
    }


def _say(log: Path, **fields: object) -> None:
    line = json.dumps({"at": time.strftime("%H:%M:%S"), **fields})
    with log.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def draft_errors(work: Path, models: Path) -> Errors:
    """The draft's own mistakes on training problems, sampled once and kept in the work folder."""
    path = work / "draft_errors.json"
    tests = exercises("train", 3000, seed=991, levels=(1, 2, 3, 4, 4, 5, 5))
    if not path.exists():
        texts = generate(
            models / "draft", [prompt(item.text) for item in tests], temperature=0.8, seed=3
        )
        path.write_text(json.dumps(texts))
    pairs = [
        (item, text, first_wrong(item, text))
        for item, text in zip(tests, json.loads(path.read_text()), strict=True)
    ]
    found = [
        (item, tuple(chunked(text)), place) for item, text, place in pairs if place is not None
    ]
    Random(0).shuffle(found)
    return tuple(found)


def main() -> None:
    """Tokenizer, draft and target by default; a second call takes up where the first stopped."""
    parser = argparse.ArgumentParser(prog="scripts/train", description=main.__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        default=["tokenizer", "draft", "target"],
        help="tokenizer, draft, target, deep, heads",
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "train", help="checkpoints and logs"
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=ROOT / "atts" / "models",
        help="where the model folders are written",
    )
    parser.add_argument(
        "--steps", type=int, help="another number of steps than the recipe's (other weights)"
    )
    parser.add_argument(
        "--target", type=Path, help="of heads: another model's folder than the embedded target's"
    )
    parser.add_argument("--drafter", type=Path, help="of heads: another than the embedded draft's")
    parser.add_argument(
        "--prompts", type=Path, help="of heads: a file with a prompt a line, instead of arithmetic"
    )
    found = parser.parse_args()
    work = found.work
    models = found.models
    work.mkdir(parents=True, exist_ok=True)
    for part in found.parts:
        if part == "tokenizer":
            for name in RECIPES:
                build_tokenizer(models / name)
        elif part == "heads":
            target = found.target or models / "target"
            drafter = found.drafter or models / "draft"
            train_exit_and_streams(HeadsRecipe(target, drafter, found.prompts))
        elif part == "deep":
            train_deep_drafter(DrafterRecipe(models / "target", models / "draft", models / "deep"))
        else:
            recipe = RECIPES[part]
            train(
                part,
                recipe if found.steps is None else replace(recipe, steps=found.steps),
                work,
                models,
            )


if __name__ == "__main__":
    main()
