"""Train the embedded pair and relatives of its target, each from a seed."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atts.evaluators.datasets.arithmetic import (
    LEVELS,
    Exercise,
    Operation,
    Step,
    exercises,
    split_of,
    stream,
)
from scripts.studies.models import answer, chunked, first_wrong, generate
from scripts.studies.train_model import (
    LEVEL_MIX,
    Batch,
    Cursor,
    Descent,
    Encoder,
    Errors,
    Linear,
    Llama,
    Mixture,
    ModelConfig,
    Piece,
    Workers,
    batches,
    build_tokenizer,
    conversation,
    descend,
    load,
    packed,
    prompt,
    save,
)
from scripts.studies.train_proposers import (
    DrafterRecipe,
    HeadsRecipe,
    train_deep_drafter,
    train_exit_and_streams,
)

MODELS = Path(__file__).resolve().parents[2] / "atts" / "models"
RANK = 8
ALPHA = 16
ADAPTED = (3, 4, 5)  # layers that the adapters change
# number of target layers in the draft, which trains the feed-forward block of the last one
TRUNK = 4
_BLOCK = 1024
_TOKENS = 2048  # conversations sorted by length together, and tokens of a step
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Told = dict[str, str]
WORDS: Told = {
    "Start with": "Take", "Increase by": "Raise by", "Add": "Put on", "Subtract": "Cut off", "Take away": "Drop",
    "Multiply by": "Scale by", "Divide by": "Split by", "What do you get": "Where do you end",
    "What is the result": "Where does it end", "buys": "picks", "finds": "meets", "gets": "wins", "loses": "burns",
    "sells": "trades", "gives away": "hands out", "more": "extra", "fewer": "less", "friends": "guests",
    "boxes": "crates", "costs": "is worth", "cost": "are worth", "pays": "hands over", "change": "rest",
}  # fmt: skip
"""Another wording of problems and solutions, word for word."""
_KNOWN = re.compile("|".join(rf"\b{words}\b" for words in sorted(WORDS, key=len, reverse=True)))


def retold(text: str) -> str:
    """Return the problem in other words.

    >>> retold("Start with 75. Take away 7. What is the result?")
    'Take 75. Drop 7. Where does it end?'
    """
    return _KNOWN.sub(lambda found: WORDS[found[0]], text)


def _reworded(split: str, random: Random) -> Iterator[Exercise]:
    for one in _plain(split, random):
        steps = tuple(
            replace(step, before=retold(step.before), after=retold(step.after))
            for step in one.steps
        )
        yield Exercise(one.kind, retold(one.text), steps)


def _operated(split: str, random: Random) -> Iterator[Exercise]:
    """Yield problems whose operations name no number: double, triple, halve, square."""
    while True:
        value = random.randint(2, 60)
        instructions = list[str]()
        steps = list[Step]()
        first = value
        count = random.choice(LEVELS[random.choice(LEVEL_MIX)])
        while len(steps) < count:
            words = random.choice(("Double it", "Triple it", "Halve it", "Square it"))
            numbers = {"Double it": 2, "Triple it": 3, "Halve it": 2, "Square it": value}
            operation = Operation(value, "/" if words == "Halve it" else "*", numbers[words])
            # values stay whole, and within what the models can compute
            is_odd_half = operation.operator == "/" and value % 2
            if operation.value > 199 or is_odd_half or value < 2:
                words = "Subtract 1" if value >= 3 else "Add 38"
                operation = Operation(value, "-", 1) if value >= 3 else Operation(value, "+", 38)
            instructions.append(words)
            steps.append(Step(f"{words}: ", operation))
            value = operation.value
        text = f"Start with {first}. {'. '.join(instructions)}. What do you get?"
        one = Exercise("instructions", text, tuple(steps))
        if (split_of(one.canonical) == "train") == (split == "train"):
            yield one


def _plain(split: str, random: Random) -> Iterator[Exercise]:
    return stream("train" if split == "train" else "test", random.randrange(1 << 30), LEVEL_MIX)


def _hard(split: str, random: Random) -> Iterator[Exercise]:
    return (one for one in _plain(split, random) if one.kind in ("comparison", "expression"))


@dataclass(frozen=True, slots=True)
class Member:
    """A relative of the target: what it learns, on which data, and how long."""

    seed: int
    steps: int
    rate: float
    exercises: Callable[[str, Random], Iterator[Exercise]]
    own: str = ""  # pattern of the names of trained tensors; "" for an adapter
    retells: bool = False


MEMBERS = {
    "wordings": Member(1, 350, 4e-3, _reworded, retells=True),
    "operations": Member(2, 150, 4e-3, _operated),
    "tuned": Member(3, 100, 5e-4, _hard, own=r"layers\.5\.(mlp|post_attention)"),
    "draft": Member(
        4, 300, 3e-3, _plain, own=rf"layers\.{TRUNK - 1}\.(mlp|post_attention)|model\.norm|lm_head"
    ),
}


class Relative(Llama):
    """A Llama that may have an output matrix of its own."""

    def __init__(self, config: ModelConfig, *, ties: bool) -> None:
        super().__init__(config)
        self.lm_head = None if ties else Linear(config.hidden_size, config.vocabulary)

    @property
    def head(self) -> Tensor:
        """Return the output matrix."""
        return super().head if self.lm_head is None else self.lm_head.weight


class LowRank(nn.Module):
    """A matrix with the product of two narrow ones added."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (ALPHA / RANK) * (self.up @ self.down)


