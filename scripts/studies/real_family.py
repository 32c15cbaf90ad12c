"""Measure a zoo of relatives of a real model: adapters and a copy with other last layers, trained here."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from atts.accel import Zoo
from atts.evaluators.datasets.arithmetic import Exercise, Split, exercises
from scripts.studies.blocks import LENGTH, PROMPT, TENANTS, Arm, at_once
from scripts.studies.harness import Options, Row, Table, say
from scripts.studies.real_models import MODELS, CannotBeMadeError, folder_of
from scripts.studies.train import ALPHA, RANK, LowRank

MODEL = "REAL_FAMILY"
"""Environment variable: the key of the model in `real_models`, smollm2 where it is not set."""
ADAPTED = ("q_proj", "v_proj")
OWN_LAYERS = 2
BATCH = 8
LONGEST = 128  # tokens of a text
HELD_OUT = 4  # batches
RATE = 1e-3  # step size of adapters; whole layers take a tenth


@dataclass(frozen=True, slots=True)
class Lesson:
    """Generated arithmetic, as the answer alone or as a worked solution."""

    what: str
    is_worked: bool
    seed: int

    def told(self, exercise: Exercise) -> str:
        """Return what is to be written after the question."""
        return exercise.solution if self.is_worked else str(exercise.answer)

    def batches(self, tokenizer: Any, split: Split, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return so many batches of ids and of labels; -100 is where nothing is to be learnt."""
        found = exercises(split, count * BATCH, self.seed, levels=(1, 2))
        made: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(found), BATCH):
            ids = torch.zeros(BATCH, LONGEST, dtype=torch.long)
            labels = torch.full_like(ids, -100)
            for row, exercise in enumerate(found[first : first + BATCH]):
                asked = tokenizer.apply_chat_template(
                    [{"role": "user", "content": exercise.text}],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                begin = tokenizer.encode(asked, add_special_tokens=False)
                rest = tokenizer.encode(self.told(exercise), add_special_tokens=False)
                text = torch.tensor((begin + rest)[:LONGEST])
                ids[row, : len(text)] = text
                labels[row, len(begin) : len(text)] = text[len(begin) :]
            made.append((ids, labels))
        return made


LESSONS = {
    "adapter-1": Lesson("adapter of every layer, the answer alone", is_worked=False, seed=1),
    "adapter-2": Lesson("adapter of every layer, worked solutions", is_worked=True, seed=2),
    "tuned": Lesson(f"last {OWN_LAYERS} layers, worked solutions", is_worked=True, seed=3),
}


def study(options: Options) -> list[Table]:
    """Train the relatives of a real model, and compare their zoo with an engine for each.

    :raises SystemExit: the model cannot be had.
    """
    key = os.environ.get(MODEL, "smollm2")
    if key not in MODELS:
        raise SystemExit(f"{MODEL}={key}: expected one of {', '.join(MODELS)}")
    try:
        base = folder_of(key)
    except CannotBeMadeError as error:
        raise SystemExit(f"the model cannot be had: {error}") from error
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        zoo = Zoo(Path(scratch) / "zoo")
        zoo.add("base", base)
        learnt = relatives(base, Path(scratch), zoo, options.pick(2, 40, 200))
        contents = zoo.show()
        one, four = (Arm(zoo, shares=shares) for shares in (True, False))
        speeds, _ = at_once(one, four, options.pick(1, 5, 11))
    name = MODELS[key].name
    return [
        learnt,
        Table.of(
            f"Relatives of {name} at once, in one loop and apart",
            "requests of each | arm | tokens/s | to four engines | weights MB",
            speeds,
            f"{', '.join(TENANTS)}; {PROMPT} tokens in, {LENGTH} out; processor time of one core. The "
            f"zoo takes {contents.stored / 1e6:.1f} MB of disk, the models apart "
            f"{contents.apart / 1e6:.1f} MB.",
        ),
    ]


def relatives(base: Path, scratch: Path, zoo: Zoo, steps: int) -> Table:
    """Train every relative, add it to the zoo, and return what each has learnt."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    rows: list[Row] = []
    for name, lesson in LESSONS.items():
        began = time.process_time()
        is_adapter = name != "tuned"
        model = opened(base)
        own = adapted(model) if is_adapter else last_layers(model)
        held_out = lesson.batches(tokenizer, "test", HELD_OUT)
        before = loss(model, held_out)
        train(
            model, own, lesson.batches(tokenizer, "train", steps), RATE / (1 if is_adapter else 10)
        )
        after = loss(model, held_out)
        folder = scratch / name
        if is_adapter:
            save_adapter(model, folder)
            zoo.add(name, folder, "base")
        else:
            save_layers(own, base, folder)
            zoo.add(name, folder)
        seconds = time.process_time() - began
        count = sum(weight.numel() for weight in own.values())
        say(f"{name}: {before:.3f} to {after:.3f} in {seconds:.0f} s of processor time")
        rows.append((name, lesson.what, count / 1e6, before, after, round(seconds)))
    return Table.of(
        "Relatives trained here",
        "model | what it is | million weights of its own | loss before, nats a token | after | "
        "processor seconds",
        rows,
        f"{steps} steps of {BATCH} generated problems; adapters of rank {RANK}. The loss is that of "
        f"{HELD_OUT * BATCH} problems of another split.",
    )


def opened(base: Path) -> Any:
    """Return the model in float32, none of its weights with a gradient."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for weight in model.parameters():
        weight.requires_grad = False
    return model


def adapted(model: nn.Module) -> dict[str, nn.Parameter]:
    """Add an adapter to the adapted matrices of every layer, and return its weights."""
    torch.manual_seed(0)
    own: dict[str, nn.Parameter] = {}
    for name, part in list(model.named_modules()):
        if name.endswith(ADAPTED) and isinstance(part, nn.Linear):
            added = LowRank(part.weight)
            parametrize.register_parametrization(part, "weight", added)
            own |= {f"{name}.up": added.up, f"{name}.down": added.down}
    return own


def last_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give the weights of the last layers gradients, and return them."""
    names = [name for name, _ in model.named_parameters() if name.startswith("model.layers.")]
    last = max(int(name.split(".")[2]) for name in names)
    chosen = [f"model.layers.{last - back}." for back in range(OWN_LAYERS)]
    own = {
        name: weight for name, weight in model.named_parameters() if name.startswith(tuple(chosen))
    }
    for weight in own.values():
        weight.requires_grad = True
    return own


def train(
    model: Any,
    own: Mapping[str, nn.Parameter],
    batches: Sequence[tuple[Tensor, Tensor]],
    rate: float,
) -> None:
    """Take one step of AdamW on each batch."""
    optimizer = torch.optim.AdamW(own.values(), lr=rate, weight_decay=0.0)
    model.train()
    for ids, labels in batches:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.inference_mode()
def loss(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss per token of what is to be learnt."""
    total = 0.0
    count = 0
    for ids, labels in batches:
        learnt = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * learnt
        count += learnt
    return total / count


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write a trained adapter as peft does."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, LowRank):
            inner = f"base_model.model.{name.removesuffix('.parametrizations.weight.0')}"
            tensors[f"{inner}.lora_A.weight"] = part.down.detach().contiguous()
            tensors[f"{inner}.lora_B.weight"] = part.up.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(ADAPTED),
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def save_layers(own: Mapping[str, nn.Parameter], base: Path, folder: Path) -> None:
    """Write a copy of the model with these weights, in the type of the copy."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(base / "model.safetensors")
    for name, weight in own.items():
        weights[name] = weight.detach().to(weights[name].dtype).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
