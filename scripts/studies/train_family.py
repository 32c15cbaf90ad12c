"""Trains relatives of the embedded target: two adapters, one with a tuned block, and a draft on the
target's trunk.

Each is learned on one thread in minutes, from a seed. What is saved is only what differs from the
target: adapters in peft's layout, else the tensors of their own and the configuration.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atts.evaluators.datasets.arithmetic import LEVELS, Exercise, Operation, Step, split_of, stream
from scripts.studies.models import answer, generate
from scripts.studies.train_data import (
    LEVEL_MIX,
    Encoder,
    Mixture,
    Piece,
    conversation,
    packed,
    prompt,
)
from scripts.studies.train_model import Descent, Linear, Llama, ModelConfig, descend, load, save

MODELS = Path(__file__).resolve().parents[2] / "atts" / "models"
RANK = 8
ALPHA = 16
ADAPTED = (3, 4, 5)  # of adapters, and the layers that they change
# layers of the target that the draft is made of; the last one's feed-forward block is its own
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
    """The same in other words.

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
    """Problems whose operations name no number: double, triple, halve, square."""
    while True:
        value = random.randint(2, 60)
        told = list[str]()
        steps = list[Step]()
        first = value
        count = random.choice(LEVELS[random.choice(LEVEL_MIX)])
        while len(steps) < count:
            told.append(random.choice(("Double it", "Triple it", "Halve it", "Square it")))
            number = value if told[-1] == "Square it" else 3 if told[-1] == "Triple it" else 2
            operation = Operation(value, "/" if told[-1] == "Halve it" else "*", number)
            if operation.value > 199 or (operation.operator == "/" and value % 2) or value < 2:
                told[-1] = "Subtract 1"
                operation = Operation(value, "-", 1)
                if value < 3:
                    told[-1] = "Add 38"
                    operation = Operation(value, "+", 38)
            steps.append(Step(f"{told[-1]}: ", operation))
            value = operation.value
        one = Exercise(
            "instructions", f"Start with {first}. {'. '.join(told)}. What do you get?", tuple(steps)
        )
        if (split_of(one.canonical) == "train") == (split == "train"):
            yield one


def _plain(split: str, random: Random) -> Iterator[Exercise]:
    return stream("train" if split == "train" else "test", random.randrange(1 << 30), LEVEL_MIX)


def _hard(split: str, random: Random) -> Iterator[Exercise]:
    return (one for one in _plain(split, random) if one.kind in ("comparison", "expression"))


@dataclass(frozen=True, slots=True)
class Member:
    """One relative: what it learns, on what, and how long."""

    seed: int
    steps: int
    rate: float
    exercises: Callable[[str, Random], Iterator[Exercise]]
    own: str = ""  # pattern of the names of the tensors that are its own; none: it is an adapter
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
        """The output matrix."""
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
    """A member before it has learned anything: only what will be its own has gradients."""
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
    """Save what is the member's own."""
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
        said = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": list(_MATRICES), "layers_to_transform": list(ADAPTED),
            "base_model_name_or_path": "target",
        }  # fmt: skip
        (out / "adapter_config.json").write_text(json.dumps(said, indent=2) + "\n")
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
    """Save all of a model, what is added to its matrices merged into them; the saved tensors."""
    for part in list(model.modules()):
        if parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
    save(model, out, encoder.end, encoder.pad)
    saved: dict[str, Tensor] = load_file(out / "model.safetensors")
    return saved


def check(name: str, model: Relative, encoder: Encoder, count: int) -> float:
    """The share of new problems of a member's own kind that a model solves at temperature 0."""
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


def main() -> None:
    """Train all members, or those that are named."""
    parser = argparse.ArgumentParser(prog="scripts/train family", description=main.__doc__)
    parser.add_argument("members", nargs="*", default=list(MEMBERS), help=", ".join(MEMBERS))
    parser.add_argument(
        "--out", type=Path, default=MODELS / "family", help="where their folders are written"
    )
    parser.add_argument(
        "--steps", type=int, help="another number of steps than each one's own (other weights)"
    )
    parser.add_argument("--check", type=int, default=100, help="new problems to solve at the end")
    found = parser.parse_args()
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


if __name__ == "__main__":
    main()