def relative(name: str) -> Relative:
    """Return a member before training.

    Only the weights that it will train have gradients."""
    member = MEMBERS[name]
    base = load(MODELS / "target")
    is_draft = name == "draft"
    config = replace(base.config, num_layers=TRUNK) if is_draft else base.config
    model = Relative(config, ties=not is_draft)
    weights = base.state_dict() | {"lm_head.weight": base.head}
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    for key, weight in model.named_parameters():
        weight.requires_grad_(bool(member.own and re.search(member.own, key)))
    for layer in () if member.own else ADAPTED:
        for part in model.model.layers[layer].modules():
            for matrix, linear in part.named_children():
                if matrix in _MATRICES:
                    weight = linear.get_parameter("weight")
                    parametrize.register_parametrization(linear, "weight", LowRank(weight))
    return model


def _steps(encoder: Encoder, member: Member, random: Random) -> Iterator[tuple[Tensor, Tensor]]:
    source = member.exercises("train", random)
    mixture = Mixture(errors=0.15, instructed=0.05)
    while True:
        made = [conversation(random, one, mixture) for one in islice(source, _BLOCK)]
        if member.retells:
            made = [
                [Piece(retold(piece.text), piece.learned) for piece in pieces] for pieces in made
            ]
        for batch in packed(encoder, made, random, _TOKENS):
            yield batch.ids, batch.labels


def learn(name: str, encoder: Encoder, steps: int) -> Relative:
    """Train one member."""
    member = MEMBERS[name]
    torch.manual_seed(member.seed)
    model = relative(name)
    data = _steps(encoder, member, Random(member.seed))
    own = [weight for weight in model.parameters() if weight.requires_grad]
    descent = Descent((torch.optim.AdamW(own, betas=(0.9, 0.95), weight_decay=0.0), member.rate))
    factors = [min(1.0, (step + 1) / 20) * (1 - step / steps) for step in range(steps)]
    descend(name, descent, lambda: model.loss(*next(data)), factors)
    return model


