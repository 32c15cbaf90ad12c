"""Trains a deep and narrow drafter, with groups of attentions to form, on what the target writes
and its laws there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import anyio
import torch
import torch.nn.functional as F
from torch import Tensor

from atts.core import TokenIds
from scripts.studies.train_heads import HeadsRecipe, Reader, Text, write_texts
from scripts.studies.train_model import Descent, Llama, ModelConfig, descend, load, save

_SHAPE = ModelConfig(
    hidden_size=64,
    num_layers=8,
    num_heads=1,
    num_kv_heads=1,
    intermediate_size=96,
    vocabulary=512,
    head_dim=32,
)
_TOKENS = 2048
_WARM = 40
_EVEN = 1.6  # of a step; steps until the rates are reached; they fall when 1 / 1.6 is left
_MUON = 0.01
_ADAM = 0.004
_DECAY = 0.1
_TESTED = 0.03  # share of the texts that nothing is learned from


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """What the drafter is made from."""

    target: Path
    draft: Path
    out: Path
    texts: int = 6000
    steps: int = 6000
    seed: int = 8


class Lesson(NamedTuple):
    """A text of the target's, and the states that its output matrix read at every token written."""

    ids: TokenIds
    first: int  # where writing begins
    states: Tensor


def begun(draft: Llama) -> Llama:
    """A model with the draft's embedding, its feed-forward blocks and norms spread among the
    layers; else random.
    """
    model = Llama(_SHAPE)
    last = _SHAPE.num_layers - 1
    for at, layer in enumerate(draft.model.layers):
        own = model.model.layers[round(at * last / (len(draft.model.layers) - 1))]
        kept = {
            name: weight
            for name, weight in layer.state_dict().items()
            if not name.startswith("self_attn")
        }
        own.load_state_dict(kept, strict=False)
    model.model.embed_tokens.load_state_dict(draft.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(draft.model.norm.state_dict())
    return model


def lessons(reader: Reader, texts: Sequence[Text]) -> list[Lesson]:
    """What is to be learned of each text."""
    return [Lesson(*text, reader.states([text], 1).finals.bfloat16()) for text in texts]


def _batches(found: Sequence[Lesson], random: Random) -> Iterator[list[Lesson]]:
    """Texts of like length, of so many tokens together, without end."""
    while True:
        order = sorted(found, key=lambda one: (len(one.ids), random.random()))
        batches = list[list[Lesson]]()
        while order:
            count = max(1, _TOKENS // len(order[min(len(order), 8) - 1].ids))
            batches.append(order[:count])
            del order[:count]
        random.shuffle(batches)
        yield from batches


def _laws(model: Llama, batch: Sequence[Lesson]) -> Tensor:
    """Its law at every token that was written, in logarithms."""
    compute = torch.bfloat16
    width = max(len(one.ids) for one in batch) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids) - 1] = torch.tensor(one.ids[:-1])
    state = model.states(ids, model.where(width, compute))[-1]
    read = [state[row, one.first - 1 : len(one.ids) - 1] for row, one in enumerate(batch)]
    return F.log_softmax(model.logits(torch.cat(read), compute), -1)


def _aims(head: Tensor, batch: Sequence[Lesson]) -> Tensor:
    """The target's."""
    return F.log_softmax(F.linear(torch.cat([one.states for one in batch]), head).float(), -1)


def learn(model: Llama, head: Tensor, found: Sequence[Lesson], recipe: DrafterRecipe) -> None:
    """Lead its laws to the target's."""
    data = _batches(found, Random(recipe.seed))
    steps = recipe.steps

    def loss() -> Tensor:
        batch = next(data)
        return F.kl_div(
            _laws(model, batch), _aims(head, batch), log_target=True, reduction="batchmean"
        )

    factors = [
        min(1.0, (step + 1) / _WARM) * min(1.0, _EVEN * (1 - step / steps)) for step in range(steps)
    ]
    descend("deep", Descent.of(model, _MUON, _ADAM, _DECAY), loss, factors)


@torch.inference_mode()
def agreement(model: Llama, head: Tensor, found: Sequence[Lesson]) -> tuple[float, float]:
    """How often its likeliest token is the target's, and the mean divergence from the target's law."""
    same = 0.0
    apart = 0.0
    count = 0
    for start in range(0, len(found), 8):
        batch = found[start : start + 8]
        law = _laws(model, batch)
        aim = _aims(head, batch)
        same += float((law.argmax(-1) == aim.argmax(-1)).sum())
        apart += float(F.kl_div(law, aim, log_target=True, reduction="sum"))
        count += len(aim)
    return same / count, apart / count


def main(recipe: DrafterRecipe) -> None:
    """Write texts, train, save a complete folder, and say what came of it on texts kept apart."""
    torch.set_num_threads(1)
    texts = anyio.run(
        write_texts, HeadsRecipe(recipe.target, recipe.draft, texts=recipe.texts, seed=recipe.seed)
    )
    Random(recipe.seed).shuffle(texts)
    reader = Reader(recipe.target)
    kept = max(1, round(_TESTED * len(texts)))
    tested, learned = (lessons(reader, part) for part in (texts[:kept], texts[kept:]))
    torch.manual_seed(recipe.seed)
    head = reader.weights.head.bfloat16()
    draft = load(recipe.draft)
    model = begun(draft)
    learn(model, head, learned, recipe)
    save(model, recipe.out, reader.config.end_ids[0], 0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(recipe.draft / name, recipe.out / name)
    tokens = sum(len(one.states) for one in learned), sum(len(one.states) for one in tested)
    print(f"{recipe.out}: {tokens[0]} tokens learned, {tokens[1]} tested")
    for name, each in (("draft", draft), ("deep", model)):
        print(
            "{}: likeliest token agrees in {:.4f}, {:.4f} nats apart".format(
                name, *agreement(each, head, tested)
            )
        )