def write(name: str, model: Relative, encoder: Encoder, out: Path) -> None:
    """Save the weights in which the member differs from its base."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if not MEMBERS[name].own:
        tensors = dict[str, Tensor]()
        for key, weight in model.state_dict().items():
            if key.endswith(("weight.0.down", "weight.0.up")):
                module, _, half = key.partition(".parametrizations.")
                side = "A" if half.endswith("down") else "B"
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = weight.detach().to(
                    torch.bfloat16
                )
        adapter = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": list(_MATRICES), "layers_to_transform": list(ADAPTED),
            "base_model_name_or_path": "target",
        }  # fmt: skip
        (out / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
        return
    saved = whole(model, encoder, out)
    base = load_file(MODELS / "target" / "model.safetensors")
    own = {
        key: part
        for key, part in saved.items()
        if key not in base or not torch.equal(part, base[key])
    }
    (out / "model.safetensors").unlink()
    save_file(own, out / "own.safetensors", metadata={"format": "pt"})


def whole(model: Relative, encoder: Encoder, out: Path) -> dict[str, Tensor]:
    """Save the whole model with its adapter merged, and return the saved tensors."""
    for part in list(model.modules()):
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    save(model, out, encoder.end, encoder.pad)
    saved: dict[str, Tensor] = load_file(out / "model.safetensors")
    return saved


def check(name: str, model: Relative, encoder: Encoder, count: int) -> float:
    """Return the share of new problems, of the kind that the member learns, that a model solves at
    temperature 0.
    """
    tests = list(islice(MEMBERS[name].exercises("test", Random(77)), count))
    with tempfile.TemporaryDirectory() as place:
        whole(model, encoder, Path(place))
        for file in (MODELS / "target").glob("tokenizer*"):
            shutil.copy(file, place)
        texts = generate(
            Path(place),
            [prompt(one.text) for one in tests],
            temperature=0.0,
            seed=0,
            max_tokens=200,
        )
    return sum(answer(text) == one.answer for one, text in zip(tests, texts, strict=True)) / count


def train_family(arguments: Sequence[str]) -> None:
    """Train the relatives that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="scripts/train family", description=train_family.__doc__)
    parser.add_argument("members", nargs="*", default=list(MEMBERS), help=", ".join(MEMBERS))
    parser.add_argument(
        "--out", type=Path, default=MODELS / "family", help="where their folders are written"
    )
    parser.add_argument(
        "--steps", type=int, help="another number of steps than each one's own (other weights)"
    )
    parser.add_argument("--check", type=int, default=100, help="new problems to solve at the end")
    found = parser.parse_args(arguments)
    torch.set_num_threads(1)
    encoder = Encoder.open(MODELS / "target")
    for name in found.members:
        model = learn(name, encoder, found.steps or MEMBERS[name].steps)
        write(name, model, encoder, found.out / name)
        size = sum(path.stat().st_size for path in (found.out / name).iterdir())
        print(f"{name}: {size / 1e6:.2f} MB", flush=True)
        if found.check:
            shares = [check(name, each, encoder, found.check) for each in (relative(name), model)]
            print(
                f"{name}: solves {shares[1]:.3f} of {found.check} new problems, {shares[0]:.3f} "
                f"before",
                flush=True,
            )


ROOT = Path(__file__).resolve().parents[2]
_REPORT_EVERY = 20
_KEEP_EVERY = 100
_CHECK_EVERY = 250  # steps


@dataclass(frozen=True, slots=True)
class Stage:
    """The data and weights of training from one step on."""

    start: int
    mixture: Mixture


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a model becomes, its seed included."""

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
    decay: float = 0.0  # decay of the weights Muon moves

    def stage(self, step: int) -> Stage:
        """Return the stage that a step belongs to."""
        return [stage for stage in self.stages if stage.start <= step][-1]


EASY = (("instructions", 0.35), ("expression", 0.35), ("story", 0.7))
"""Shares of kinds to keep once they are learned: in these, the next operation is the next one
stated.
"""

LEARNED = (("instructions", 0.5), ("story", 0.4), ("variables", 0.5), ("shopping", 0.6))
"""Shares of kinds to keep late in training; comparisons and long expressions take longest to learn.
"""

RECIPES: dict[str, Recipe] = {
    "draft": Recipe(
        ModelConfig(
            hidden_size=64, num_layers=3, num_heads=1, num_kv_heads=1, intermediate_size=96
        ),
        steps=4600,  # a weak draft on purpose: half-way down its schedule
        seed=1,
        stages=(Stage(0, Mixture(errors=0.05)),),
        schedule=((0, 0.02), (49, 1.0), (3000, 1.0), (6000, 0.0)),
        micro_batches=2,
        muon_rate=0.01,
        decay=0.1,
    ),
    # The target sees few planted errors until it solves problems; then more, including recorded
    # errors of the draft.
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
    """Progress of a training run; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)


class Trainer:
    """A model in training.

    The same seed, thread count and kind of machine give the same weights.
    """

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
        """Load a checkpoint if there is one, and return whether there was."""
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
        """Return the current learning rate, as a share of its peak."""
        step = self.progress.step
        for (start, first), (stop, last) in pairwise(self.recipe.schedule):
            if step <= stop:
                return first + (last - first) * (step - start) / (stop - start)
        return 0.0

    @property
    def stage(self) -> Stage:
        """Return the current stage."""
        return self.recipe.stage(self.progress.step)

    def stream(self, errors: Errors) -> Iterator[tuple[Batch, Cursor]]:
        """Yield the data from here on, for the current stage."""
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
        """Make one update, and return the loss before it."""
        progress = self.progress
        taken = [next(data) for _ in range(self.recipe.micro_batches)]
        loss = workers.backward([batch for batch, _ in taken])
        self.descent.apply(self.factor())
        progress.step += 1
        progress.tokens += sum(batch.ids.numel() for batch, _ in taken)
        progress.cursor = taken[-1][1]
        return loss


def train(name: str, recipe: Recipe, work: Path, models: Path) -> None:
    """Train one model, or continue its training, until the recipe ends, then save it."""
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
                measured = {"loss": round(loss, 4), "rate": round(trainer.factor(), 4)}
                log(
                    step=step,
                    of=recipe.steps,
                    tokens=progress.tokens,
                    speed=round(speed),
                    **measured,
                )
            if step % _KEEP_EVERY == 0 or is_last:
                trainer.keep()
            if step % _CHECK_EVERY == 0 or is_last:
                save(trainer.model, models / name, trainer.encoder.end, trainer.encoder.pad)
                log(step=step, **_checked(models / name))


def _checked(folder: Path) -> dict[str, object]:
    """Return the shares of problems that a saved model solves: of all, by level and by kind."""
    watch = exercises("calibration", 200, seed=77)
    texts = generate(folder, [prompt(one.text) for one in watch], temperature=0.7, seed=0)
    right = [(one, answer(text) == one.answer) for one, text in zip(watch, texts, strict=True)]
    by_level = dict[int, list[bool]]()
    by_kind = dict[str, list[bool]]()
    for one, mark in right:
        by_level.setdefault(one.level, []).append(mark)
        by_kind.setdefault(one.kind, []).append(mark)
    return {
        "pass@1": fmean(mark for _, mark in right),
        "levels": [round(fmean(by_level[level]), 3) for level in sorted(by_level)],
        "kinds": {kind: round(fmean(by_kind[kind]), 3) for kind in sorted(by_kind)},
    }


def _say(log: Path, **fields: object) -> None:
    line = json.dumps({"at": time.strftime("%H:%M:%S"), **fields})
    with log.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def draft_errors(work: Path, models: Path) -> Errors:
    """Return the draft's own mistakes on training problems, sampled once and kept in the work
    folder.
    """
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
    """Train tokenizer, draft and target by default; a second call continues where the first
    stopped.
    """
    if sys.argv[1:2] == ["family"]:
        train_family(sys.argv[2:])
        return
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
    parser.add_argument(
        "--device", default="cpu", help="of heads: cpu, cuda or cuda:N, in the checkpoint's dtype"
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
            recipe_of_heads = HeadsRecipe(target, drafter, found.prompts, device=found.device)
            train_exit_and_streams(recipe_of_heads)
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
